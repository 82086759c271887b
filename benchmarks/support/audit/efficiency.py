"""Attacks on a two-layer network with Gaussian noise, beside the lower bound on their error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow
from support.single_cases import LocalClient, make_client
from torch import Tensor

from attacker.attacks import Case, GradientMatching, cpl, exact
from attacker.attacks.closed_form.router import ClosedForm
from attacker.attacks.matching.priors import Belief, Prior
from attacker.attacks.matching.smooth_images import PIXEL_DEVIATION, build_smooth_spread
from attacker.bounds import FisherInformation, GaussianPrior, UsedExamples, bound_error, build_message
from attacker.scoring.statistics import Estimate, mean
from fedsim.recording import DataSpec

DATA = DataSpec(shape=(1, 8, 8), num_classes=10)
DEVIATION = 0.1
"""Standard deviation of a pixel around 0.5, so that hardly any is outside [0, 1]."""
HIDDEN, STEPS = 64, 400
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
    """A Gaussian distribution of smooth images. belief: maps the noise's standard deviation to the term of a MAP search."""

    prior: GaussianPrior
    draw: Callable[[int, torch.Generator], Tensor]
    belief: Callable[[float], Belief]


def build_smooth_prior() -> SmoothPrior:
    """Return the distribution that images are drawn from, and that attack and bound know."""
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


def measure_efficiency(asked: Options) -> list[ResultRow]:
    """Return one row for each defense: the bound, the error of each attack, and the efficiency of the best."""
    count, drawn = 6 if asked.quick else 40, build_smooth_prior()
    rng = torch.Generator().manual_seed(asked.seed)
    x, y = drawn.draw(count, rng), torch.randint(0, DATA.num_classes, (count,), generator=rng)
    client = make_client("mlp", DATA, arguments={"hidden": [HIDDEN]}, seed=asked.seed)
    return [_measure_defense(asked, client, defense, x, y, drawn) for defense in DEFENSE_SPECS[:: 4 if asked.quick else 1]]


def _measure_defense(asked: Options, client: LocalClient, defense: str, x: Tensor, y: Tensor, drawn: SmoothPrior) -> ResultRow:
    cases = [_make_case(client, defense, i, x, y, asked.seed) for i in range(len(x))]
    std = float(defense.rsplit("(", 1)[1].rstrip(")"))
    errors = {name: _average(_attack(attack, cases, x, asked)) for name, attack in _list_attacks(drawn.belief(std)).items()}
    bound = mean([_bound(case, x[i], y[i], drawn.prior) for i, case in enumerate(cases)])
    best = min(errors, key=lambda name: errors[name].value)
    return {
        "kind": "bound",
        "federation": defense.replace(" |", ", then"),
        "bound": bound.value,
        **{name: one.value for name, one in errors.items()},
        "best": best,
        "low": errors[best].low,
        "high": errors[best].high,
        "ratio": errors[best].value / bound.value,
        "below": sum(one.high < bound.value for one in errors.values()),
        "as expected": errors[best].value <= 1.5 * bound.value and all(one.high >= bound.value for one in errors.values()),
    }


def _list_attacks(belief: Belief) -> dict[str, GradientMatching | ClosedForm]:
    search = cpl(optimiser="wolfe", steps=STEPS, init="smooth", closed_form_start=True, denoised=False)
    return {"exact": exact(fallback="none"), "cpl": search, "map": replace(search, prior=Prior(belief=belief))}


def _make_case(client: LocalClient, defense: str, i: int, x: Tensor, y: Tensor, seed: int) -> Case:
    """Return the case of one example, with noise of its own and the true label, which the bound takes as known as well."""
    case = client.make_case([(x[i : i + 1], y[i : i + 1])], f"client-{i}", defense, noise_seed=1000 * seed + i)
    return replace(case, known_labels=y[i : i + 1])


def _attack(attack: GradientMatching | ClosedForm, cases: Sequence[Case], x: Tensor, asked: Options) -> list[float]:
    found, _ = run_attack(attack, cases, asked)
    return [float((one.x[:1] - x[i]).square().mean()) if len(one.x) else DEVIATION**2 for i, one in enumerate(found)]


def _average(errors: Sequence[float]) -> Estimate:
    return mean([max(one, MIN_ERROR) for one in errors])


def _bound(case: Case, x: Tensor, y: Tensor, prior: GaussianPrior) -> float:
    message = build_message(UsedExamples(case.observations[0], ((0,),)), y[None])
    return float(bound_error(FisherInformation([message], x[None].double()), prior).mse)
