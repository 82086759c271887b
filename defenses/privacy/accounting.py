"""Differential privacy of a defense: epsilon over rounds, and upper bounds on the success of reconstruction.

Epsilon and these bounds are computed from the noise multiplier: the scale of the noise (standard deviation of Gaussian noise)
divided by the sensitivity, which is the largest norm of what the noise hides. Two relations between neighbouring inputs are used:

* replace-one: the hidden part is replaced by any other one, so that the message moves by at most twice the sensitivity.
  `compute_epsilon` and `compute_epsilon_drawn` use it. Batch sizes and numbers of clients do not change and may be public.
* add-or-remove-one: the hidden part is present or absent, so that the message moves by at most the sensitivity.
  `compute_epsilon_poisson` uses it.
"""

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from defenses.privacy.sensitivity import Noise

RENYI_ORDERS = (1.02, 1.05, *(1 + i / 10 for i in range(1, 10)), *(2 + i / 2 for i in range(18)), *range(11, 64), 128, 256, 512)
SAMPLED_ORDERS = tuple(order for order in RENYI_ORDERS if order >= 2 and (order > 4 or order == int(order)))
"""Orders of Renyi divergence for sampled noise. Small fractional orders are left out, since their series may not converge."""
MIN_MULTIPLIER, MAX_MULTIPLIER = 1e-3, 1e4
"""Range of noise multipliers in which the formulas are numerically exact. Below this range, the bound by Renyi divergence is used
instead of the exact epsilon (2 % larger). Outside of the range, amplification by sampling is ignored, since its effect is
negligible."""


# --- epsilon ---


def compute_epsilon(noise: Noise, *, delta: float, times: int = 1) -> float:
    """Return epsilon of (epsilon, delta)-differential privacy for `times` releases: 0 for no release, infinite without noise.

    The relation is replace-one: two runs are compared, in which the hidden part, such as one example, is replaced by another.

    Gaussian noise: exact for all releases together (Balle & Wang 2018, theorem 8), or an upper bound if the noise multiplier /
    sqrt(4 * times) is below `MIN_MULTIPLIER`. Laplace noise: an upper bound. It rests on the Renyi divergence of Laplace noise,
    which is at most the Renyi divergence of Gaussian noise whose standard deviation is the scale of the Laplace noise.
    Raises ValueError if `delta` is not in (0, 1), or `times` is negative.
    """
    if _is_trivial(noise, delta, times):
        return 0.0 if times == 0 else math.inf
    shift = 2 * math.sqrt(times) / noise.multiplier
    return (
        _compute_gaussian_epsilon(1 / shift, delta)
        if noise.family == "gaussian"
        else _compute_renyi_epsilon(shift * shift / 2, delta)
    )


def compute_epsilon_drawn(noise: Noise, *, delta: float, times: int, drawn: int, population: int) -> float:
    """Return an upper bound on epsilon of `times` noisy sums over `drawn` clients sampled without replacement from `population`.

    The relation is replace-one: two runs are compared, in which one client is replaced by another. The result holds against an
    observer who sees only the sums: neither which clients were sampled nor their messages. The noise must be Gaussian, which is
    not checked. The result is the smaller of the epsilon without amplification by sampling and the epsilon of Wang,
    Balle & Kasiviswanathan 2019, theorem 27. If the noise multiplier is not between `MIN_MULTIPLIER` and `MAX_MULTIPLIER`, the
    result is the epsilon without amplification. The result is 0 for times=0, and infinite without noise.
    Raises ValueError if `drawn` is not in 1 .. population, `delta` is not in (0, 1), or `times` is negative.
    """
    if not 0 < drawn <= population:
        raise ValueError(f"drawn must be from 1 to the population of {population} clients, got {drawn}")
    plain = compute_epsilon(noise, delta=delta, times=times)
    if drawn == population or times == 0 or not MIN_MULTIPLIER < noise.multiplier < MAX_MULTIPLIER:
        return plain
    return min(plain, _convert_divergences(times, _compute_drawn_divergences(noise.multiplier / 2, drawn, population), delta))


def compute_epsilon_poisson(noise: Noise, *, delta: float, times: int, rate: float) -> float:
    """Return an upper bound on epsilon of `times` noisy sums, each of which includes every example with probability `rate`.

    Examples are sampled independently (Poisson sampling). This is an assumption: batches of shuffled epochs are sampled
    differently. The relation is add-or-remove-one: two runs are compared, with and without one example. The noise must be
    Gaussian, which is not checked.
    times: number of sums that are released, such as the number of training steps. The result is 0 for times=0, and infinite
           without noise.
    Raises ValueError if `rate` is not in (0, 1], `delta` is not in (0, 1), or `times` is negative.
    Source: Mironov, Talwar & Zhang 2019.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}")
    if _is_trivial(noise, delta, times):
        return 0.0 if times == 0 else math.inf
    plain = _compute_gaussian_epsilon(noise.multiplier / math.sqrt(times), delta)
    if not MIN_MULTIPLIER < noise.multiplier < MAX_MULTIPLIER:
        return plain
    return min(plain, _convert_divergences(times, _compute_poisson_divergences(noise.multiplier, rate), delta))


def check_delta(delta: float) -> float:
    """Return `delta`. Raises ValueError if it is not in (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must be greater than 0 and less than 1, got {delta}")
    return delta


def check_prior(prior: float) -> float:
    """Return `prior`. Raises ValueError if it is not in (0, 1)."""
    if not 0 < prior < 1:
        raise ValueError(f"prior must be greater than 0 and less than 1, got {prior}")
    return prior


def _is_trivial(noise: Noise, delta: float, times: int) -> bool:
    check_delta(delta)
    if times < 0:
        raise ValueError(f"times is a number of releases and must not be negative, got {times}")
    return times == 0 or noise.multiplier <= 0


def _compute_gaussian_epsilon(multiplier: float, delta: float) -> float:
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if multiplier < MIN_MULTIPLIER:
        return _compute_renyi_epsilon(1 / multiplier / multiplier / 2, delta)
    return float(get_epsilon_gaussian(multiplier, delta))


def _compute_renyi_epsilon(rho: float, delta: float) -> float:
    return _convert_divergences(1, tuple((order, rho * order) for order in RENYI_ORDERS), delta)


def _convert_divergences(times: int, divergences: tuple[tuple[float, float], ...], delta: float) -> float:
    from dp_accounting.rdp import compute_epsilon as convert_to_epsilon

    orders, values = zip(*divergences, strict=True)
    return float(convert_to_epsilon(orders, [times * value for value in values], delta)[0])


@lru_cache(maxsize=16)
def _compute_drawn_divergences(multiplier: float, drawn: int, population: int) -> tuple[tuple[float, float], ...]:
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent

    event = SampledWithoutReplacementDpEvent(population, drawn, GaussianDpEvent(multiplier))
    return _compute_divergences(event, NeighboringRelation.REPLACE_ONE)


@lru_cache(maxsize=16)
def _compute_poisson_divergences(multiplier: float, rate: float) -> tuple[tuple[float, float], ...]:
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent

    event = PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier))
    return _compute_divergences(event, NeighboringRelation.ADD_OR_REMOVE_ONE)


def _compute_divergences(event: Any, relation: Any) -> tuple[tuple[float, float], ...]:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders=SAMPLED_ORDERS, neighboring_relation=relation)
    accountant.compose(event)
    return tuple(zip(map(float, accountant.orders), map(float, accountant.rdp), strict=True))


# --- reconstruction ---


def bound_reconstruction(prior: float, mu: float) -> float:
    """Return an upper bound on the probability that a reconstruction from messages with Gaussian noise succeeds.

    The bound is Phi(Phi^-1(prior) + mu), where Phi is the standard normal distribution function. It holds for any criterion of
    success, as long as `prior` is computed for the same criterion.

    prior: success probability of the best guess without seeing any message; in (0, 1).
    mu:    sqrt(T) * C / sigma for T messages of norm at most C, each with noise of standard deviation sigma per coordinate; not
           negative.

    Raises ValueError for other values of `prior` and `mu`.
    Source: Hayes et al. 2023, "Bounding training data reconstruction in DP-SGD", section 3. Composition by Dong, Roth & Su 2022,
    section 3.
    """
    _check_guess(prior, mu)
    if mu == math.inf:
        return 1.0
    return NormalDist().cdf(NormalDist().inv_cdf(prior) + mu)


def bound_reconstruction_renyi(prior: float, mu: float) -> float:
    """Return an upper bound on the probability that a reconstruction succeeds, for noise with a bounded Renyi divergence.

    The divergence of order a between the messages and pure noise must be at most a * mu**2 / 2, as for Laplace noise. The bound
    is exp(-(sqrt(-ln prior) - mu / sqrt(2))**2) for mu up to sqrt(-2 ln prior), and 1 for larger mu. For mu up to sqrt(-2 ln
    prior), it is the minimum over a > 1 of (prior * exp(a * mu**2 / 2))^((a - 1) / a).
    prior: success probability of the best guess without seeing any message; in (0, 1).
    mu:    sqrt(T) divided by the noise multiplier for T messages; not negative.

    Raises ValueError for other values of `prior` and `mu`.
    Source: Balle, Cherubin & Hayes 2022, "Reconstructing training data with informed adversaries".
    """
    _check_guess(prior, mu)
    return math.exp(-(max(0.0, math.sqrt(-math.log(prior)) - mu / math.sqrt(2)) ** 2))


def compute_bound(noise: Noise, *, prior: float, times: int) -> float:
    """Return an upper bound on the probability that a reconstruction from `times` messages with `noise` succeeds.

    prior: success probability of the best guess without seeing any message, in (0, 1). For times=0 the bound is `prior`, up to
    rounding. For larger `times` without noise, the bound is 1. Raises ValueError for a negative `times`, and for a `prior` out of
    range.
    """
    if times < 0:
        raise ValueError(f"times must not be negative, got {times}")
    mu = math.sqrt(times) / noise.multiplier if noise.multiplier > 0 else math.inf if times else 0.0
    return bound_reconstruction(prior, mu) if noise.family == "gaussian" else bound_reconstruction_renyi(prior, mu)


def _check_guess(prior: float, mu: float) -> None:
    check_prior(prior)
    if not mu >= 0:
        raise ValueError(f"mu must not be negative, got {mu}")
