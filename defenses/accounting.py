"""What differential privacy promises for a defense: epsilon over rounds, and how often reconstruction may then succeed.

Noise hides whatever is of bounded length. Everything here follows from one number, the noise multiplier: the noise's standard
deviation over the greatest length of what it hides. Two relations between neighbouring inputs occur:

* replace-one: the hidden part is exchanged for any other one, at most twice its greatest length away. All of `epsilon` and
  `epsilon_drawn` is meant so: sizes and numbers stay the same, and may be public.
* add-or-remove-one: the hidden part is there or not, at most its length away. Poisson sampling is accounted for so.

Where nothing is hidden, epsilon is infinite and the bound on reconstruction is 1.
"""

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from defenses.sensitivity import Noise

ORDERS = (1.02, 1.05, *(1 + i / 10 for i in range(1, 10)), *(2 + i / 2 for i in range(18)), *range(11, 64), 128, 256, 512)
SAMPLED_ORDERS = tuple(order for order in ORDERS if order >= 2 and (order > 4 or order == int(order)))
"""Orders of Renyi divergence; for sampled noise without the small fractions, of which the series may not converge."""
LEAST, MOST = 1e-3, 1e4
"""Noise multipliers beyond which formulas are lost in rounding. Below, the bound by Renyi divergence, 2 % larger, stands for the
exact epsilon; on both sides, sampling is not accounted for: it hides next to nothing, or all is hidden already."""


# --- epsilon ---


def epsilon(noise: Noise, *, delta: float, times: int = 1) -> float:
    """Epsilon of (epsilon, delta)-differential privacy of `times` releases, relation replace-one; infinite without noise.

    Gaussian noise is exact: `times` releases are one with a noise multiplier smaller by sqrt(times), and the analytic Gaussian
    mechanism (Balle & Wang 2018, theorem 8) says the rest. Laplace noise of scale b hides a shift d of one coordinate with a
    Renyi divergence of order a of at most a * d**2 / (2 * b**2), as Gaussian noise of standard deviation b does; the sum over
    coordinates needs the Euclidean length alone, and no factor for their number as the bound by the L1 norm would.
    """
    if _nothing(noise, delta, times):
        return 0.0 if times == 0 else math.inf
    shift = 2 * math.sqrt(times) / noise.multiplier
    return _of_gaussian(1 / shift, delta) if noise.family == "gaussian" else _of_renyi(shift * shift / 2, delta)


def epsilon_drawn(noise: Noise, *, delta: float, times: int, drawn: int, population: int) -> float:
    """Epsilon of `times` sums over `drawn` of `population` clients, drawn anew without replacement; relation replace-one.

    For those who see the sums, and neither who was drawn nor the parts. Gaussian noise; Wang, Balle & Kasiviswanathan 2019,
    theorem 27, or no amplification at all where that is smaller.
    """
    if not 0 < drawn <= population:
        raise ValueError(f"drawn must lie in 1 .. population = {population}, got {drawn}")
    plain = epsilon(noise, delta=delta, times=times)
    if drawn == population or times == 0 or not LEAST < noise.multiplier < MOST:
        return plain
    return min(plain, _of_divergences(times, _drawn_divergences(noise.multiplier / 2, drawn, population), delta))


def epsilon_poisson(noise: Noise, *, delta: float, times: int, rate: float) -> float:
    """Epsilon of `times` sums that each example enters by chance, with probability `rate`; relation add-or-remove-one.

    An assumption: batches out of shuffled epochs are not drawn so. Gaussian noise; Mironov, Talwar & Zhang 2019.
    """
    if not 0 < rate <= 1:
        raise ValueError(f"rate must be in (0, 1], got {rate}")
    if _nothing(noise, delta, times):
        return 0.0 if times == 0 else math.inf
    plain = _of_gaussian(noise.multiplier / math.sqrt(times), delta)
    if not LEAST < noise.multiplier < MOST:
        return plain
    return min(plain, _of_divergences(times, _poisson_divergences(noise.multiplier, rate), delta))


def check_delta(delta: float) -> float:
    """`delta` itself. Raises ValueError outside of (0, 1)."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must be greater than 0 and less than 1, got {delta}")
    return delta


def check_prior(prior: float) -> float:
    """`prior` itself. Raises ValueError outside of (0, 1)."""
    if not 0 < prior < 1:
        raise ValueError(f"prior must be greater than 0 and less than 1, got {prior}")
    return prior


def _nothing(noise: Noise, delta: float, times: int) -> bool:
    check_delta(delta)
    if times < 0:
        raise ValueError(f"times must not be negative, got {times}")
    return times == 0 or noise.multiplier <= 0


def _of_gaussian(multiplier: float, delta: float) -> float:
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    if multiplier < LEAST:
        return _of_renyi(1 / multiplier / multiplier / 2, delta)
    return float(get_epsilon_gaussian(multiplier, delta))


def _of_renyi(rho: float, delta: float) -> float:
    return _of_divergences(1, tuple((order, rho * order) for order in ORDERS), delta)


def _of_divergences(times: int, divergences: tuple[tuple[float, float], ...], delta: float) -> float:
    from dp_accounting.rdp import compute_epsilon

    orders, values = zip(*divergences, strict=True)
    return float(compute_epsilon(orders, [times * value for value in values], delta)[0])


@lru_cache(maxsize=16)
def _drawn_divergences(multiplier: float, drawn: int, population: int) -> tuple[tuple[float, float], ...]:
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent

    event = SampledWithoutReplacementDpEvent(population, drawn, GaussianDpEvent(multiplier))
    return _divergences(event, NeighboringRelation.REPLACE_ONE)


@lru_cache(maxsize=16)
def _poisson_divergences(multiplier: float, rate: float) -> tuple[tuple[float, float], ...]:
    from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent

    event = PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier))
    return _divergences(event, NeighboringRelation.ADD_OR_REMOVE_ONE)


def _divergences(event: Any, relation: Any) -> tuple[tuple[float, float], ...]:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders=SAMPLED_ORDERS, neighboring_relation=relation)
    accountant.compose(event)
    return tuple(zip(map(float, accountant.orders), map(float, accountant.rdp), strict=True))


# --- reconstruction ---


def reconstruction_bound(prior: float, mu: float) -> float:
    """The greatest chance of a reconstruction through Gaussian noise: gamma = Phi(Phi^-1(prior) + mu).

    prior: chance of success, as success is judged, of the best guess of someone who sees no message; in (0, 1).
    mu:    sqrt(T) * C / sigma for T messages of length at most C, each with noise of standard deviation sigma; not negative.

    Hayes et al. 2023, "Bounding training data reconstruction in DP-SGD", section 3, against the message that holds noise alone,
    at most C away; with the trade-off function of the Gaussian mechanism and its composition (Dong, Roth & Su 2022, section 3).
    """
    _check_guess(prior, mu)
    if mu == math.inf:
        return 1.0
    return NormalDist().cdf(NormalDist().inv_cdf(prior) + mu)


def reconstruction_bound_renyi(prior: float, mu: float) -> float:
    """The same where noise is only known to diverge at each order a by a * mu**2 / 2 or less, as Laplace noise does.

    gamma = min over a of (prior * exp(a * mu**2 / 2))^((a - 1) / a) = exp(-(sqrt(-ln prior) - mu / sqrt(2))**2), or 1 beyond
    the peak of that. Balle, Cherubin & Hayes 2022, "Reconstructing training data with informed adversaries",
    for a guarantee by Renyi divergence.
    """
    _check_guess(prior, mu)
    return math.exp(-(max(0.0, math.sqrt(-math.log(prior)) - mu / math.sqrt(2)) ** 2))


def bound_of(noise: Noise, *, prior: float, times: int) -> float:
    """The bound on reconstruction from `times` releases through `noise`; 1 where nothing is hidden."""
    mu = math.sqrt(times) / noise.multiplier if noise.multiplier > 0 else math.inf if times else 0.0
    return reconstruction_bound(prior, mu) if noise.family == "gaussian" else reconstruction_bound_renyi(prior, mu)


def _check_guess(prior: float, mu: float) -> None:
    check_prior(prior)
    if not mu >= 0:
        raise ValueError(f"mu must not be negative, got {mu}")
