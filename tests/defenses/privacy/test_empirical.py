"""Tests of lower bounds on epsilon from guesses about canaries: below the accountant's, tight for many of them, exact for one."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from defenses.privacy.accounting import compute_epsilon
from defenses.privacy.empirical import (
    bound_epsilon,
    bound_epsilon_of_independent_guesses,
    bound_gaussian_epsilon,
    choose_guesses,
    inflate_variance,
    is_refuted,
)
from defenses.privacy.sensitivity import Noise

DELTA = 1e-5


def simulate_guesses(
    canaries: int, rounds: int, multiplier: float, seed: int, *, epsilon: float | None = None
) -> tuple[int, int]:
    """Return the number of right guesses and of all guesses in a simulation without a federation.

    Every canary moves its own coordinate of a Gaussian mechanism by one sensitivity, either way, in every round.
    """
    rng = np.random.default_rng(seed)
    coins = rng.integers(0, 2, canaries) * 2 - 1
    # the sum over rounds of coin + multiplier * noise
    seen = rounds * coins + multiplier * rounds**0.5 * rng.standard_normal(canaries)
    guesses = choose_guesses(canaries, epsilon=epsilon, delta=DELTA)
    surest = np.argpartition(-np.abs(seen), guesses - 1)[:guesses]
    return int((np.sign(seen[surest]) == coins[surest]).sum()), guesses


@pytest.mark.parametrize(("rounds", "multiplier"), [(1, 2.0), (9, 6.0), (10, 8.0)])
def test_a_million_canaries_give_four_fifths_of_the_accounted_epsilon(rounds: int, multiplier: float) -> None:
    right, guesses = simulate_guesses(1_000_000, rounds, multiplier, seed=1)
    found = bound_gaussian_epsilon(right, guesses, canaries=1_000_000, delta=DELTA)
    accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=rounds)
    assert 0.8 * accounted <= found <= accounted


@pytest.mark.parametrize(("multiplier", "least"), [(1.0, 0.6), (2.0, 0.6), (4.0, 0.6)])
def test_ten_thousand_canaries_give_more_with_guesses_for_the_declared_epsilon(multiplier: float, least: float) -> None:
    accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=1)
    right, guesses = simulate_guesses(10_000, 1, multiplier, seed=1, epsilon=accounted)
    found = bound_gaussian_epsilon(right, guesses, canaries=10_000, delta=DELTA)
    assert least * accounted <= found <= accounted
    usual = bound_gaussian_epsilon(*simulate_guesses(10_000, 1, multiplier, seed=1), canaries=10_000, delta=DELTA)
    assert multiplier > 1 or found > 1.3 * usual


def test_more_guesses_are_made_for_a_larger_epsilon() -> None:
    counts = [choose_guesses(10_000, epsilon=epsilon, delta=DELTA) for epsilon in (1.0, 10.0, 30.0)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    assert choose_guesses(40, epsilon=3.0) == 40


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 8.0])
def test_the_bound_is_never_above_the_accounted_epsilon_at_its_confidence(multiplier: float) -> None:
    shift, canaries = 2 / multiplier, 400
    refuted = 0
    for seed in range(200):
        right, guesses = simulate_guesses(canaries, 1, multiplier, seed)
        refuted += is_refuted(right, guesses, shift, canaries=canaries)
        accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=1)
        assert seed > 5 or bound_epsilon(right, guesses, canaries=canaries, delta=DELTA) <= accounted
    assert refuted <= binom.ppf(0.99, 200, 0.05)


@pytest.mark.parametrize("multiplier", [0.7, 1.0, 2.0, 4.0])
def test_ten_thousand_independent_guesses_give_four_fifths_of_the_accounted_epsilon(multiplier: float) -> None:
    accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=1)
    found = []
    for seed in range(200):
        right = int((np.random.default_rng(seed).standard_normal(10_000) * multiplier + 1 > 0).sum())
        found.append(bound_epsilon_of_independent_guesses(right, 10_000, delta=DELTA))
    assert np.quantile(found, 0.05) >= 0.8 * accounted
    assert 1 <= sum(one > accounted for one in found) <= binom.ppf(0.99, 200, 0.05)


def guess_overlapping(canaries: int, dimensions: int, common: float, multiplier: float, seed: int) -> tuple[int, float]:
    """Return the number of right guesses, and the mean sum of a canary's squared cosines with others, for random directions."""
    rng = np.random.default_rng(seed)
    directions = rng.standard_normal((canaries, dimensions)) + common * rng.standard_normal(dimensions)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    coins = rng.integers(0, 2, canaries) * 2 - 1
    scores = directions @ (coins @ directions + multiplier * rng.standard_normal(dimensions))
    overlap = float(((directions @ directions.T) ** 2).sum()) / canaries - 1
    return int((np.sign(scores) == coins).sum()), overlap


@pytest.mark.parametrize(("dimensions", "common", "multiplier"), [(2000, 0.0, 1.0), (50, 0.0, 4.0), (500, 1.0, 8.0)])
def test_overlapping_canaries_are_not_taken_for_independent_ones(dimensions: int, common: float, multiplier: float) -> None:
    accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=1)
    guesses = [guess_overlapping(200, dimensions, common, multiplier, seed) for seed in range(200)]
    found = [bound_epsilon_of_independent_guesses(right, 200, delta=DELTA, overlap=overlap) for right, overlap in guesses]
    assert sum(one > accounted for one in found) <= binom.ppf(0.99, 200, 0.05)


@pytest.mark.parametrize(("cosine", "score"), [(0.3, 1.0), (0.6, 0.5), (0.9, 2.0)])
def test_the_variance_of_right_guesses_is_inflated_at_most_as_computed(cosine: float, score: float) -> None:
    """With a share p of right guesses, the covariance of two is at most cosine^2 (1 - p) (2 p - 1) / 2."""
    rng, draws = np.random.default_rng(0), 400_000
    coins = rng.integers(0, 2, (2, draws)) * 2 - 1
    noise = rng.multivariate_normal([0, 0], [[1, cosine], [cosine, 1]], draws).T
    p = float(ndtr(score))
    most = cosine**2 * (1 - p) * (2 * p - 1) / 2
    alone = np.cov((score * coins + noise) * coins > 0)[0, 1]
    assert 0.1 * most < alone <= 1.02 * most
    assert np.cov((score * (coins + cosine * coins[::-1]) + noise) * coins > 0)[0, 1] < alone
    assert inflate_variance(p, overlap=9 * cosine**2) == pytest.approx(1 + 9 * most / (p * (1 - p)))
    assert bound_epsilon_of_independent_guesses(800, 1000, delta=DELTA, overlap=9.0) < bound_epsilon_of_independent_guesses(
        800, 1000, delta=DELTA
    )


def test_guesses_that_are_right_by_chance_bound_nothing() -> None:
    assert bound_epsilon_of_independent_guesses(500, 1000, delta=DELTA) == 0.0
    with pytest.raises(ValueError, match="overlap must not be negative"):
        bound_epsilon_of_independent_guesses(600, 1000, delta=DELTA, overlap=-1.0)


def test_a_mechanism_that_hides_nothing_is_refuted() -> None:
    assert is_refuted(100, 100, 0.25, canaries=400)
    assert bound_gaussian_epsilon(100, 100, canaries=400, delta=DELTA) > compute_epsilon(Noise(8.0), delta=DELTA, times=1)
    assert bound_epsilon(100, 100, canaries=400, delta=DELTA) > 2


def test_one_canary_gives_the_exact_test() -> None:
    """A mechanism with a shift s is guessed right with probability Phi(s / 2), which must be at least 1 - confidence."""
    exact = 2 * float(ndtri(0.9))
    assert is_refuted(1, 1, exact - 1e-6, canaries=1, confidence=0.1)
    assert not is_refuted(1, 1, exact + 1e-6, canaries=1, confidence=0.1)
    assert float(ndtr(exact / 2)) == pytest.approx(0.9)


def test_pure_epsilon_of_one_guess_is_that_of_randomised_response() -> None:
    """With delta near 0, one right guess refutes every epsilon whose randomised response is right too seldom."""
    found = bound_epsilon(1, 1, canaries=1, delta=1e-12, confidence=0.1)
    assert 1 / (1 + np.exp(-found)) == pytest.approx(0.9)


def test_delta_raises_the_chance_of_one_right_guess_by_twice_delta_where_the_guess_is_wrong() -> None:
    """Theorem 5.2 for one canary: the chance is p + 2 delta (1 - p) with p = 1 / (1 + exp(-epsilon))."""
    found = bound_epsilon(1, 1, canaries=1, delta=0.1, confidence=0.1)
    p = 1 / (1 + np.exp(-found))
    assert p + 2 * 0.1 * (1 - p) == pytest.approx(0.9)


def test_guessing_at_random_bounds_nothing() -> None:
    assert bound_gaussian_epsilon(50, 100, canaries=400, delta=DELTA) == 0
    assert bound_epsilon(50, 100, canaries=400, delta=DELTA) == 0
    assert bound_gaussian_epsilon(0, 100, canaries=400, delta=DELTA) == 0


@pytest.mark.parametrize(("right", "guesses", "canaries"), [(3, 2, 5), (-1, 2, 5), (0, 0, 5), (1, 6, 5)])
def test_impossible_counts_are_refused(right: int, guesses: int, canaries: int) -> None:
    for bound in (bound_gaussian_epsilon, bound_epsilon):
        with pytest.raises(ValueError, match="got"):
            bound(right, guesses, canaries=canaries, delta=DELTA)
