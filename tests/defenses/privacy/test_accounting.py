"""Tests of epsilon and of the bound on the probability of reconstruction, against closed forms, Opacus and simulations."""

import math
import subprocess
import sys
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import laplace, norm

from defenses.privacy.accounting import (
    bound_reconstruction,
    bound_reconstruction_renyi,
    compute_bound,
    compute_epsilon,
    compute_epsilon_drawn,
    compute_epsilon_poisson,
)
from defenses.privacy.sensitivity import Noise

DELTA = 1e-5


def delta_of_gaussian(epsilon: float, mu: float) -> float:
    """Compute delta by Balle & Wang 2018, theorem 8; mu is the sensitivity over the standard deviation."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def delta_of_densities(epsilon: float, p, q, peaks: list[float]) -> float:
    """Compute delta by its definition, the integral of (p - exp(epsilon) q) where that is positive."""
    return float(quad(lambda z: max(0.0, p(z) - math.exp(epsilon) * q(z)), -60, 60, points=peaks, limit=1000)[0])


# --- Gaussian noise on what one client sends ---


@pytest.mark.parametrize("multiplier", [0.8, 2.0, 10.0])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
def test_one_round_is_the_analytic_gaussian_mechanism_between_any_two_inputs(multiplier: float, delta: float) -> None:
    found = compute_epsilon(Noise(multiplier), delta=delta)
    assert delta_of_gaussian(found, 2 / multiplier) == pytest.approx(delta, rel=1e-6)  # two updates of norm 1 differ by at most 2


def test_epsilon_is_what_the_two_densities_say() -> None:
    found = compute_epsilon(Noise(4.0), delta=1e-3)
    there, here = norm(1, 4).pdf, norm(-1, 4).pdf
    assert delta_of_densities(found, there, here, [-1, 1]) == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("times", [2, 7, 1000])
def test_rounds_compose_to_one_gaussian_with_a_shift_sqrt_t_times_larger(times: int) -> None:
    found = compute_epsilon(Noise(5.0), delta=DELTA, times=times)
    assert found == pytest.approx(compute_epsilon(Noise(5.0 / math.sqrt(times)), delta=DELTA), rel=1e-9)
    assert delta_of_gaussian(found, 2 * math.sqrt(times) / 5.0) == pytest.approx(DELTA, rel=1e-5)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_more_rounds_cost_more_and_more_noise_or_a_larger_delta_less(family) -> None:
    rounds = [compute_epsilon(Noise(3.0, family), delta=DELTA, times=times) for times in (1, 2, 5, 50, 5000)]
    noises = [compute_epsilon(Noise(multiplier, family), delta=DELTA) for multiplier in np.geomspace(1e-5, 1e5, 41)]
    deltas = [compute_epsilon(Noise(3.0, family), delta=delta) for delta in (1e-12, 1e-6, 1e-3, 0.1, 0.5)]
    assert all(a < b for a, b in pairwise(rounds))
    assert all(a > b or a == b == 0 for a, b in pairwise(noises))
    assert noises[0] > noises[20] > noises[-1]
    assert all(a >= b for a, b in pairwise(deltas))
    assert deltas[0] > deltas[-1]


@pytest.mark.parametrize("noise", [Noise(), Noise(0.0, "laplace")])
def test_without_noise_epsilon_is_infinite_and_reconstruction_not_bounded(noise: Noise) -> None:
    assert compute_epsilon(noise, delta=DELTA) == math.inf
    assert compute_epsilon(noise, delta=DELTA, times=3) == math.inf
    assert compute_epsilon_drawn(noise, delta=DELTA, times=3, drawn=1, population=10) == math.inf
    assert compute_epsilon_poisson(noise, delta=DELTA, times=3, rate=0.1) == math.inf
    assert compute_bound(noise, prior=0.01, times=3) == 1.0


def test_before_the_first_round_nothing_is_spent() -> None:
    assert compute_epsilon(Noise(), delta=DELTA, times=0) == 0
    assert compute_epsilon_drawn(Noise(1.0), delta=DELTA, times=0, drawn=1, population=10) == 0
    assert compute_bound(Noise(), prior=0.01, times=0) == pytest.approx(0.01)


def test_very_little_noise_gives_a_large_epsilon_without_a_warning() -> None:
    for multiplier in (1e-300, 1e-30, 1e-9, 0.999e-3, 1.001e-3):
        assert compute_epsilon(Noise(multiplier), delta=DELTA, times=20) > 1e6
        assert compute_epsilon_poisson(Noise(multiplier), delta=DELTA, times=20, rate=0.1) > 1e6
    below, above = (compute_epsilon(Noise(2 * multiplier), delta=DELTA) for multiplier in (0.9999e-3, 1.0001e-3))
    assert 1 < below / above < 1.03


# --- Laplace noise under a Euclidean bound ---


def divergence_of_laplace(order: float, shift: float) -> float:
    """Compute the Renyi divergence between Laplace distributions of scale 1 at distance `shift`, by its definition."""
    p, q = laplace(shift).pdf, laplace(0).pdf
    value, _ = quad(lambda z: q(z) * (p(z) / q(z)) ** order, -60, 60, points=[0, shift], limit=500)
    return math.log(value) / (order - 1)


@pytest.mark.parametrize("order", [1.1, 2.0, 5.0, 20.0])
@pytest.mark.parametrize("shift", [1e-2, 0.3, 1.0, 2.5])
def test_laplace_noise_diverges_no_more_than_gaussian_noise_of_its_scale(order: float, shift: float) -> None:
    assert divergence_of_laplace(order, shift) <= order * shift**2 / 2 * (1 + 1e-6)
    if shift == 1e-2 and order < 10:
        assert divergence_of_laplace(order, shift) == pytest.approx(order * shift**2 / 2, rel=0.05)  # tight for a small shift


@pytest.mark.parametrize("times", [1, 30])
@pytest.mark.parametrize("multiplier", [1.0, 5.0, 40.0])
def test_laplace_noise_costs_a_little_more_than_gaussian_noise(multiplier: float, times: int) -> None:
    gaussian, other = (compute_epsilon(Noise(multiplier, family), delta=DELTA, times=times) for family in ("gaussian", "laplace"))
    assert gaussian < other < 1.25 * gaussian


@pytest.mark.parametrize("coordinates", [1, 4])
def test_epsilon_of_laplace_noise_holds_in_few_dimensions(coordinates: int) -> None:
    """For random draws of the privacy loss of the two most distant points, the share above epsilon is at most delta."""
    multiplier, delta = 2.0, 1e-2
    shift = 2 / multiplier / math.sqrt(coordinates)
    drawn = np.random.default_rng(0).laplace(size=(200_000, coordinates))
    loss = (np.abs(drawn + shift) - np.abs(drawn)).sum(axis=1)
    found = compute_epsilon(Noise(multiplier, "laplace"), delta=delta)
    assert np.maximum(0, 1 - np.exp(found - loss)).mean() <= delta
    assert np.maximum(0, 1 - np.exp(found / 4 - loss)).mean() > delta  # a quarter of epsilon would be too small


# --- sampling ---


@pytest.mark.parametrize(("rate", "multiplier", "steps"), [(0.01, 1.1, 1000), (0.1, 1.0, 20), (0.05, 0.8, 200), (0.25, 2.0, 50)])
@pytest.mark.filterwarnings("ignore")
def test_poisson_sampling_agrees_with_opacus(rate: float, multiplier: float, steps: int) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    theirs = accountants.RDPAccountant()
    theirs.history = [(multiplier, rate, steps)]
    ours = compute_epsilon_poisson(Noise(multiplier), delta=DELTA, times=steps, rate=rate)
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), rel=0.01)


def test_sampling_amplifies_and_without_it_nothing_changes() -> None:
    noise = Noise(3.0)
    whole = compute_epsilon(noise, delta=DELTA, times=10)
    assert compute_epsilon_drawn(noise, delta=DELTA, times=10, drawn=20, population=20) == whole
    some = [compute_epsilon_drawn(noise, delta=DELTA, times=10, drawn=m, population=1000) for m in (1, 10, 100, 1000)]
    assert all(a < b for a, b in pairwise(some))
    assert some[-1] == whole
    poisson = [compute_epsilon_poisson(noise, delta=DELTA, times=10, rate=rate) for rate in (0.01, 0.1, 1.0)]
    assert (
        poisson[0] < poisson[1] < poisson[2] == pytest.approx(compute_epsilon(Noise(6.0), delta=DELTA, times=10))
    )  # adding one example changes the sum by 1, not by 2


@pytest.mark.parametrize(("multiplier", "drawn"), [(1.0, 1), (2.0, 1), (2.0, 3), (1.0, 9), (2.0, 9), (4.0, 9)])
def test_drawing_without_replacement_covers_the_worst_pair(multiplier: float, drawn: int) -> None:
    """In the worst case, one of ten clients sends +1 or -1 and the others 0: the server sees a mixture or its mirror image."""
    rate, found = drawn / 10, compute_epsilon_drawn(Noise(multiplier), delta=1e-3, times=1, drawn=drawn, population=10)

    def seen(at: float):
        return lambda z: rate * norm(at, multiplier).pdf(z) + (1 - rate) * norm(0, multiplier).pdf(z)

    assert delta_of_densities(found, seen(1.0), seen(-1.0), [-1, 0, 1]) <= 1e-3


# --- reconstruction ---


def test_the_bound_is_the_gaussian_trade_off() -> None:
    assert bound_reconstruction(0.01, 0.0) == pytest.approx(0.01)
    assert bound_reconstruction(0.5, 1.0) == pytest.approx(0.8413447, abs=1e-6)  # Phi(1)
    assert bound_reconstruction(0.1, 2.0) == pytest.approx(NormalDist().cdf(-1.2815516 + 2.0), abs=1e-6)
    assert bound_reconstruction(0.01, math.inf) == 1.0
    assert compute_bound(Noise(4.0), prior=0.1, times=9) == pytest.approx(bound_reconstruction(0.1, 0.75))  # sqrt(T) C / sigma


def test_the_bound_grows_with_rounds_and_prior_and_falls_with_noise() -> None:
    for bound in (bound_reconstruction, bound_reconstruction_renyi):
        shifts = [bound(0.01, mu) for mu in (0, 0.1, 0.5, 1, 2, 3)]
        assert all(a < b for a, b in pairwise(shifts))
        assert bound(0.01, 1.0) < bound(0.02, 1.0) < bound(0.5, 1.0)
    assert (
        compute_bound(Noise(5.0), prior=0.01, times=4)
        < compute_bound(Noise(5.0), prior=0.01, times=9)
        < compute_bound(Noise(2.0), prior=0.01, times=9)
    )


@pytest.mark.parametrize("prior", [1e-4, 0.01, 0.3, 0.9])
@pytest.mark.parametrize("mu", [0.0, 0.1, 1.0, 3.0, 30.0])
def test_the_bound_by_divergence_is_wider_and_is_the_least_over_all_orders(prior: float, mu: float) -> None:
    found = bound_reconstruction_renyi(prior, mu)
    assert found >= bound_reconstruction(prior, mu) - 1e-12
    orders = 1 + np.geomspace(1e-6, 1e6, 20_001)
    least = np.min((orders - 1) / orders * (math.log(prior) + orders * mu**2 / 2))
    assert found == pytest.approx(math.exp(min(0.0, least)), rel=1e-4)


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_the_best_guesser_stays_below_the_bound_and_near_it(family) -> None:
    """One of 50 secrets, orthogonal vectors of norm C, is sent with noise in three rounds."""
    rng, secrets, rounds, multiplier, trials = np.random.default_rng(1), 50, 3, 0.7, 4000
    draw = rng.normal if family == "gaussian" else rng.laplace
    seen = draw(scale=multiplier, size=(trials, rounds, secrets))
    truth = rng.integers(secrets, size=trials)
    seen[np.arange(trials), :, truth] += 1.0
    gain = seen if family == "gaussian" else np.abs(seen) - np.abs(seen - 1)
    rate = (gain.sum(axis=1).argmax(axis=1) == truth).mean()
    bound = compute_bound(Noise(multiplier, family), prior=1 / secrets, times=rounds)
    assert 0.4 * bound < rate < bound < 0.999


# --- invalid arguments ---


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
def test_a_delta_out_of_range_is_refused_with_the_range(delta: float) -> None:
    for noise in (Noise(), Noise(1.0)):
        with pytest.raises(ValueError, match="delta must be greater than 0 and less than 1, got"):
            compute_epsilon(noise, delta=delta)


def test_other_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prior must be greater than 0 and less than 1, got 1\.5"):
        bound_reconstruction(1.5, 1.0)
    with pytest.raises(ValueError, match="mu must not be negative, got -1"):
        bound_reconstruction_renyi(0.1, -1)
    with pytest.raises(ValueError, match="times is a number of releases and must not be negative, got -1"):
        compute_epsilon(Noise(1.0), delta=DELTA, times=-1)
    with pytest.raises(ValueError, match=r"drawn must be from 1 to the population of 3 clients, got 4"):
        compute_epsilon_drawn(Noise(1.0), delta=DELTA, times=1, drawn=4, population=3)
    with pytest.raises(ValueError, match=r"rate must be in \(0, 1\], got 0"):
        compute_epsilon_poisson(Noise(1.0), delta=DELTA, times=1, rate=0)


def test_without_noise_no_accountant_is_imported() -> None:
    program = (
        "import sys, math; from defenses.privacy.accounting import compute_epsilon; "
        "from defenses.privacy.sensitivity import Noise; "
        "assert compute_epsilon(Noise(), delta=1e-5) == math.inf; "
        "print([name for name in ('dp_accounting', 'opacus', 'scipy', 'flwr') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
