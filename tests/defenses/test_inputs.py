"""Tests of defenses that mix training examples: ranges, labels, means and random draws."""

import math

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from defenses.inputs import INPUTS, BatchTransform, InputsSpec, instahide, mixup, to_one_hot

K = 4


def batch(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = Generator().manual_seed(seed)
    return torch.rand(count, 2, 3, 3, generator=rng), to_one_hot(torch.arange(count) % K, K)


def mix_batch(mixing: BatchTransform, pool: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return mixing.mix(*batch(6), Generator().manual_seed(0), pool)


POOL = torch.rand(50, 2, 3, 3, generator=Generator().manual_seed(9))
KINDS = [("mixup(0.4)", None), ("instahide(4)", None), ("instahide(1)", None), ("instahide(4, public='p')", POOL)]


@pytest.mark.parametrize(("text", "pool"), KINDS)
def test_mixing_keeps_shapes_ranges_and_arguments_and_uses_only_its_generator(text: str, pool: Tensor | None) -> None:
    mixing = InputsSpec.parse(text).build()
    x, y = batch()
    given = x.clone(), y.clone()
    (mx, my), again = (mixing.mix(x, y, Generator().manual_seed(3), pool) for _ in range(2))
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1])
    assert (mx.shape, mx.dtype, my.shape, my.dtype) == (x.shape, x.dtype, y.shape, y.dtype)
    assert 0 <= mx.min() <= mx.max() <= 1
    assert 0 <= my.min() <= my.sum(dim=1).max() <= 1 + 1e-6
    assert torch.equal(mx, again[0])
    assert torch.equal(my, again[1])
    state = torch.get_rng_state()
    other, _ = mixing.mix(x, y, Generator().manual_seed(4), pool)
    assert not torch.equal(other, mx)
    assert torch.equal(torch.get_rng_state(), state)


def test_mixup_mixes_images_and_labels_by_one_share_with_partners_of_the_batch() -> None:
    """With a one-hot label for each example, the mixed label shows the coefficient and the partner."""
    x, y = batch()[0], torch.eye(6)
    for seed in range(20):
        mx, my = mixup(1.0).mix(x, y, Generator().manual_seed(seed), None)
        assert torch.allclose(mx, (my @ x.flatten(1)).reshape(x.shape), atol=1e-6)
        own = my.diagonal()
        moved = own < 1 - 1e-6
        assert torch.allclose(own[moved], own[moved][0].expand(int(moved.sum()))) if moved.any() else True
        assert torch.allclose(my.sum(dim=0), torch.ones(6))  # each example is a partner once


@pytest.mark.parametrize("alpha", [0.4, 2.0])
def test_the_share_of_mixup_is_beta(alpha: float) -> None:
    """The mean is 1/2 and the variance 1 / (4 (2 alpha + 1)). Half of the permutations of two examples make them partners."""
    x = torch.tensor([[0.0], [1.0]])
    values = torch.stack([mixup(alpha).mix(x, x, Generator().manual_seed(s), None)[0][1, 0] for s in range(4000)])
    swapped = values[values < 1]
    assert abs(len(swapped) / 4000 - 0.5) < 4 * 0.5 / math.sqrt(4000)
    std = 1 / math.sqrt(4 * (2 * alpha + 1))
    assert abs(float(swapped.mean()) - 0.5) < 4 * std / math.sqrt(len(swapped))
    assert float(swapped.std()) == pytest.approx(std, rel=0.06)


def test_mixup_does_not_change_a_batch_of_one() -> None:
    x, y = batch(1)
    mx, my = mixup().mix(x, y, Generator().manual_seed(0), None)
    assert torch.allclose(mx, x)
    assert torch.allclose(my, y)


def undo_inversion(mx: Tensor, expected: Tensor) -> Tensor:
    """Undo the inversion of pixels where the inverted value is nearer to the expected one."""
    return torch.where((mx - expected).abs() < (1 - mx - expected).abs(), mx, 1 - mx)


def test_instahide_mirrors_half_of_the_pixels_of_a_mixture_within_its_bounds() -> None:
    x, y = batch(5)[0], torch.eye(5)
    mirrored, shares = [], []
    for seed in range(200):
        mx, my = instahide(3).mix(x, y, Generator().manual_seed(seed), None)
        expected = (my @ x.flatten(1)).reshape(x.shape)
        found = undo_inversion(mx, expected)
        assert torch.allclose(found, expected, atol=1e-5)
        mirrored.append((mx - expected).abs() > 1e-4)
        shares.append(my)
    assert torch.allclose(torch.stack(shares).sum(dim=2), torch.ones(200, 5))
    share = torch.stack(mirrored).float()
    assert abs(float(share.mean()) - 0.5) < 4 * 0.5 / math.sqrt(share.numel())
    assert share.mean(dim=0).max() < 0.7  # no pixel is always mirrored
    assert share.mean(dim=0).min() > 0.3


@pytest.mark.parametrize(("k", "private"), [(2, 2), (4, 4), (4, 2), (6, 2), (1, 1)])
def test_the_shares_are_uniform_within_the_published_bounds(k: int, private: int) -> None:
    from defenses.inputs import _draw_shares

    rows = _draw_shares(20_000, k, private, np.random.default_rng(0)).numpy()
    assert np.allclose(rows.sum(axis=1), 1)
    assert rows.min() >= 0
    if k > 1:
        assert rows.max() <= 0.65
    if private < k:
        assert rows[:, :private].sum(axis=1).min() >= 0.3
        assert rows[:, :private].mean() > 1 / k  # the lower bound on private images raises their shares
    else:
        assert np.allclose(rows.mean(axis=0), 1 / k, atol=0.01)
    if k == 2:  # uniform between 0.35 and 0.65
        assert rows[:, 0].std() == pytest.approx(0.3 / math.sqrt(12), rel=0.02)


def test_public_images_carry_no_label_and_come_from_the_pool() -> None:
    black, white = torch.zeros(5, 2, 3, 3), torch.ones(50, 2, 3, 3)
    y = torch.eye(5)
    for seed in range(20):
        mx, my = instahide(4, public="p").mix(black, y, Generator().manual_seed(seed), white)
        private = my.sum(dim=1)
        assert private.min() >= 0.3
        assert private.max() < 1
        expected = (1 - private)[:, None, None, None].expand(mx.shape)  # private images are black and public ones white
        assert torch.allclose(undo_inversion(mx, expected), expected, atol=1e-6)
        assert int((my > 0).sum(dim=1).max()) <= 2


def test_public_images_are_required_if_they_are_named_and_refused_otherwise() -> None:
    with pytest.raises(ValueError, match="pool must be the public images with public='p', got None"):
        mix_batch(instahide(4, public="p"))
    with pytest.raises(ValueError, match="pool must be None with public='', got public images"):
        mix_batch(instahide(4), pool=POOL)


def test_each_mixing_states_the_smallest_batch() -> None:
    found = {
        t: InputsSpec.parse(t).build().min_batch_size
        for t in ("mixup", "instahide(4)", "instahide(1)", "instahide(4, public='p')")
    }
    assert found == {"mixup": 2, "instahide(4)": 2, "instahide(1)": 1, "instahide(4, public='p')": 1}
    assert InputsSpec.parse("").build() is None
    assert list(INPUTS) == ["instahide", "mixup"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mixup(0)", "alpha must be positive and finite, got 0"),
        ("instahide(0)", "k must be a whole number from 1 to 1000, got 0"),
        ("instahide(2, public='p')", "k must be a whole number from 3 with public images to 1000, got 2"),
        ("instahide(public=3)", "public must be a text in quotes, got 3"),
        ("mixup(beta=1)", r"'beta'.*Its parameters: \(alpha"),
        ("mixup | instahide", "has 2 parts; give only one: instahide or mixup"),
        ("mix", "unknown name 'mix'.*Did you mean 'mixup'"),
    ],
)
def test_wrong_arguments_raise_with_the_range(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        InputsSpec.parse(text)
