"""Tests that the papers' defenses do what the papers describe, in the papers' units."""

import math

import pytest
import torch
from generators import seeded
from torch import Tensor

from defenses import DefenseSpec, Update


def apply_once(spec: str, given: Update, seed: int = 0) -> Update:
    defense = DefenseSpec.parse(spec).build()
    return defense.apply(given, defense.init(given), seeded(seed))[0]


def send(spec: str, values: Tensor, seed: int = 0) -> Tensor:
    return apply_once(spec, {"w": values}, seed)["w"]


@pytest.mark.parametrize(
    ("name", "std"), [("G-10e-2", 0.01), ("G-10e-4", 1e-4), ("L-10e-2", math.sqrt(2) * 0.01), ("L-10e-3", math.sqrt(2) * 1e-3)]
)
def test_cpls_noise_is_ten_to_the_minus_k_on_the_gradient(name: str, std: float) -> None:
    """G-10e-2 means a standard deviation and L-10e-2 a scale of 0.01; it is neither 0.1 nor a variance."""
    noise = send(f"cpl_noise('{name}', 0.5)", torch.zeros(100_000, dtype=torch.float64))
    assert noise.std().item() == pytest.approx(0.5 * std, rel=0.02)
    assert (noise.abs().mean() / noise.std()).item() == pytest.approx(
        math.sqrt(2 / math.pi) if name[0] == "G" else 1 / math.sqrt(2), rel=0.01
    )


def test_the_papers_notation_is_an_abbreviation() -> None:
    spec = DefenseSpec.parse("clip(1) | G-10e-2", learning_rate=0.1)
    assert str(spec) == "clip(1) | cpl_noise('G-10e-2', 0.1)"
    assert DefenseSpec.parse(str(spec)) == spec
    assert str(DefenseSpec.parse("L-10e-3", learning_rate=0.1)) == "cpl_noise('L-10e-3', 0.1)"
    with pytest.raises(ValueError, match="missing a required argument: 'learning_rate'"):
        DefenseSpec.parse("G-10e-2")


def test_cpls_pruning_is_per_cent_over_all_tensors() -> None:
    given = {"a": torch.arange(1.0, 31.0), "b": -torch.arange(31.0, 101.0)}
    for percent in (0, 1, 29, 70, 99):
        sent = apply_once(f"cpl_prune({percent})", given)
        assert sum(int((t == 0).sum()) for t in sent.values()) == percent
    assert torch.equal(apply_once("cpl_prune(50)", given)["b"], apply_once("prune(0.5)", given)["b"])


def test_signsgd_takes_a_step_of_the_learning_rate_against_the_sign_of_the_gradient() -> None:
    gradient = torch.tensor([0.3, -2.0, 0.0])
    assert send("signsgd(0.25)", -0.25 * gradient).tolist() == [-0.25, 0.25, -0.25]


def test_ef_signsgd_is_its_algorithm_over_rounds() -> None:
    """Each message is that of algorithm 1: p = g + e, d = ||p||_1 / n * sign(p), e = p - d; updates have the opposite sign."""
    drawn = seeded(1)
    defense = DefenseSpec.parse("ef_signsgd").build()
    e = torch.zeros(20, dtype=torch.float64)
    state = defense.init({"w": e})
    for _ in range(10):
        g = torch.randn(20, generator=drawn, dtype=torch.float64)
        p = g + e
        d = p.abs().sum() / 20 * p.sign()
        e = p - d
        sent, state = defense.apply({"w": -g}, state, seeded())
        assert torch.allclose(sent["w"], -d, atol=1e-12)


def test_rogs_compressors_are_its_formulas_with_three_bits() -> None:
    u = torch.randn(400, generator=seeded(1), dtype=torch.float64)
    largest = u.abs().max()
    uniform = largest / 3 * u.sign() * (3 * u.abs() / largest).round()
    assert torch.allclose(send("rog_uniform", u), uniform)
    qsgd = send("rog_qsgd", u) / (largest / 3)
    assert torch.allclose(qsgd, qsgd.round(), atol=1e-9)
    assert ((qsgd - 3 * u / largest).abs() < 1 + 1e-9).all()
    assert not torch.allclose(send("rog_qsgd", u), uniform)
    kept = send("rog_top_k", u) != 0
    assert kept.sum() == 20  # 400 * (1 - 0.95), which is more than 20 in floating point
    assert u[kept].abs().min() > u[~kept].abs().max()


def test_lius_defenses_are_in_units_of_the_gradient() -> None:
    gradient = torch.randn(10_000, generator=seeded(1), dtype=torch.float64)
    assert send("liu_clip(4, 0.1)", -0.1 * gradient).norm().item() == pytest.approx(0.4)
    noise = send("liu_noise(0.01, 0.1)", -0.1 * gradient) + 0.1 * gradient
    assert noise.std().item() == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("cpl_prune(100)", r"cpl_prune: percent must be in \[0, 100\), got 100"),
        ("rog_top_k(1)", r"rog_top_k: sparsity must be in \[0, 1\), got 1"),
        ("rog_uniform(1)", "uniform: bits must be a whole number from 2 to 24, got 1"),
        ("liu_clip(0, 0.1)", "clip: max_norm must be positive and finite, got 0"),
        ("liu_noise(0.1, 0)", "learning_rate must be positive and finite, got 0"),
        ("signsgd(-1)", "learning_rate must be positive and finite, got -1"),
        *(
            (f'cpl_noise("{name}", 0.1)', r"cpl_noise: name must be 'G-10e-K' or 'L-10e-K'")
            for name in ("G-10e2", "G-10e-", "X-10e-2", "G-10e-2.5", "g-10e-2", "G-1e-2", "G-10e-2 ")
        ),
    ],
)
def test_wrong_arguments_are_refused_with_the_range_that_is_allowed(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DefenseSpec.parse(spec)
