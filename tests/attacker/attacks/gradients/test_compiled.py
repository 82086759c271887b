"""Tests of compiled evaluations: equal values, also for fewer problems, and a fallback if compiling fails."""

import shutil

import pytest
import torch
from observations import observe_steps
from torch import Tensor
from torch._inductor import config as inductor

from attacker.attacks import Case, cpl
from attacker.attacks.gradients.compiled import CompiledEvaluation
from attacker.attacks.optimisers.first_order import Adam
from fedsim.recording import DataSpec, ModelSpec


def squares(z: Tensor, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    offset = z - row["target"]
    return 2 * offset, offset.square().sum(dim=1)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace `torch.compile` by a wrapper that records the number of problems of each call, without compiling."""
    sizes: list[int] = []

    def compiles(function, **_):
        return lambda z, *rows: sizes.append(len(z)) or function(z, *rows)

    monkeypatch.setattr(torch, "compile", compiles)
    return sizes


def test_missing_problems_are_padded_while_more_than_half_remain(eager: list[int]) -> None:
    alone: list[int] = []
    evaluate = CompiledEvaluation(squares, lambda z, row: alone.append(len(z)) or squares(z, row), 8)
    z, target = torch.arange(8.0)[:, None], torch.ones(8, 1)
    for count in (8, 5, 4, 1):
        slope, value = evaluate(z[:count], {"target": target[:count]})
        expected_slope, expected = squares(z[:count], {"target": target[:count]})
        assert torch.equal(slope, expected_slope)
        assert torch.equal(value, expected)
    assert (eager, alone) == ([8, 8], [4, 1])


def test_failed_compilation_warns_once_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no compiler\nin sight")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fails)
    evaluate = CompiledEvaluation(squares, squares, 2)
    z, row = torch.ones(2, 1), {"target": torch.zeros(2, 1)}
    with pytest.warns(UserWarning, match="not compiled, which is slower: no compiler"):
        assert torch.equal(evaluate(z, row)[0], 2 * z)
    assert torch.equal(evaluate(z, row)[1], torch.ones(2))


@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles with g++, and there is none")
def test_compiled_search_agrees_with_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compile_threads", 1)  # each process of a pool would import PyTorch first
    model, data = ModelSpec(name="mlp", arguments={"hidden": [4]}), DataSpec(shape=(6,), num_classes=3)
    batches = [(torch.rand(1, 6, generator=rng().manual_seed(i)), torch.tensor([i])) for i in range(2)]
    cases = [Case((observe_steps(batch, model=model, data=data, client=f"c{i}"),)) for i, batch in enumerate(batches)]
    attack = cpl(init="uniform").copy_with(optimiser=Adam(learning_rate=0.02), steps=10)
    for one, other in zip(attack(cases, rng=rng()), attack.copy_with(compiled=True)(cases, rng=rng()), strict=True):
        torch.testing.assert_close(one.x, other.x, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one.loss, other.loss, rtol=1e-3, atol=1e-4)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)
