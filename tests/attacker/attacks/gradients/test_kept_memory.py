"""Tests that freed memory stays in the process with glibc, unless an environment variable configures the allocator."""

import subprocess
import sys

import pytest

from attacker.attacks.gradients import hardware as kept_memory

PROBE = f"""
import resource, runpy
keep = runpy.run_path({kept_memory.__file__!r})["keep_freed_memory"]
kept = {{call}} and keep()
def work():
    return len([b"x" * (i << 18) for i in range(9, 17)])
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    work()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, call: bool, **environment: str) -> tuple[bool, int]:
    """Run three rounds that allocate 25 MiB in a new process, and count page faults; if `call`, call keep_freed_memory first."""
    run = [sys.executable, "-c", PROBE.format(call=call)]
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
