"""Lower bounds on epsilon from guesses about canaries: never above the accountant's, tight with many canaries, exact with one."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from defenses.privacy.accounting import compute_epsilon
from defenses.privacy.empirical import bound_epsilon, bound_gaussian_epsilon, choose_guesses, is_refuted
from defenses.privacy.sensitivity import Noise

DELTA = 1e-5


def guess(canaries: int, rounds: int, multiplier: float, seed: int) -> tuple[int, int]:
    """Return the right guesses and the number of guesses in a simulation without a federation.

    Every canary moves its own coordinate of a Gaussian mechanism by one sensitivity, either way, in every round.
    """
    rng = np.random.default_rng(seed)
    coins = rng.integers(0, 2, canaries) * 2 - 1
    # the sum over rounds of coin + multiplier * noise
    seen = rounds * coins + multiplier * rounds**0.5 * rng.standard_normal(canaries)
    guesses = choose_guesses(canaries)
    surest = np.argpartition(-np.abs(seen), guesses - 1)[:guesses]
    return int((np.sign(seen[surest]) == coins[surest]).sum()), guesses


@pytest.mark.parametrize(("rounds", "multiplier"), [(1, 2.0), (9, 6.0), (10, 8.0)])
def test_a_million_canaries_give_four_fifths_of_the_accounted_epsilon(rounds: int, multiplier: float) -> None:
    right, guesses = guess(1_000_000, rounds, multiplier, seed=1)
    found = bound_gaussian_epsilon(right, guesses, canaries=1_000_000, delta=DELTA)
    accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=rounds)
    assert 0.8 * accounted <= found <= accounted


@pytest.mark.parametrize("multiplier", [0.7, 2.0, 8.0])
def test_the_bound_is_never_above_the_accounted_epsilon_at_its_confidence(multiplier: float) -> None:
    shift, canaries = 2 / multiplier, 400
    refuted = 0
    for seed in range(200):
        right, guesses = guess(canaries, 1, multiplier, seed)
        refuted += is_refuted(right, guesses, shift, canaries=canaries)
        accounted = compute_epsilon(Noise(multiplier), delta=DELTA, times=1)
        assert seed > 5 or bound_epsilon(right, guesses, canaries=canaries, delta=DELTA) <= accounted
    assert refuted <= binom.ppf(0.99, 200, 0.05)


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


def test_guessing_at_random_bounds_nothing() -> None:
    assert bound_gaussian_epsilon(50, 100, canaries=400, delta=DELTA) == 0
    assert bound_epsilon(50, 100, canaries=400, delta=DELTA) == 0
    assert bound_gaussian_epsilon(0, 100, canaries=400, delta=DELTA) == 0


@pytest.mark.parametrize(("right", "guesses", "canaries"), [(3, 2, 5), (-1, 2, 5), (0, 0, 5), (1, 6, 5)])
def test_impossible_counts_are_refused(right: int, guesses: int, canaries: int) -> None:
    for bound in (bound_gaussian_epsilon, bound_epsilon):
        with pytest.raises(ValueError, match="got"):
            bound(right, guesses, canaries=canaries, delta=DELTA)
