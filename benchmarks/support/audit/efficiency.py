"""Attacks on a two-layer network with Gaussian noise, beside the Cramer-Rao bound on their mean squared error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow
from support.single_cases import LocalClient, make_client
from torch import Tensor

from attacker.attacks import Case, GradientMatching, cpl, exact
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.matching.priors import Belief, Prior
from attacker.attacks.matching.smooth_images import PIXEL_DEVIATION, build_smooth_spread
from attacker.attacks.matching.warm_starts import WarmStart
from attacker.attacks.optimisers.stopping import Stop
from attacker.bounds import FisherInformation, GaussianPrior, UsedExamples, bound_error, build_message
from attacker.reconstruction import Reconstruction
from attacker.scoring.statistics import mean
from fedsim.recording import DataSpec

DATA = DataSpec(shape=(1, 8, 8), num_classes=10)
DEVIATION = 0.1
"""Standard deviation of a pixel around 0.5, so that hardly any is outside [0, 1]."""
HIDDEN, STEPS, IMAGES = 64, 100, 40
MAP_STOP = Stop(patience=8, decrease=1e-6)
"""The noise dominates the loss, so that much smaller decreases than by default matter."""
HOP_SCALES = (1.0, 0.5, 0.25) * 10
"""Standard deviations of random perturbations of the best image so far, from which a MAP search starts again.

They are multiples of the prior's standard deviation. The answer with the smallest loss counts. Restarts are needed because the
gradient of a ReLU network is a discontinuous function of the image, so that single searches get stuck.
"""
ALTERNATIONS = 20
"""Number of times that the start of a MAP search solves for the image and for the gradient by the first layer's output."""
DEFENSE_SPECS = (
    "gaussian(0.0001)",
    "gaussian(0.001)",
    "gaussian(0.003)",
    "gaussian(0.01)",
    "gaussian(0.03)",
    "gaussian(0.1)",
    "clip(1) | gaussian(0.003)",
    "prune(0.5) | gaussian(0.003)",
)
MIN_ERROR = 1e-9


@dataclass(frozen=True, kw_only=True)
class SmoothPrior:
    """A Gaussian distribution of smooth images.

    prior:  mean and covariance of the distribution, from which the bound is computed.
    draw:   returns a number of images (N, 1, 8, 8), drawn with a generator.
    belief: maps the standard deviation of the noise to the prior term of the loss of a MAP search (for the most likely image).
    """

    prior: GaussianPrior
    draw: Callable[[int, torch.Generator], Tensor]
    belief: Callable[[float], Belief]


def build_smooth_prior() -> SmoothPrior:
    """Return the distribution that images are drawn from, which the bound and the MAP search know."""
    scale = DEVIATION / PIXEL_DEVIATION
    spread, shrink = build_smooth_spread(DATA), build_smooth_spread(DATA, inverse=True)
    eye = torch.eye(DATA.size, dtype=torch.float64).reshape(-1, *DATA.shape)
    roots, basis = torch.linalg.eigh((scale * spread(eye)).flatten(1))
    prior = GaussianPrior(torch.full((DATA.size,), 0.5, dtype=torch.float64), basis.T, roots, 0.0)

    def draw(count: int, rng: torch.Generator) -> Tensor:
        return (0.5 + scale * spread(torch.randn(count, *DATA.shape, generator=rng, dtype=torch.float64))).float()

    def build_belief(std: float) -> Belief:
        return lambda x: std**2 * (shrink(x - 0.5) / scale).square().sum()

    return SmoothPrior(prior=prior, draw=draw, belief=build_belief)


def measure_efficiency(options: Options) -> list[ResultRow]:
    """Return one row for each defense: bound, mean squared error of each attack, and ratio of the smallest error to the bound."""
    count, drawn = 6 if options.quick else IMAGES, build_smooth_prior()
    rng = torch.Generator().manual_seed(options.seed)
    x, y = drawn.draw(count, rng), torch.randint(0, DATA.num_classes, (count,), generator=rng)
    client = make_client("mlp", DATA, arguments={"hidden": [HIDDEN]}, seed=options.seed)
    return [_measure_defense(options, client, defense, x, y, drawn) for defense in DEFENSE_SPECS[:: 4 if options.quick else 1]]


def _measure_defense(options: Options, client: LocalClient, defense: str, x: Tensor, y: Tensor, drawn: SmoothPrior) -> ResultRow:
    cases = [_make_case(client, defense, i, x, y, options.seed) for i in range(len(x))]
    std = float(defense.rsplit("(", 1)[1].rstrip(")"))
    found = {
        name: _attack(attack, cases, options) for name, attack in (("exact", exact(fallback="none")), ("cpl", make_search()))
    }
    found["map"] = _search_map(cases, drawn, std, options)
    errors = {name: mean([_measure_error(one, x[i : i + 1]) for i, one in enumerate(each)]) for name, each in found.items()}
    bound = mean([_bound(case, x[i], y[i], drawn.prior) for i, case in enumerate(cases)])
    best = min(errors, key=lambda name: errors[name].value)
    return {
        "kind": "bound",
        "federation": defense.replace(" |", ", then"),
        "bound": bound.value,
        "images": len(cases),
        **{name: one.value for name, one in errors.items()},
        "best": best,
        "low": errors[best].low,
        "high": errors[best].high,
        "ratio": errors[best].value / bound.value,
        "below": sum(one.high < bound.value for one in errors.values()),
        "as expected": errors[best].value <= 1.5 * bound.value and all(one.high >= bound.value for one in errors.values()),
    }


def make_search() -> GradientMatching:
    return cpl(optimiser="wolfe", steps=STEPS, patience=1, init="smooth", closed_form_start=True, denoised=False)


def _search_map(cases: Sequence[Case], drawn: SmoothPrior, std: float, options: Options) -> list[Reconstruction]:
    """Return for each case the best answer of several searches for its most likely (MAP) image, given prior and noise.

    The first search starts from an estimate from the first layer alone, each further one from a random perturbation of the best
    answer so far. The best answer is the one with the smallest loss. std: standard deviation of the noise.
    """
    search = make_search()
    search = replace(search, prior=Prior(belief=drawn.belief(std)), search=replace(search.search, stop=MAP_STOP))
    start = replace(search, warm_start=lambda cases, rng: [_compute_map_start(case, drawn.prior, std) for case in cases])
    best = _attack(start, cases, options)
    for hop, scale in enumerate(HOP_SCALES):

        def change(
            cases: Sequence[Case], rng: torch.Generator, best: list[Reconstruction] = best, scale: float = scale
        ) -> list[WarmStart]:
            changes = scale * (drawn.draw(len(cases), rng) - 0.5)
            return [WarmStart(one.x + changes[i], one.y, alone=True) for i, one in enumerate(best)]

        found = _attack(replace(search, warm_start=change), cases, replace(options, seed=options.seed + 1 + hop))
        best = [min(pair, key=lambda one: float(one.loss.min())) for pair in zip(best, found, strict=True)]
    return best


def _compute_map_start(case: Case, prior: GaussianPrior, std: float) -> WarmStart:
    """Return a start for the MAP search: the image estimated from the first layer's gradient alone, and the true label.

    This gradient is an outer product of the image and of the gradient with respect to the layer's output. Both are estimated in
    turn, each as the solution of a linear system. Coordinates that pruning removed are left out.
    """
    gradient = {name: -u.double() for name, u in case.observations[0].update.items()}
    weight, bias = next((g, gradient[name.replace("weight", "bias")]) for name, g in gradient.items() if g.ndim == 2)
    kept, bias_kept = (weight != 0).double(), (bias != 0).double()
    precision = prior.basis.T @ (prior.deviations.square().reciprocal()[:, None] * prior.basis)
    x, delta = prior.mean, bias
    for _ in range(ALTERNATIONS):
        seen = (delta.square() @ kept) / std**2
        x = torch.linalg.solve(torch.diag(seen) + precision, (delta @ weight) / std**2 + precision @ prior.mean)
        delta = (weight @ x + bias) / (kept @ x.square() + bias_kept).clamp(min=1e-12)
    assert case.known_labels is not None
    return WarmStart(x.float().reshape(1, *DATA.shape), case.known_labels, alone=True)


def _make_case(client: LocalClient, defense: str, i: int, x: Tensor, y: Tensor, seed: int) -> Case:
    """Return the case of example `i`, with noise of its own. The attack is told the true label, as the bound assumes."""
    case = client.make_case([(x[i : i + 1], y[i : i + 1])], f"client-{i}", defense, noise_seed=1000 * seed + i)
    return replace(case, known_labels=y[i : i + 1])


def _attack(attack: GradientMatching | ClosedForm, cases: Sequence[Case], options: Options) -> list[Reconstruction]:
    return list(run_attack(attack, cases, options)[0])


def _measure_error(answer: Reconstruction, x: Tensor) -> float:
    """Return the mean squared error of the first reconstructed image, but at least `MIN_ERROR`.

    If nothing was found, return the variance of a pixel, which is the expected error of guessing the prior's mean.
    """
    return max(float((answer.x[:1] - x).square().mean()) if len(answer.x) else DEVIATION**2, MIN_ERROR)


def _bound(case: Case, x: Tensor, y: Tensor, prior: GaussianPrior) -> float:
    message = build_message(UsedExamples(case.observations[0], ((0,),)), y[None])
    return float(bound_error(FisherInformation([message], x[None].double()), prior).mse)
