"""Clipping against its definition, noise against its distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator

from defenses import clip, gaussian, global_norm


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def flat(update: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([update[name].flatten() for name in sorted(update)])


def test_the_global_norm_is_that_of_one_long_vector() -> None:
    assert global_norm({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[4.0]]), "c": torch.tensor(10.0)}).item() == 11
    assert global_norm({"a": torch.tensor([1.0, 2.0])}).shape == ()


def test_clip_shortens_a_hand_example() -> None:
    sent, _ = clip(1).apply({"a": torch.tensor([3.0]), "b": torch.tensor([[0.0], [-4.0]])}, {}, rng())
    assert sent["a"].tolist() == pytest.approx([0.6])
    assert sent["b"].flatten().tolist() == pytest.approx([0, -0.8])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-6, 1e6), bound=st.floats(1e-4, 1e4))
def test_clip_bounds_the_norm_and_keeps_the_direction(seed: int, size: float, bound: float) -> None:
    drawn = rng(seed)
    update = {name: size * torch.randn(n, generator=drawn, dtype=torch.float64) for name, n in (("a", 3), ("b", 5))}
    sent, _ = clip(bound).apply(update, {}, rng())
    before, after = flat(update), flat(sent)
    assert after.norm().item() <= bound * (1 + 1e-14) or torch.equal(before, after)
    assert after.norm().item() == pytest.approx(min(bound, before.norm().item()), rel=1e-12)
    assert torch.dot(before, after).item() == pytest.approx(before.norm().item() * after.norm().item(), rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(bound=st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clip_gives_a_shorter_update_back_bit_for_bit_at_any_bound(dtype: torch.dtype, bound: float) -> None:
    """`bound * (1 / bound)` is not 1 for one bound in ten: 41, 47, 55 ... in float32."""
    update = {"w": torch.randn(50, generator=rng(1), dtype=dtype) * bound / 100}
    sent, _ = clip(bound).apply(update, {}, rng())
    assert torch.equal(sent["w"], update["w"])


@pytest.mark.parametrize("bound", [0, -1, math.inf, -math.inf, math.nan])
def test_clip_refuses_a_bound_that_is_none(bound: float) -> None:
    with pytest.raises(ValueError, match=f"max_norm must be positive and finite, got {bound}"):
        clip(bound)


@pytest.mark.parametrize("std", [-0.1, math.inf, math.nan])
def test_gaussian_refuses_a_deviation_that_is_none(std: float) -> None:
    with pytest.raises(ValueError, match=f"std must be finite and not negative, got {std}"):
        gaussian(std)


def test_noise_has_the_mean_and_the_deviation_that_were_asked_for() -> None:
    std, n = 0.3, 100_000
    update = {"w": torch.full((n,), 2.0), "other": torch.full((n,), -1.0)}
    sent, _ = gaussian(std).apply(update, {}, rng(11))
    noise = {name: sent[name].double() - update[name].double() for name in update}
    for values in noise.values():
        assert abs(values.mean().item()) < 4 * std / math.sqrt(n)
        assert abs(values.std().item() - std) < 4 * std / math.sqrt(2 * n)
        kurtosis = ((values / values.std()) ** 4).mean().item()
        assert abs(kurtosis - 3) < 4 * math.sqrt(24 / n)  # normal, not merely of that variance
    correlation = (noise["w"] * noise["other"]).mean().item() / std**2
    assert abs(correlation) < 4 / math.sqrt(n)
    neighbours = (noise["w"][1:] * noise["w"][:-1]).mean().item() / std**2
    assert abs(neighbours) < 4 / math.sqrt(n)


def test_noise_is_not_shared_between_equal_tensors_of_one_update() -> None:
    sent, _ = gaussian(1).apply({"a": torch.zeros(8), "b": torch.zeros(8)}, {}, rng())
    assert not torch.equal(sent["a"], sent["b"])


def test_noise_belongs_to_names_and_not_to_their_order() -> None:
    """Files and records may reorder keys; a defense must not notice."""
    update = {"b": torch.ones(3), "a": torch.zeros(4), "c": torch.ones(())}
    forward, _ = gaussian(1).apply(update, {}, rng(2))
    backward, _ = gaussian(1).apply(dict(reversed(update.items())), {}, rng(2))
    assert all(torch.equal(forward[name], backward[name]) for name in update)
    assert list(backward) == ["c", "a", "b"]


def test_noise_scales_with_its_deviation() -> None:
    one, _ = gaussian(1).apply({"w": torch.zeros(9)}, {}, rng(3))
    half, _ = gaussian(0.5).apply({"w": torch.zeros(9)}, {}, rng(3))
    assert torch.equal(half["w"], one["w"] / 2)


def test_a_generator_that_goes_on_gives_fresh_noise() -> None:
    going_on = rng(4)
    first, _ = gaussian(1).apply({"w": torch.zeros(9)}, {}, going_on)
    second, _ = gaussian(1).apply({"w": torch.zeros(9)}, {}, going_on)
    assert not torch.equal(first["w"], second["w"])
