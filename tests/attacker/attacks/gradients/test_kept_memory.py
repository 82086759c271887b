"""Tests that freed memory stays in the process with glibc, unless an environment variable configures the allocator."""

import subprocess
import sys

import pytest

from attacker.attacks.gradients import hardware as kept_memory

PROBE = f"""
import resource, runpy, sys, types
sys.modules["torch"] = types.SimpleNamespace(dtype=object)  # the function does without PyTorch, whose import takes seconds
keep = runpy.run_path({kept_memory.__file__!r})["keep_freed_memory"]
kept = {{call}} and keep({{largest}})
def work():
    return len([b"x" * (i << {{shift}}) for i in range(9, 17)])
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    work()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, call: bool, shift: int = 18, largest: int = 0, **environment: str) -> tuple[bool, int]:
    """Run three rounds of allocations in a new process, and count page faults; if `call`, call keep_freed_memory(largest) first.

    The allocations are 9 to 16 times 2 ** shift bytes: 25 MiB together for 18, and for 21 blocks of 18 to 32 MiB.
    """
    run = [sys.executable, "-c", PROBE.format(call=call, shift=shift, largest=largest)]
    answer = subprocess.run(run, env={"PATH": "/usr/bin", **environment}, capture_output=True, text=True, check=True)
    kept, count = answer.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_is_reused_unless_the_environment_configures_malloc() -> None:
    without, kept = faults(call=False), faults(call=True)
    if not kept[0]:
        pytest.skip("another C library than glibc")
    assert kept[1] < without[1] / 10
    assert not faults(call=True, MALLOC_ARENA_MAX="2")[0]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_of_blocks_above_the_largest_threshold_is_reused_only_if_they_are_announced() -> None:
    default, announced = faults(call=True, shift=21), faults(call=True, shift=21, largest=32 << 20)
    if not default[0]:
        pytest.skip("another C library than glibc")
    assert announced[0]
    assert announced[1] < default[1] / 10
