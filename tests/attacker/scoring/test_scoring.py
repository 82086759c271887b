"""Tests of metrics against scikit-image and values by hand, of the assignment of reconstructions, and of intervals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import binom, binomtest, sem, t
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from attacker.report.formats import format_interval
from attacker.scoring.assignment import assign_reconstructions
from attacker.scoring.metrics import is_flat, is_recovered, mse, psnr, ssim
from attacker.scoring.statistics import Estimate, estimate_share, find_clusters, mean


@pytest.fixture
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    from skimage.data import astronaut

    image = torch.from_numpy(astronaut()[100:164, 180:260].transpose(2, 0, 1).copy()).float() / 255
    truth = torch.stack([image, image.flip(1)])
    rng = torch.Generator().manual_seed(0)
    noisy = (truth + torch.tensor([0.05, 0.3]).reshape(2, 1, 1, 1) * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    return noisy, truth


def test_ssim_agrees_with_scikit_image(pictures) -> None:
    for x, truth, ours in zip(*pictures, ssim(*pictures), strict=True):
        theirs = structural_similarity(
            truth.numpy(), x.numpy(), channel_axis=0, data_range=1.0,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
        )  # fmt: skip
        assert ours.item() == pytest.approx(theirs, abs=1e-5)
    assert ssim(pictures[1], pictures[1]).tolist() == [1, 1]
    with pytest.raises(ValueError, match="11x11"):
        ssim(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8))


def test_psnr_agrees_with_scikit_image_and_is_capped(pictures) -> None:
    for x, truth, ours in zip(*pictures, psnr(*pictures), strict=True):
        assert ours.item() == pytest.approx(peak_signal_noise_ratio(truth.numpy(), x.numpy(), data_range=1.0), abs=1e-4)
    assert psnr(pictures[1], pictures[1]).tolist() == [120, 120]


def test_mse_by_hand() -> None:
    assert mse(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), torch.tensor([[0.5, 0.5], [1.0, 1.0]])).tolist() == [0.25, 0.0]


def test_success_thresholds_of_images_and_table_rows() -> None:
    truth = torch.full((1, 1, 2, 2), 0.5)
    assert is_recovered(truth + 0.0948, truth).item()
    assert not is_recovered(truth + 0.0950, truth).item()
    row = torch.tensor([[0.2, 0.4]])
    assert is_recovered(row + 0.049, row).item()
    assert not is_recovered(row + torch.tensor([[0.0, 0.051]]), row).item()


def test_image_recovered_by_its_mean_colour_is_flat() -> None:
    flat = torch.full((1, 3, 4, 4), 0.3)
    striped = flat.clone()
    striped[..., ::2] = 0.7
    assert is_flat(torch.cat([flat, striped])).tolist() == [True, False]


def test_assignment_is_one_to_one_and_optimal() -> None:
    truth = torch.tensor([[0.0], [0.4], [1.0]])
    assert assign_reconstructions(torch.tensor([[0.9], [0.05], [0.2]]), truth) == [1, 2, 0]
    assert (
        assign_reconstructions(torch.tensor([[0.41], [0.4]]), truth) == [None, 1, 0]
        or assign_reconstructions(torch.tensor([[0.41], [0.4]]), truth).count(None) == 1
    )
    assert assign_reconstructions(torch.empty(0, 1), truth) == [None, None, None]


def test_one_reconstruction_counts_for_one_original_only() -> None:
    assert assign_reconstructions(torch.tensor([[0.5], [9.0]]), torch.tensor([[0.5], [0.5]])) in ([0, 1], [1, 0])


def test_assignment_with_nan() -> None:
    assert assign_reconstructions(torch.tensor([[torch.nan], [0.0]]), torch.tensor([[0.0], [1.0]])) == [1, 0]


@pytest.mark.parametrize(("successes", "count"), [(0, 24), (24, 24), (7, 24), (1, 1), (3, 8)])
def test_interval_of_independent_examples_is_the_mid_p_interval(successes: int, count: int) -> None:
    """At either end of the mid-p interval, half the chance of this result plus that of more extreme ones is 2.5 %."""
    ours = estimate_share([1.0] * successes + [0.0] * (count - successes))
    assert ours.value == successes / count
    above = binom.sf(successes, count, ours.low) + binom.pmf(successes, count, ours.low) / 2
    below = binom.cdf(successes - 1, count, ours.high) + binom.pmf(successes, count, ours.high) / 2
    assert ours.low == 0 if successes == 0 else above == pytest.approx(0.025)
    assert ours.high == 1 if successes == count else below == pytest.approx(0.025)
    exact = binomtest(successes, count).proportion_ci(method="exact")
    assert exact.low <= ours.low <= ours.value <= ours.high <= exact.high


Design = tuple[int, int, float]
"""Number of clusters, their size, and the correlation within them."""
DESIGNS: list[Design] = [(8, 1, 0), (30, 1, 0), (8, 8, 1), (12, 4, 1), (12, 4, 0), (10, 8, 0.3), (12, 8, 0.6), (30, 4, 0.6)]
FEW: list[Design] = [(4, 1, 0), (4, 8, 0.6), (4, 8, 1), (6, 4, 0.3)]
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
REPETITIONS = 500
"""Samples of each design and share; a coverage of 0.95 then has the standard error 0.01, and 0.003 over all shares."""


def draw_successes(rng: np.random.Generator, design: Design, share: float, repetitions: int = REPETITIONS) -> NDArray[Any]:
    """Draw successes (repetitions, clusters, size), with the share of each cluster from a beta distribution."""
    count, size, correlation = design
    if correlation == 1:
        own = (rng.random((repetitions, count)) < share).astype(float)
    elif correlation == 0:
        own = np.full((repetitions, count), share)
    else:
        total = (1 - correlation) / correlation
        own = rng.beta(share * total, (1 - share) * total, (repetitions, count))
    return (rng.random((repetitions, count, size)) < own[..., None]).astype(float)


def measure_coverage(samples: NDArray[Any], true: float, estimate: Callable[..., Estimate]) -> float:
    """Compute the share of intervals that contain the true value. samples: (repetitions, clusters, size)."""
    clusters = np.repeat(np.arange(samples.shape[1]), samples.shape[2]).tolist()
    found = [estimate(sample.ravel(), clusters) for sample in samples]
    assert all(one.low <= one.value <= one.high for one in found)
    return float(np.mean([one.low <= true <= one.high for one in found]))


@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_intervals_of_shares_have_the_nominal_coverage(design: Design) -> None:
    rng = np.random.default_rng(7)
    held = [measure_coverage(draw_successes(rng, design, value), value, estimate_share) for value in SHARES]
    assert 0.92 <= np.mean(held) <= 0.98, held
    assert min(held) > 0.90, held


@pytest.mark.parametrize("design", FEW, ids=str)
def test_intervals_of_shares_of_few_clusters_cover_at_least_90_percent(design: Design) -> None:
    rng = np.random.default_rng(9)
    assert min(measure_coverage(draw_successes(rng, design, value), value, estimate_share) for value in (0.02, *SHARES)) > 0.90


@pytest.mark.parametrize("successes", range(4))
def test_intervals_of_three_mixed_clusters_are_wide(successes: int) -> None:
    values = [1.0, 0.0, 0.0, 0.0] * successes + [0.0] * 4 * (3 - successes)
    whole = estimate_share([1.0] * successes + [0.0] * (3 - successes))
    assert estimate_share(values, [i // 4 for i in range(12)]).high - estimate_share(values).high > 0.1
    assert (
        estimate_share([1.0, 1.0, 1.0, 1.0] * successes + [0.0] * 4 * (3 - successes), [i // 4 for i in range(12)]).high
        == whole.high
    )


@pytest.mark.parametrize("clusters", [1, 2, 4])
def test_mean_of_fewer_than_five_clusters_has_no_interval(clusters: int) -> None:
    found = mean([10.0 + i for i in range(2 * clusters)], [i // 2 for i in range(2 * clusters)])
    assert not found.is_interval
    assert (found.low, found.high) == (10.0, 10.0 + 2 * clusters - 1)
    assert format_interval(found, 1) == f"values 10.0 to {found.high:.1f}; no interval of {clusters} group{'s' * (clusters > 1)}"
    assert mean([10.0, 11.0, 12.0, 13.0, 14.0]).is_interval
    assert format_interval(Estimate(1.0, 0.5, 1.5, 9, 9), 1) == "0.5 to 1.5"


@pytest.mark.parametrize("design", [(6, 1, 0), *DESIGNS], ids=str)
@pytest.mark.parametrize("skewed", [False, True])
def test_intervals_of_means_have_the_nominal_coverage(design: Design, skewed: bool) -> None:
    count, size, correlation = design
    rng = np.random.default_rng(8)
    draw = rng.exponential if skewed else rng.normal
    common, own = draw(size=(REPETITIONS, count, 1)), draw(size=(REPETITIONS, count, size))
    samples = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
    true = (np.sqrt(correlation) + np.sqrt(1 - correlation)) * skewed
    assert 0.92 <= measure_coverage(samples, true, mean) <= 0.98


def test_interval_of_the_mean_of_many_examples_is_the_t_interval() -> None:
    values = np.random.default_rng(3).normal(size=300)
    found = mean(values.tolist())
    assert (found.low, found.high) == pytest.approx(t.interval(0.95, 299, loc=values.mean(), scale=sem(values)))


def test_interval_of_a_skewed_mean_is_the_t_interval_below_and_wider_above() -> None:
    """A long tail upwards: the sample may lack it, so that the mean may be higher than the t interval allows."""
    values = np.random.default_rng(0).exponential(size=30)
    found, whole = mean(values.tolist()), t.interval(0.95, 29, loc=values.mean(), scale=sem(values))
    assert found.low == pytest.approx(whole[0])
    assert found.high > whole[1] + 0.1 * (whole[1] - whole[0])


def test_standard_error_of_a_resample_is_limited_from_below() -> None:
    """A third of the resamples lack the only 1, and have the error 0; without the limit the interval would have no end."""
    found = mean([0.0, 0.0, 0.0, 0.0, 1.0])
    assert found.high == pytest.approx(0.2 + 0.2 / 0.3)


def test_uniform_batches_count_as_one_example_each() -> None:
    values, clusters = [1.0] * 24 + [0.0] * 40, [i // 8 for i in range(64)]
    clustered, alone = estimate_share(values, clusters), estimate_share([1.0] * 3 + [0.0] * 5)
    assert (clustered.value, clustered.low, clustered.high) == pytest.approx((alone.value, alone.low, alone.high))
    assert (clustered.count, clustered.clusters) == (64, 8)
    assert estimate_share(values).low > clustered.low


def test_cases_that_share_an_example_are_one_cluster() -> None:
    assert find_clusters([(1, "a"), (2, "a"), (3, "b"), (4, "c"), (2, "c")]) == {1: 0, 2: 0, 3: 1, 4: 0}


def test_mean_has_a_median_and_deciles() -> None:
    found = mean([float(i) for i in range(101)])
    assert (found.value, found.median, found.p10, found.p90) == (50, 50, 10, 90)


def test_interval_of_equal_values_is_a_point() -> None:
    estimate = mean([2.0, 2.0, 2.0, 2.0])
    assert (estimate.value, estimate.low, estimate.high, estimate.count) == (2, 2, 2, 4)
