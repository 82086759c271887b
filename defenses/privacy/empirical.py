"""Lower bounds on epsilon from one run, by guesses about canaries.

A canary is an example with two versions, which the auditor knows. A fair coin, which the auditor does not see, decides which
version is trained on. The more versions the auditor guesses right from what the mechanism released, the larger epsilon must be.
Two runs that differ in the version of one canary are neighbours by replacing one example, the relation of
`defenses.privacy.accounting.compute_epsilon`.
"""

import math
from collections.abc import Callable
from functools import lru_cache

from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from defenses.privacy.accounting import check_delta, compute_epsilon
from defenses.privacy.sensitivity import Noise

CONFIDENCE_LEVEL = 0.95
MAX_SHIFT = 50.0
"""Largest shift of a Gaussian mechanism, in standard deviations, that is tried."""
MAX_EPSILON = 100.0
NUM_BISECTIONS = 30
GUESS_COUNTS = (100, 300, 1000, 3000, 10_000)
"""Numbers of guesses among which `choose_guesses` chooses."""


def choose_guesses(canaries: int, *, epsilon: float | None = None, delta: float = 1e-5) -> int:
    """Return how many of `canaries` canaries the auditor should guess; the auditor abstains from the least certain ones.

    A canary is a pair of examples, of which a client trains on one; the auditor guesses which.
    The number does not depend on which guesses are right, as the bounds require.
    delta:   the declared delta; without effect if the declared epsilon is not used.
    epsilon: the declared epsilon. The result is then the number in `GUESS_COUNTS`, at most `canaries`, for which
             `bound_gaussian_epsilon` is expected to be largest if the true epsilon equals the declared one. For None, or an
             epsilon that is not in (0, `MAX_EPSILON`), the result is a thousandth of the canaries, at least 100.
    If there are fewer than 100 canaries, the result is all of them.
    """
    usual = min(canaries, max(100, canaries // 1000))
    if epsilon is None or not 0 < epsilon < MAX_EPSILON:
        return usual
    shift = _find_largest(lambda shift: compute_epsilon(Noise(2 / shift), delta=delta, times=1) < epsilon, MAX_SHIFT)
    counts = [count for count in GUESS_COUNTS if count <= canaries] or [usual]

    def expect_bound(count: int) -> float:
        right = int(count * _expect_right(count / canaries, shift))
        return _find_largest(lambda shift: is_refuted(right, count, shift, canaries=canaries), MAX_SHIFT)

    return max(counts, key=expect_bound)


def _expect_right(share: float, shift: float) -> float:
    """Return which share of the guesses is expected to be right under Gaussian noise.

    A canary's score is a noisy estimate of which version was used; the auditor guesses by its sign.
    share: share of all canaries about which the auditor guesses: those with the largest absolute scores. shift: distance between
    the messages with the two versions of a canary, in standard deviations of the noise.
    """

    def count_above(score: float) -> float:
        return float(ndtr(shift / 2 - score) + ndtr(-shift / 2 - score))

    score = _find_largest(lambda score: count_above(score) > share, MAX_SHIFT)
    return float(ndtr(shift / 2 - score)) / count_above(score)


def bound_gaussian_epsilon(
    right: int, guesses: int, *, canaries: int, delta: float, confidence: float = CONFIDENCE_LEVEL
) -> float:
    """Return a lower bound on epsilon of a mechanism that adds Gaussian noise in one or several rounds.

    The bound holds with a probability of at least `confidence`. A canary is a pair of examples, of which a coin chose the one
    that is trained on; the auditor guesses which.
    right: number of right guesses. guesses: number of canaries that are guessed, of all `canaries`; the auditor may abstain from
    the others.
    Raises ValueError if `right` is not in 0 .. guesses, `guesses` not in 1 .. canaries, or `delta` or `confidence` not in (0, 1).
    Source: Mahloujifar, Melis and Chaudhuri 2025, "Auditing f-differential privacy in one run", for the trade-off function of
    Gaussian noise.
    """
    _check_counts(right, guesses, canaries, delta, confidence)
    shift = _find_largest(lambda shift: is_refuted(right, guesses, shift, canaries=canaries, confidence=confidence), MAX_SHIFT)
    return compute_epsilon(Noise(2 / shift), delta=delta, times=1) if shift > 0 else 0.0


def bound_epsilon_of_independent_guesses(
    right: int, guesses: int, *, delta: float, overlap: float = 0.0, confidence: float = CONFIDENCE_LEVEL
) -> float:
    """Return a lower bound on epsilon from guesses about all canaries, for independent Gaussian noise per coordinate.

    A canary is a pair of examples, of which a coin chose the one that is trained on; the auditor guesses which.
    The bound holds with a probability of at least `confidence`. With independent noise, guesses about canaries with orthogonal
    gradients are independent, and the number of right guesses has a binomial distribution (Nasr et al. 2023, "Tight auditing of
    differentially private machine learning", for Gaussian differential privacy). Far fewer canaries are needed than for
    `bound_gaussian_epsilon`, which also holds if the guesses depend on each other.

    right, guesses: number of right guesses, and of all guesses, one for each canary. The result is 0 if at most half are right.
    overlap: mean over canaries of the sum of squared cosines with the gradients of the other canaries of the same message; 0 if
             they are orthogonal. An `overlap` above 0 increases the variance of `right` by the factor of `inflate_variance`;
             `right` and `guesses` are divided by this factor (design effect, Kish 1965).
    Raises ValueError if `right` is not in 0 .. guesses, `guesses` is less than 1, `overlap` is negative, or `delta` or
    `confidence` is not in (0, 1).
    """
    _check_counts(right, guesses, guesses, delta, confidence)
    if not overlap >= 0:
        raise ValueError(f"overlap must not be negative, got {overlap}")
    share = right / guesses
    if share <= 0.5:
        return 0.0
    count = guesses / inflate_variance(share, overlap)
    minimum = float(beta.ppf(1 - confidence, share * count, (1 - share) * count + 1))
    shift = min(2 * float(ndtri(minimum)), MAX_SHIFT)
    return compute_epsilon(Noise(2 / shift), delta=delta, times=1) if shift > 0 else 0.0


def inflate_variance(share: float, overlap: float) -> float:
    """Return an upper bound on the factor by which `overlap` increases the variance of the number of right guesses.

    Guesses are about canaries: pairs of examples, of which a coin chose the one that is trained on.
    share: share p of right guesses, at least 0.5. overlap: mean over canaries of the sum of squared cosines with the gradients of
    the other canaries of the same message.

    A canary's score is a noisy estimate of which of its examples was used; the sign of the score is the guess. The noise in the
    scores of two canaries has the correlation c, the cosine of their gradients. As the coins are fair, the effect
    of this correlation on the covariance of two right guesses is even in c: at most c^2 (1 - p) (2 p - 1) / 2. Each canary also
    moves the score of the other canary, which makes the covariance smaller.
    """
    return 1 + overlap * (2 * share - 1) / (2 * share)


def is_refuted(right: int, guesses: int, shift: float, *, canaries: int, confidence: float = CONFIDENCE_LEVEL) -> bool:
    """Return whether `right` right guesses of `guesses` refute that Gaussian noise hides canaries as well as `shift` states.

    A canary is a pair of examples, of which a coin chose the one that is trained on; the auditor guesses which.
    If the result is True then, under noise of this strength, the probability of at least `right` right guesses is below
    1 - confidence. False proves nothing, since the test is sufficient but not necessary.
    shift: assumed distance between the messages with the two versions of a canary, in standard deviations of the noise.
    canaries: number of all canaries, guessed or not.

    Proof by contradiction: assume that this probability is at least 1 - confidence. For each number i from `right` down to 0, the
    recursion bounds from below two shares of all canaries: the expected share that is guessed right while at least i guesses are
    right, and the expected share that is guessed wrong while at least i guesses are right. If these two shares sum to more than
    the share of guessed canaries, the assumption is wrong.
    """
    if right == 0:
        return False
    level = 1 - confidence
    mass_right, mass_wrong = level * right / canaries, level * (guesses - right) / canaries
    for count in range(right - 1, -1, -1):
        wrong = max(mass_wrong, float(ndtr(ndtri(mass_right) - shift)))
        mass_right += count / (guesses - count) * (wrong - mass_wrong)
        mass_wrong = wrong
        if mass_right + mass_wrong > guesses / canaries:
            return True
    return False


def bound_epsilon(right: int, guesses: int, *, canaries: int, delta: float, confidence: float = CONFIDENCE_LEVEL) -> float:
    """Return a lower bound on epsilon of any mechanism, at most `MAX_EPSILON`, with probability `confidence` or more.

    For mechanisms with Gaussian noise, `bound_gaussian_epsilon` is usually larger. A canary is a pair of examples, of which a
    coin chose the one that is trained on; the auditor guesses which.
    right: number of right guesses. guesses: number of canaries that are guessed, of all `canaries`; the auditor may abstain from
    the others.
    Raises ValueError if `right` is not in 0 .. guesses, `guesses` not in 1 .. canaries, or `delta` or `confidence` not in (0, 1).
    Source: Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", theorem 5.2.
    """
    _check_counts(right, guesses, canaries, delta, confidence)
    return _find_largest(
        lambda epsilon: _chance(right, guesses, epsilon, canaries=canaries, delta=delta) < 1 - confidence, MAX_EPSILON
    )


@lru_cache(maxsize=1024)
def _chance(right: int, guesses: int, epsilon: float, *, canaries: int, delta: float) -> float:
    """Return an upper bound on the probability of at least `right` right guesses under differential privacy.

    epsilon, delta: of the differential privacy that is assumed.
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, accuracy))
    steps = range(1, right + 1)
    sums = binom.cdf(right - 1, guesses, accuracy) - binom.cdf([right - 1 - i for i in steps], guesses, accuracy)
    slope = max((float(total) / i for i, total in zip(steps, sums, strict=True)), default=0.0)
    return min(1.0, tail + 2 * canaries * delta * slope)


def _find_largest(holds: Callable[[float], bool], high: float) -> float:
    """Find the largest value in [0, high] for which `holds` is true, by bisection; the result is at most high * 2^-30 too small.

    `holds` must be true up to this value and false above it. If it is false everywhere, the result is 0.
    """
    low = 0.0
    if holds(high):
        return high
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check_counts(right: int, guesses: int, canaries: int, delta: float, confidence: float) -> None:
    check_delta(delta)
    if not 1 <= guesses <= canaries:
        raise ValueError(f"guesses must be from 1 to the number of canaries, {canaries}, got {guesses}")
    if not 0 <= right <= guesses:
        raise ValueError(f"right must be from 0 to the number of guesses, got {right} of {guesses}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be greater than 0 and less than 1, got {confidence}")
