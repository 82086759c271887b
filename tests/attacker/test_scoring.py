"""Metrics against scikit-image and hand examples; assignment, intervals."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from attacker.scoring.assignment import assign
from attacker.scoring.metrics import mse, psnr, ssim, succeeded
from attacker.scoring.statistics import mean, rate


@pytest.fixture
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    from skimage.data import astronaut

    image = torch.from_numpy(astronaut()[100:164, 180:260].transpose(2, 0, 1).copy()).float() / 255
    truth = torch.stack([image, image.flip(1)])
    rng = torch.Generator().manual_seed(0)
    noisy = (truth + torch.tensor([0.05, 0.3]).reshape(2, 1, 1, 1) * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    return noisy, truth


def test_ssim_is_scikit_images_own(pictures) -> None:
    for x, truth, ours in zip(*pictures, ssim(*pictures), strict=True):
        theirs = structural_similarity(
            truth.numpy(), x.numpy(), channel_axis=0, data_range=1.0,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        )  # fmt: skip
        assert ours.item() == pytest.approx(theirs, abs=1e-5)
    assert ssim(pictures[1], pictures[1]).tolist() == [1, 1]
    with pytest.raises(ValueError, match="11x11"):
        ssim(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8))


def test_psnr_is_scikit_images_own_per_image_and_capped(pictures) -> None:
    for x, truth, ours in zip(*pictures, psnr(*pictures), strict=True):
        assert ours.item() == pytest.approx(peak_signal_noise_ratio(truth.numpy(), x.numpy(), data_range=1.0), abs=1e-4)
    assert psnr(pictures[1], pictures[1]).tolist() == [120, 120]


def test_mse_by_hand() -> None:
    assert mse(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([[0.5, 0.5], [1.0, 1.0]])).tolist() == [0.25, 0.0]


def test_success_of_images_and_of_rows() -> None:
    truth = torch.full((1, 1, 2, 2), 0.5)
    assert succeeded(truth + 0.0948, truth).item()
    assert not succeeded(truth + 0.0950, truth).item()
    row = torch.tensor([[0.2, 0.4]])
    assert succeeded(row + 0.049, row).item()
    assert not succeeded(row + torch.tensor([[0.0, 0.051]]), row).item()


def test_assignment_is_one_to_one_and_the_best_in_all() -> None:
    truth = torch.tensor([[0.0], [0.4], [1.0]])
    assert assign(torch.tensor([[0.9], [0.05], [0.2]]), truth) == [1, 2, 0]
    assert (
        assign(torch.tensor([[0.41], [0.4]]), truth) == [None, 1, 0]
        or assign(torch.tensor([[0.41], [0.4]]), truth).count(None) == 1
    )
    assert assign(torch.empty(0, 1), truth) == [None, None, None]


def test_a_guess_counts_for_one_original_only() -> None:
    assert assign(torch.tensor([[0.5], [9.0]]), torch.tensor([[0.5], [0.5]])) in ([0, 1], [1, 0])


def test_assignment_survives_values_that_are_no_numbers() -> None:
    assert assign(torch.tensor([[torch.nan], [0.0]]), torch.tensor([[0.0], [1.0]])) == [1, 0]


@pytest.mark.parametrize(("successes", "count"), [(0, 24), (24, 24), (7, 24), (1, 1)])
def test_rates_have_wilsons_interval(successes: int, count: int) -> None:
    theirs = binomtest(successes, count).proportion_ci(method="wilson")
    ours = rate(successes, count)
    assert ours.value == successes / count
    assert (ours.low, ours.high) == (pytest.approx(theirs.low, abs=1e-12), pytest.approx(theirs.high, abs=1e-12))


def test_mean_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for i in range(60):
        estimate = mean(rng.exponential(1.0, size=30).tolist(), seed=i)
        assert estimate.low <= estimate.value <= estimate.high
        held += estimate.low <= 1.0 <= estimate.high
    assert 48 <= held <= 60


def test_mean_of_equal_values_is_certain() -> None:
    estimate = mean([2.0, 2.0, 2.0, 2.0])
    assert (estimate.value, estimate.low, estimate.high, estimate.count) == (2, 2, 2, 4)
