"""Tests of clipping by its definition, and of noise by its distribution."""

import math
from collections.abc import Callable

import pytest
import torch
from generators import seeded
from hypothesis import given, settings
from hypothesis import strategies as st

from defenses import Defense, Update, channels, clip, clip_each, gaussian, global_norm, laplace


def flat(update: Update) -> torch.Tensor:
    return torch.cat([update[name].flatten() for name in sorted(update)])


def test_the_global_norm_is_that_of_one_long_vector() -> None:
    assert global_norm({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[4.0]]), "c": torch.tensor(10.0)}).item() == 11
    assert global_norm({"a": torch.tensor([1.0, 2.0])}).shape == ()


def test_clip_shortens_a_hand_example() -> None:
    sent, _ = clip(1).apply({"a": torch.tensor([3.0]), "b": torch.tensor([[0.0], [-4.0]])}, {}, seeded())
    assert sent["a"].tolist() == pytest.approx([0.6])
    assert sent["b"].flatten().tolist() == pytest.approx([0, -0.8])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-6, 1e6), bound=st.floats(1e-4, 1e4))
def test_clip_bounds_the_norm_and_keeps_the_direction(seed: int, size: float, bound: float) -> None:
    drawn = seeded(seed)
    update = {name: size * torch.randn(n, generator=drawn, dtype=torch.float64) for name, n in (("a", 3), ("b", 5))}
    sent, _ = clip(bound).apply(update, {}, seeded())
    before, after = flat(update), flat(sent)
    assert after.norm().item() <= bound * (1 + 1e-14) or torch.equal(before, after)
    assert after.norm().item() == pytest.approx(min(bound, before.norm().item()), rel=1e-12)
    assert torch.dot(before, after).item() == pytest.approx(before.norm().item() * after.norm().item(), rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(bound=st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clip_gives_a_shorter_update_back_bit_for_bit_at_any_bound(dtype: torch.dtype, bound: float) -> None:
    """In float32, `bound * (1 / bound)` is not 1 for one bound in ten, such as 41, 47 and 55."""
    update = {"w": torch.randn(50, generator=seeded(1), dtype=dtype) * bound / 100}
    sent, _ = clip(bound).apply(update, {}, seeded())
    assert torch.equal(sent["w"], update["w"])


@pytest.mark.parametrize("bound", [0, -1, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("build", [clip, clip_each])
def test_clips_refuse_an_invalid_bound(build: Callable[[float], Defense], bound: float) -> None:
    with pytest.raises(ValueError, match=f"{build.__name__}: max_norm must be positive and finite, got {bound}"):
        build(bound)


def test_clip_each_bounds_every_tensor_on_its_own() -> None:
    update = {"long": torch.tensor([[3.0], [-4.0]]), "short": torch.tensor([0.6, 0.0]), "scalar": torch.tensor(-7.0)}
    sent, _ = clip_each(1).apply(update, {}, seeded())
    assert sent["long"].flatten().tolist() == pytest.approx([0.6, -0.8])
    assert torch.equal(sent["short"], update["short"])
    assert sent["scalar"].item() == -1
    for name, t in update.items():  # the same as a clip of an update that has nothing else
        assert torch.equal(sent[name], clip(1).apply({name: t}, {}, seeded())[0][name])


def test_clips_do_not_overflow_in_half_precision() -> None:
    """The square of 300 overflows in float16, and so does a bound of a million."""
    update = {"w": torch.tensor([300.0, -400.0], dtype=torch.float16)}
    assert clip(5).apply(update, {}, seeded())[0]["w"].tolist() == pytest.approx([3, -4], rel=1e-3)
    assert clip_each(5).apply(update, {}, seeded())[0]["w"].tolist() == pytest.approx([3, -4], rel=1e-3)
    assert torch.equal(clip(1e6).apply(update, {}, seeded())[0]["w"], update["w"])


@pytest.mark.parametrize("size", [-0.1, math.inf, math.nan])
@pytest.mark.parametrize(("build", "words"), [(gaussian, "gaussian: std"), (laplace, "laplace: scale")])
def test_noise_refuses_an_invalid_size(build: Callable[[float], Defense], words: str, size: float) -> None:
    with pytest.raises(ValueError, match=f"{words} must be finite and not negative, got {size}"):
        build(size)


def test_noise_has_the_mean_and_the_deviation_that_were_asked_for() -> None:
    std, n = 0.3, 100_000
    update = {"w": torch.full((n,), 2.0), "other": torch.full((n,), -1.0)}
    sent, _ = gaussian(std).apply(update, {}, seeded(11))
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


@pytest.mark.parametrize("arguments", [{}, {"std": 1, "snr_db": 1}, {"snr_db": math.inf}, {"snr_db": math.nan}])
def test_gaussian_takes_either_a_deviation_or_a_ratio(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"gaussian: (give either std or snr_db, got std=|snr_db must be finite, got )"):
        gaussian(**arguments)
    with pytest.raises(ValueError, match=r"scope must be 'tensor' or 'global', got 'layer'"):
        gaussian(snr_db=3, scope="layer")


@pytest.mark.parametrize("snr_db", [-20, 0, 13])
def test_a_ratio_of_signal_to_noise_is_that_of_their_powers(snr_db: float) -> None:
    update = {"big": 30 * torch.randn(50_000, generator=seeded(1)), "small": 0.01 * torch.randn(50_000, generator=seeded(2))}

    def ratio(sent: Update, *names: str) -> float:
        signal = sum(update[n].double().square().sum().item() for n in names)
        noise = sum((sent[n] - update[n]).double().square().sum().item() for n in names)
        return 10 * math.log10(signal / noise)

    over_all, _ = gaussian(snr_db=snr_db).apply(update, {}, seeded(3))
    assert ratio(over_all, "big", "small") == pytest.approx(snr_db, abs=0.1)
    deviations = {name: (over_all[name] - update[name]).std().item() for name in update}
    assert deviations["small"] == pytest.approx(deviations["big"], rel=0.05)
    each, _ = gaussian(snr_db=snr_db, scope="tensor").apply(update, {}, seeded(3))
    assert ratio(each, "big") == pytest.approx(snr_db, abs=0.1)
    assert ratio(each, "small") == pytest.approx(snr_db, abs=0.1)


@pytest.mark.parametrize("snr_db", [-20, 0, 13])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_the_channel_estimates_the_noise_power_from_the_received_update(snr_db: float, scope: str) -> None:
    update = {"big": 3 * torch.randn(50_000, generator=seeded(1)), "small": 0.1 * torch.randn(50_000, generator=seeded(2))}
    sent, _ = gaussian(snr_db=snr_db, scope=scope).apply(update, {}, seeded(3))
    true = sum((sent[n] - update[n]).square().sum().item() for n in update)
    assert channels.gaussian(snr_db=snr_db).noise(sent).item() == pytest.approx(true, rel=0.05)


def test_laplace_noise_has_the_distribution_that_was_asked_for() -> None:
    """Compare the distribution function at five points, since the variance alone would not be sufficient."""
    scale, n = 0.3, 100_000
    sent, _ = laplace(scale).apply({"w": torch.full((n,), 2.0, dtype=torch.float64)}, {}, seeded(11))
    noise = sent["w"] - 2
    assert noise.isfinite().all()
    for x in (-0.9, -0.2, 0.0, 0.1, 0.7):
        below = 0.5 * math.exp(x / scale) if x < 0 else 1 - 0.5 * math.exp(-x / scale)
        assert abs((noise < x).double().mean().item() - below) < 4 * math.sqrt(below * (1 - below) / n)
    assert abs(noise.abs().mean().item() - scale) < 4 * scale / math.sqrt(n)
    assert abs((noise[1:] * noise[:-1]).mean().item()) < 4 * 2 * scale**2 / math.sqrt(n)


@pytest.mark.parametrize("build", [gaussian, laplace])
def test_noise_scales_and_is_not_shared_between_tensors(build: Callable[[float], Defense]) -> None:
    one, half = (build(size).apply({"a": torch.zeros(9), "b": torch.zeros(9)}, {}, seeded(3))[0] for size in (1, 0.5))
    assert torch.equal(half["a"], one["a"] / 2)
    assert not torch.equal(one["a"], one["b"])
