"""Tests of the global SSIM against NumPy and values by hand, and of measures that do not apply."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from attacker.attacks.learned.perceptual import Lpips
from attacker.scoring.measures import MEASURES, make_empty_measures, measure
from attacker.scoring.metrics import ssim, ssim_global
from fedsim.recording import DataSpec

COLOUR = DataSpec(shape=(3, 12, 12), num_classes=2)


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    truth = torch.rand(2, 3, 12, 12, generator=rng)
    return (truth + 0.1 * torch.randn(truth.shape, generator=rng)).clamp(0, 1), truth


def compute_in_numpy(x: np.ndarray, truth: np.ndarray) -> float:
    """Compute the global SSIM of ROG: 8-bit units, luma and chroma by JPEG's matrix, statistics over all pixels."""
    to_ycrcb = np.array([[0.299, 0.587, 0.114], [0.5, -0.418688, -0.081312], [-0.168736, -0.331264, 0.5]])
    c1, c2, total = (0.01 * 255) ** 2, (0.03 * 255) ** 2, 0.0
    for plane, share in enumerate((0.8, 0.1, 0.1)):
        a, b = (np.tensordot(to_ycrcb[plane], 255 * image, axes=1) + (128 if plane else 0) for image in (x, truth))
        covariance = ((a - a.mean()) * (b - b.mean())).mean()
        luminance = (2 * a.mean() * b.mean() + c1) / (a.mean() ** 2 + b.mean() ** 2 + c1)
        total += share * luminance * (2 * covariance + c2) / (a.var() + b.var() + c2)
    return total


def test_global_ssim_agrees_with_the_formula_of_rog(pair: tuple[Tensor, Tensor]) -> None:
    for x, truth, found in zip(*pair, ssim_global(*pair).tolist(), strict=True):
        assert found == pytest.approx(compute_in_numpy(x.numpy().astype(float), truth.numpy().astype(float)), abs=1e-5)
        assert 0 < found < 1


def test_the_global_ssim_by_hand() -> None:
    grey = torch.tensor([0.0, 1.0, 0.0, 1.0]).reshape(1, 1, 2, 2)
    assert ssim_global(grey, grey).item() == 1
    c1, c2 = 1e-4, 9e-4
    assert ssim_global(1 - grey, grey).item() == pytest.approx((0.5 + c1) / (0.5 + c1) * (-0.5 + c2) / (0.5 + c2), abs=1e-6)
    flat = torch.full_like(grey, 0.5)
    assert ssim_global(flat, grey).item() == pytest.approx(c2 / (0.25 + c2), abs=1e-6)
    red, blue = torch.tensor([1.0, 0, 0]).reshape(1, 3, 1, 1), torch.tensor([0, 0, 1.0]).reshape(1, 3, 1, 1)
    mean = np.array([[0.299, 0.5 + 128 / 255, -0.168736 + 128 / 255], [0.114, -0.081312 + 128 / 255, 0.5 + 128 / 255]])
    planes = (2 * mean[0] * mean[1] + c1) / (mean[0] ** 2 + mean[1] ** 2 + c1)
    assert ssim_global(red, blue).item() == pytest.approx(planes @ [0.8, 0.1, 0.1], abs=1e-5)


def test_the_global_ssim_is_one_for_equal_images_and_symmetric(pair: tuple[Tensor, Tensor]) -> None:
    x, truth = pair
    assert ssim_global(truth, truth).tolist() == pytest.approx([1, 1])
    torch.testing.assert_close(ssim_global(x, truth), ssim_global(truth, x))
    assert (ssim_global(1 - truth, truth) < 0).all()
    with pytest.raises(ValueError, match="1 or 3 channels, got 2"):
        ssim_global(truth[:, :2], truth[:, :2])


def test_global_and_local_ssim_differ_for_strong_contrast_and_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    truth = torch.zeros(1, 1, 32, 32)
    truth[..., 16:] = 1
    noisy = (truth + 0.2 * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    assert ssim_global(noisy, truth).item() > 0.9 > ssim(noisy, truth).item() + 0.2


@pytest.mark.parametrize(
    ("shape", "there"),
    [
        ((3, 12, 12), {"psnr", "ssim", "ssim_global"}),
        ((1, 8, 8), {"psnr", "ssim_global"}),
        ((4, 12, 12), {"psnr", "ssim"}),
        ((5,), {"continuous_error"}),
    ],
)
def test_inapplicable_measures_are_none(shape: tuple[int, ...], there: set[str]) -> None:
    x = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0))
    (row,) = measure(x, x, DataSpec(shape=shape, num_classes=2), "no weights")
    assert {name for name in MEASURES if row[name] is not None} == {"mse", "mse_raw", *there}
    assert row["lpips_reason"] == ("no weights" if len(shape) == 3 else "not an image")
    assert row["success"] is True


def test_measures_of_nan_and_huge_values_are_valid_json(pair: tuple[Tensor, Tensor]) -> None:
    x, truth = pair
    x = x.clone()
    x[0, 0, 0, 0], x[1, 0, 0, 0] = torch.nan, 3e38
    rows = measure(x, truth, COLOUR, "no weights")
    json.dumps([*rows, make_empty_measures("out of memory", COLOUR)], allow_nan=False)
    assert [row["mse_raw"] for row in rows] == [None, None]
    assert all(row["mse"] < 0.05 for row in rows)
    assert measure(x[:0], truth[:0], COLOUR, "no weights") == []


class ConstantLpips(Lpips):
    """An LPIPS that returns constants and counts the images."""

    def __init__(self) -> None:
        self.net, self.asked = "vgg", 0

    def __call__(self, x: Tensor, truth: Tensor) -> Tensor:
        self.asked += len(x)
        assert x.min() >= 0
        assert x.max() <= 1
        return torch.tensor([0.25, 0.5])


@pytest.mark.parametrize(("size", "asked"), [(16, 2), (15, 0)])
def test_lpips_gets_clamped_images_of_sufficient_size(size: int, asked: int) -> None:
    lpips, truth = ConstantLpips(), torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    rows = measure(3 * truth - 1, truth, DataSpec(shape=(3, size, size), num_classes=2), lpips)
    assert lpips.asked == asked
    assert [(row["lpips"], row["lpips_net"]) for row in rows] == ([(0.25, "vgg"), (0.5, "vgg")] if asked else [(None, None)] * 2)
    assert all((row["lpips_reason"] is None) == bool(asked) for row in rows)


def test_measures_of_a_failure_have_the_same_fields(pair: tuple[Tensor, Tensor]) -> None:
    (row, _) = measure(*pair, COLOUR, "no weights")
    failed = make_empty_measures("out of memory", COLOUR)
    assert set(failed) == set(row)
    assert (failed["success"], failed["failure"], failed["lpips_reason"]) == (False, "out of memory", "no reconstruction")
    assert failed["exact_match"] is None


def test_a_failure_on_a_table_row_is_no_exact_match() -> None:
    assert make_empty_measures("out of memory", DataSpec(shape=(3,), num_classes=2))["exact_match"] is False
