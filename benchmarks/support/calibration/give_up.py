"""Calibration of the rule that gives up hopeless searches, for tuning.py and calibration.py.

`early` is the best loss after a share of the steps, relative to the loss at the start. The rule stops a search if `early` is
above `hopeless` and this best loss, relative to the loss of a zero gradient, is above `unexplained`
(`attacker.attacks.optimisers.descent.Stop`). A search succeeds if it recovers an example. Searches that run to their end without
the rule are enough to evaluate it, because it changes nothing in a search before it stops it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.calibration.cases import NETWORKS_MODULE, Cell, draw_examples, judge_reconstruction, make_cases
from support.calibration.confidence import place_cells
from support.calibration.grid import format_noise, format_prune
from support.contract import Options, ResultRow
from support.splits import Part

from attacker.attacks import Case, GradientMatching, inverting_gradients
from attacker.attacks.optimisers.descent import GIVE_UP_SHARE, MIN_HOPELESS_LOSS, MIN_UNEXPLAINED_LOSS
from attacker.attacks.optimisers.first_order import Adam
from attacker.scoring.statistics import estimate_share

STEP_SHARES = (0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares of the steps after which a search may be given up, among which the tuning part chooses."""
SEARCH_STEPS = (300, 1200)
CASES_PER_CLIENT = 16
"""Number of cases for each pair of a client setting and a number of steps."""
CONVNET_NAME, STRIDED_NAME, RESNET_NAME = (f"{NETWORKS_MODULE}:{name}" for name in ("convnet", "strided", "resnet8"))
CLIENT_SETTINGS: Sequence[Mapping[str, Any]] = (
    {"data": "lfw"},
    {"data": "cifar10"},
    {"data": "cifar100", "arguments": {"activation": "relu"}},
    {"data": "cifar10", "network": CONVNET_NAME},
    {"data": "lfw", "network": STRIDED_NAME},
    {"data": "lfw", "batch": 4},
    {"data": "cifar100", "batch": 2},
    {"data": "lfw", "defense": format_noise(1e-3)},
    {"data": "cifar10", "defense": format_noise(1e-2)},
    {"data": "lfw", "defense": format_prune(0.1)},
    {"data": "cifar100", "epochs": 2, "rate": 0.1},
    {"data": "cifar10", "batch": 8, "defense": format_noise(3e-2)},
    {"data": "lfw", "network": RESNET_NAME},
    {"data": "cifar10", "network": RESNET_NAME, "batch": 4},
)


@dataclass(frozen=True)
class Watched:
    """A search that ran to its end without the rule.

    early: dict from each of `STEP_SHARES` to the best loss after this share of the steps, relative to the loss at the start; None
           for shares at which the search had ended.
    first: the loss at the start, relative to the loss of a zero gradient. steps: maximum number of iterations.
    recovered: whether the search recovered at least one example.
    """

    steps: int
    first: float
    early: Mapping[float, float | None]
    recovered: bool

    def is_given_up(self, after: float, hopeless: float) -> bool:
        """Return whether the rule, applied after the share `after` of the steps, stops this search.

        That is: it is still running, the best loss relative to the loss at the start is above `hopeless`, and the best loss
        relative to that of a zero gradient is above `MIN_UNEXPLAINED_LOSS`.
        """
        early = self.early[after]
        return early is not None and early > hopeless and early * self.first > MIN_UNEXPLAINED_LOSS


def measure_give_up(asked: Options) -> tuple[list[ResultRow], dict[str, Any]]:
    """Count how many of the successful and of the failed searches on the report part the rule stops.

    There is a row for each maximum number of iterations. The summary holds the share of the successful searches that the rule
    stops, the upper end of its 95 % interval, and the number of successful searches.
    """
    found = run_watched(asked, "report")
    rows = [{"steps": steps, **_judge_searches(found, steps)} for steps in SEARCH_STEPS]
    successes = [one.is_given_up(GIVE_UP_SHARE, MIN_HOPELESS_LOSS) for one in found if one.recovered]
    wrongly = estimate_share([float(one) for one in successes], range(len(successes)))
    return rows, {"stopped_wrongly": wrongly.value, "stopped_wrongly_high": wrongly.high, "successful_searches": len(successes)}


def _judge_searches(found: Sequence[Watched], steps: int) -> dict[str, Any]:
    right, wrong = ([one for one in found if one.steps == steps and one.recovered is kind] for kind in (True, False))
    return {
        "searches": len(right) + len(wrong),
        "successful": len(right),
        "stopped_wrongly": sum(one.is_given_up(GIVE_UP_SHARE, MIN_HOPELESS_LOSS) for one in right),
        "failed": len(wrong),
        "stopped_rightly": sum(one.is_given_up(GIVE_UP_SHARE, MIN_HOPELESS_LOSS) for one in wrong),
    }


def measure_early_losses(asked: Options) -> tuple[list[ResultRow], dict[str, Any]]:
    """Return the largest early loss of successful searches, and the number of failed searches above it, on the tuning part.

    There is one row for each maximum number of iterations in `SEARCH_STEPS` and each of `STEP_SHARES`. Losses are relative to
    those at the start; only searches that still run count.
    """
    found = run_watched(asked, "tuning")
    rows = []
    for steps in SEARCH_STEPS:
        for after in STEP_SHARES:
            early = {
                kind: [e for one in found if one.steps == steps and one.recovered is kind and (e := one.early[after]) is not None]
                for kind in (True, False)
            }
            most = max(early[True], default=0.0)
            rows.append(
                {
                    "steps": steps,
                    "after": after,
                    "successful": len(early[True]),
                    "largest": most,
                    "failed": len(early[False]),
                    "failed_above": sum(e > most for e in early[False]),
                }
            )
    return rows, {}


def run_watched(asked: Options, part: Part) -> list[Watched]:
    """Run searches to their end, without the rule, for each of `CLIENT_SETTINGS` and each number of iterations in `SEARCH_STEPS`.

    part: the part of the data that the examples come from. With --quick there are four searches.
    """
    found: list[Watched] = []
    for steps in SEARCH_STEPS:
        cells = [
            Cell(attack="inverting_gradients", settings={"steps": steps}, half=True, cases=CASES_PER_CLIENT, **one)
            for one in CLIENT_SETTINGS
        ]
        if asked.quick:
            cells = [replace(cell, cases=2) for cell in cells[:2]] if steps == min(SEARCH_STEPS) else []
        for _, cell, at in place_cells([("", cell) for cell in cells]):
            found += _search_cell(cell, asked, part, at)
    return found


def _search_cell(cell: Cell, asked: Options, part: Part, skip: int) -> Iterator[Watched]:
    data = draw_examples(cell, asked, part=part, skip=skip)
    made, truth = make_cases(cell, data, asked)
    steps = cell.settings["steps"]
    attack = replace(inverting_gradients(steps=steps, give_up=0.0), device=asked.device)
    first = _compute_first_losses(attack, made, asked.seed)
    at = {after: max(1, round(after * steps)) for after in STEP_SHARES}
    for case, x, one in zip(made, truth, attack(made, rng=torch.Generator().manual_seed(asked.seed)), strict=True):
        early = {after: float(one.loss[k - 1]) / first[case.key] if k < one.iterations else None for after, k in at.items()}
        yield Watched(steps, first[case.key], early, any(judge_reconstruction(cell, one, x, data).recovered))


def _compute_first_losses(attack: GradientMatching, made: Sequence[Case], seed: int) -> dict[str, float]:
    """Return a dict from the key of each case to the loss at the start of its search, a cosine distance (1: zero gradient)."""
    probe = attack.copy_with(optimiser=Adam(), steps=1)
    return {one.case: float(one.loss[0]) for one in probe(made, rng=torch.Generator().manual_seed(seed))}
