"""Tests of what depends on the processor: searches that begin in bfloat16, and freed memory that stays in the process.

Gradients in bfloat16 are close to float32, and results are from float32 steps. Freed memory stays with glibc, unless an
environment variable configures the allocator.
"""

import subprocess
import sys

import pytest
import torch
from observations import observe_steps

from attacker.attacks.cases import Case
from attacker.attacks.gradients import hardware as kept_memory
from attacker.attacks.gradients import hardware as precision
from attacker.attacks.gradients.vectorised import build_per_problem, split_problems
from attacker.attacks.matching import case_batch
from attacker.attacks.papers.agic import agic, agic_of_one_round
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=5)
RESNET, LENET = ModelSpec(name="resnet20_4"), ModelSpec(name="lenet_cpl")
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


def test_gradients_in_bfloat16_are_near_those_in_float32_and_not_the_same() -> None:
    model = models.build(RESNET, DATA, seed=0).eval()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    gradient = build_per_problem(model, DATA, "cross_entropy")
    assert gradient is not None
    x, y = torch.rand(2, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([[1], [3]])
    exact, coarse = (split_problems(gradient(weights, x, y, precision=one))[1] for one in (None, torch.bfloat16))
    assert {t.dtype for t in coarse.values()} == {torch.float32}
    flat, near = (torch.cat([t.flatten() for t in g.values()]) for g in (exact, coarse))
    assert 1e-4 < float((flat - near).norm() / flat.norm()) < 0.1


def test_only_the_first_share_of_the_steps_is_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_batch, "get_fast_dtype", lambda device: torch.bfloat16)
    batches = [(torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(i)), torch.tensor([i])) for i in range(2)]
    cases = [Case((observe_steps(batch, model=LENET, data=DATA, client=f"c{i}"),)) for i, batch in enumerate(batches)]
    attack = agic_of_one_round(steps=4).copy_with(coarse=0.5)
    seen: list[torch.dtype | None] = []
    evaluate = case_batch.ViewEvaluation.__call__

    def noted(self, z, row, decode, problem, precision=None):
        seen.append(precision)
        return evaluate(self, z, row, decode, problem, precision)

    monkeypatch.setattr(case_batch.ViewEvaluation, "__call__", noted)
    found = attack(cases, rng=torch.Generator().manual_seed(0))
    assert seen == [torch.bfloat16] * 2 + [None] * 2
    monkeypatch.setattr(case_batch, "get_fast_dtype", lambda device: None)
    seen.clear()
    attack(cases, rng=torch.Generator().manual_seed(0))
    assert seen == [None] * 4
    assert all(bool(one.x.isfinite().all()) for one in found)


@pytest.mark.parametrize(
    ("features", "able"), [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx2": True}, False)]
)
def test_processor_without_bfloat16_arithmetic_keeps_float32(
    features: dict[str, bool], able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert (precision.get_fast_dtype("cpu") is torch.bfloat16) == able


@pytest.mark.parametrize("coarse", [-0.1, 1.0])
def test_share_of_bfloat16_steps_must_be_below_one(coarse: float) -> None:
    with pytest.raises(ValueError, match="the last steps are in float32"):
        agic(coarse=coarse)


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
