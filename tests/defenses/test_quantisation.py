"""Tests of quantisers by their formulas, their means, and the number of distinct values."""

import math

import numpy as np
import pytest
import torch
from generators import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from defenses import Defense, DefenseSpec, channels, qsgd, sign, uniform

DRAWS = 10_000


def apply_once(defense: Defense, values: Tensor, seed: int = 0) -> Tensor:
    return defense.apply({"w": values}, defense.init({"w": values}), seeded(seed))[0]["w"]


def patterns(values: Tensor) -> int:
    """Return the number of bitwise distinct values."""
    raw = values.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    return len(raw.unique())


# --- signs ---


def test_signs_of_a_hand_example_zeros_of_either_sign_count_as_positive() -> None:
    values = torch.tensor([2.0, -3.0, 0.0, -0.0, 1e-30, -1e-30])
    assert apply_once(sign(), values).tolist() == [1, -1, 1, 1, 1, -1]
    assert apply_once(sign("mean"), torch.tensor([2.0, -3.0, 0.0, -0.0])).tolist() == [1.25, -1.25, 1.25, 1.25]


def test_the_mean_magnitude_is_each_tensors_own() -> None:
    sent, _ = sign("mean").apply({"a": torch.tensor([1.0, -3.0]), "b": torch.tensor(-10.0)}, {}, seeded())
    assert sent["a"].tolist() == [2, -2]
    assert sent["b"].item() == -10


def test_scaled_signs_contract() -> None:
    """||u - C(u)||^2 = ||u||^2 - ||u||_1^2 / n, the condition for error feedback (Karimireddy et al., lemma 8)."""
    u = torch.randn(500, generator=seeded(1), dtype=torch.float64)
    left = (u - apply_once(sign("mean"), u)).square().sum()
    assert left.item() == pytest.approx((u.square().sum() - u.abs().sum() ** 2 / 500).item())


# --- QSGD ---


@pytest.mark.parametrize("levels", [1, 3, 16])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_qsgd_is_unbiased_in_every_coordinate(levels: int, norm: str, dtype: torch.dtype) -> None:
    """Means over 10,000 draws are within 4 standard errors, computed from each coordinate's probability to be rounded up."""
    u = torch.randn(24, generator=seeded(1), dtype=dtype)
    u[:2] = torch.tensor([0.0, 1e-4])
    stream, defense = seeded(2), qsgd(levels, norm=norm)
    sent = torch.stack([defense.apply({"w": u}, {}, stream)[0]["w"] for _ in range(DRAWS)]).double()
    size = (u.norm() if norm == "l2" else u.abs().max()).double()
    step = size / levels
    chance = (u.double().abs() / step) % 1
    error = step * (chance * (1 - chance) / DRAWS).sqrt()
    assert ((sent.mean(dim=0) - u).abs() <= 4 * error + 1e-6 * step).all()
    variance = sent.var(dim=0)
    assert torch.allclose(variance.sum(), (error**2 * DRAWS).sum(), rtol=0.05)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_what_qsgd_sends_is_next_to_the_update_and_on_the_grid(norm: str, kappa: float) -> None:
    u = torch.randn(1000, generator=seeded(1), dtype=torch.float64)
    size = kappa * (u.norm() if norm == "l2" else u.abs().max()).item()
    sent = apply_once(qsgd(4, norm=norm, kappa=kappa), u)
    steps = sent / (size / 4)
    assert torch.allclose(steps, steps.round(), atol=1e-9)
    assert steps.abs().max() <= 4 + 1e-9
    inside = u.abs() <= size
    assert ((sent - u).abs()[inside] <= size / 4 + 1e-12).all()
    assert torch.allclose(sent[~inside].abs(), torch.tensor(size, dtype=torch.float64))
    assert (sent * u >= 0).all()


def test_qsgd_with_a_small_kappa_is_biased_towards_zero_by_what_it_cuts_off() -> None:
    u = torch.tensor([1.0, -0.2, 0.05], dtype=torch.float64)
    stream, defense = seeded(1), qsgd(2, norm="linf", kappa=0.5)
    mean = torch.stack([defense.apply({"w": u}, {}, stream)[0]["w"] for _ in range(DRAWS)]).mean(dim=0)
    expected = channels.qsgd(2, norm="linf", kappa=0.5).expect({"w": u}, {})["w"]
    assert expected.tolist() == [0.5, -0.2, 0.05]
    assert torch.allclose(mean, expected, atol=4 * 0.25 * 0.5 / math.sqrt(DRAWS))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_equal_coordinates_are_rounded_independently(norm: str) -> None:
    sent, _ = qsgd(1, norm=norm).apply({"a": torch.ones(200), "b": torch.ones(200)}, {}, seeded(1))
    if norm == "linf":
        assert (sent["a"] == 1).all()  # the largest magnitude is on the grid: nothing is left to chance
        return
    assert not torch.equal(sent["a"], sent["b"])
    up = (sent["a"] > 0).sum().item()
    assert abs(up - 200 / math.sqrt(200)) < 4 * math.sqrt(200 / math.sqrt(200))


def test_the_expected_number_of_non_zeros_is_bounded_as_in_the_paper() -> None:
    """For n values and s levels it is at most s (s + sqrt(n)) (Alistarh et al., theorem 3.2)."""
    u = torch.randn(10_000, generator=seeded(1))
    for s in (1, 3, 10):
        assert (apply_once(qsgd(s), u) != 0).sum() <= s * (s + 100)


# --- uniform ---


def test_the_uniform_quantiser_is_its_formula() -> None:
    """q = M / s * sign(u) * round(s |u| / M), with ties to even; 3 bits mean s = 3."""
    u = torch.tensor([1.0, -0.9, 0.5, -0.49, 0.17, -0.16, 0.0], dtype=torch.float64)
    assert apply_once(uniform(3), u).tolist() == pytest.approx([1, -1, 2 / 3, -1 / 3, 1 / 3, 0, 0])
    assert apply_once(uniform(2), torch.tensor([2.0, 1.1, -1.0, 0.9])).tolist() == [2, 2, 0, 0]


@settings(deadline=None, max_examples=150)
@given(values=arrays(np.float32, st.integers(1, 30), elements=st.floats(-1e3, 1e3, width=32)), bits=st.integers(2, 12))
def test_the_uniform_quantiser_is_nearest_and_of_few_values(values: np.ndarray, bits: int) -> None:
    u = torch.from_numpy(values)
    sent = apply_once(uniform(bits), u)
    levels, largest = 2 ** (bits - 1) - 1, u.abs().max().item()
    assert ((sent.double() - u.double()).abs() <= largest / levels / 2 * (1 + 1e-5) + 1e-30).all()
    assert patterns(sent) <= 2 * levels + 1 <= 2**bits
    assert sent.abs().max().item() == largest
    assert torch.equal(apply_once(uniform(bits), sent), sent) or largest < 1e-30  # idempotent


def test_stochastic_rounding_is_qsgd_with_the_largest_magnitude() -> None:
    u = torch.randn(50, generator=seeded(1))
    assert torch.equal(apply_once(uniform(4, stochastic=True), u, 5), apply_once(qsgd(7, norm="linf"), u, 5))
    assert not torch.equal(apply_once(uniform(4, stochastic=True), u, 5), apply_once(uniform(4), u, 5))


# --- few values, for the codec ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize(
    ("spec", "most"), [("qsgd(3)", 7), ("qsgd(3, norm='linf')", 7), ("uniform(4)", 15), ("sign", 2), ("sign('mean')", 2)]
)
def test_the_number_of_bitwise_distinct_values_is_bounded(spec: str, most: int, scale: float, dtype: torch.dtype) -> None:
    u = (scale * torch.randn(2000, generator=seeded(1))).to(dtype)
    assert 2 <= patterns(apply_once(DefenseSpec.parse(spec).build(), u)) <= most


@pytest.mark.parametrize("spec", ["qsgd(3)", "uniform(3)", "in_gradient_units(uniform(3), 0.1)", "top_k(0.1) | qsgd(3)"])
def test_a_zero_is_plus_zero(spec: str) -> None:
    sent = apply_once(DefenseSpec.parse(spec).build(), torch.randn(500, generator=seeded(1)))
    assert (sent == 0).any()
    assert not torch.signbit(sent[sent == 0]).any()


@pytest.mark.parametrize("spec", ["qsgd(3)", "qsgd(3, norm='linf')", "uniform(3)"])
@pytest.mark.parametrize("value", [1e-44, 1e-38, 1e15])
def test_extreme_values_stay_finite(spec: str, value: float) -> None:
    assert apply_once(DefenseSpec.parse(spec).build(), torch.tensor([value, -value / 3, 0.0])).isfinite().all()


# --- the channel: the attacker's model ---


def test_the_channel_measures_the_distance_from_the_quantisation_interval() -> None:
    u = torch.randn(200, generator=seeded(1), dtype=torch.float64)
    sent = apply_once(uniform(3), u)
    channel = channels.uniform(3)
    known = channel.learn({"w": sent})
    assert torch.equal(channel.expect({"w": u}, known)["w"], sent)  # at the true update
    half = u.abs().max() / 6
    for shift, rest in ((0.9, 0.0), (1.5, 0.5), (-2.0, -1.0)):
        expected = channel.expect({"w": sent + shift * half}, known)["w"]
        assert torch.allclose(expected - sent, torch.full_like(sent, rest) * half)


@pytest.mark.parametrize("bits", [3, 8])
def test_the_channel_of_approximate_simulations_is_free_of_their_size(bits: int) -> None:
    u = torch.randn(4000, generator=seeded(1), dtype=torch.float64)
    u[0] = 16.0  # the largest magnitude: wide intervals with 3 bits
    sent, channel = apply_once(uniform(bits), u), channels.uniform(bits)
    known = channel.learn({"w": sent})

    def expect(values: torch.Tensor, *, approximate: bool = True) -> torch.Tensor:
        return channel.expect_update({"w": values}, known, approximate=approximate)["w"]

    for size in (0.6, 1.0, 1.9):
        assert torch.allclose(expect(size * sent), sent)  # proportional to the message
    for size in (0.9, 1.7):
        assert torch.allclose(expect(size * u), expect(u))
    assert not torch.allclose(expect(30 * u, approximate=False), expect(u, approximate=False))
    scaled = u * sent.square().sum() / (u * sent).sum()
    half = 8 / (2 ** (bits - 1) - 1)
    inside = (scaled - sent).abs() <= half
    rest = expect(u) - sent
    kept = rest[inside] / (scaled - sent)[inside]
    assert kept.max() - kept.min() < 1e-6
    assert kept.mean() < 0.05 if bits == 3 else kept.mean() > 0.95
    beyond = (scaled - sent)[~inside]
    assert torch.allclose(rest[~inside], beyond - (1 - kept.mean()) * half * beyond.sign())


@pytest.mark.parametrize(("size", "scale"), [(0.1, 2.0), (0.0, 2.0), (-0.5, 2.0), (8.0, 0.5)])
def test_the_channel_of_approximate_simulations_scales_by_at_most_two(size: float, scale: float) -> None:
    sent = torch.tensor([3.0, -3.0, 1.0, 0.0], dtype=torch.float64)  # narrow intervals, so that values are taken as they are
    channel = channels.uniform(16)
    expected = channel.expect_update({"w": size * sent}, channel.learn({"w": sent}), approximate=True)["w"]
    assert torch.allclose(expected, scale * size * sent)


def test_the_channel_of_sign_is_exact_for_right_signs_and_soft_for_wrong_ones() -> None:
    u = {"a": torch.tensor([1.0, -3.0, 0.0]), "b": torch.tensor([1e-6, -3e-6, 0.0])}
    sent, _ = sign().apply(u, {}, seeded())
    known = channels.sign().learn(sent)
    assert channels.sign().expect(u, known)["a"].tolist() == [1, -1, 1]
    for name, size in (("a", 1.0), ("b", 1e-6)):  # the mean magnitude is 2 * size; the first two have the wrong sign
        wrong = {name: torch.tensor([-2.0, 1.0, 3.0]) * size}
        assert torch.allclose(channels.sign().expect(wrong, known)[name], torch.tensor([0.0, -0.5, 1.0]))


def test_the_channel_scales_by_the_guess_or_with_feedback_by_the_message() -> None:
    u, guess = {"a": torch.tensor([1.0, -3.0])}, {"a": torch.tensor([5.0, -7.0])}
    sent, _ = sign("mean").apply(u, {}, seeded())
    for feedback, size in ((False, 6.0), (True, 2.0)):
        channel = channels.sign("mean", error_feedback=feedback)
        assert channel.expect(guess, channel.learn(sent))["a"].tolist() == [size, -size]


@pytest.mark.parametrize(
    "spec", ["qsgd(1)", "qsgd(3)", "qsgd(64)", "qsgd(1, norm='linf')", "qsgd(3, norm='linf')", "uniform(6, stochastic=True)"]
)
@pytest.mark.parametrize("heavy", [False, True])
def test_the_channel_estimates_the_power_of_rounding_from_the_message(spec: str, heavy: bool) -> None:
    """The estimate is within 10 % for normal values, and within 45 % for a heavy-tailed distribution."""
    u = torch.randn(40_000, generator=seeded(1), dtype=torch.float64)
    u = u.sign() * u.abs() ** 3 if heavy else u
    sent = apply_once(DefenseSpec.parse(spec).build(), u, 3)
    true = (sent - u).square().sum().item()
    assert DefenseSpec.parse(spec).build_channel().noise({"w": sent}).item() == pytest.approx(true, rel=0.45 if heavy else 0.1)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: sign("max"), "sign: scale must be 'none' or 'mean', got 'max'"),
        (lambda: qsgd(0), "qsgd: levels must be a whole number from 1 to 8388607, got 0"),
        (lambda: qsgd(2.5), "qsgd: levels must be a whole number from 1 to 8388607, got 2.5"),
        (lambda: qsgd(2, norm="l1"), "qsgd: norm must be 'l2' or 'linf', got 'l1'"),
        (lambda: qsgd(2, kappa=0), r"qsgd: kappa must be in \(0, 1\], got 0"),
        (lambda: uniform(1), "uniform: bits must be a whole number from 2 to 24, got 1"),
        (lambda: uniform(3.0), "uniform: bits must be a whole number from 2 to 24, got 3.0"),
    ],
)
def test_wrong_arguments_are_refused_with_the_range_that_is_allowed(build, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()
