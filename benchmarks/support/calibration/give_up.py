"""Calibration of the rule that gives up hopeless searches, for tuning.py and calibration.py.

The rule (`attacker.attacks.optimisers.stopping.Stop`) stops a search if, after certain iterations, its best loss is above a
limit, relative to the loss at the start, and also above `unexplained`, relative to the loss of a zero gradient; or if its loss
stays near that of grey images (`attacker.attacks.optimisers.stopping.Stall`). A search succeeds if it recovers an example.
Searches that run to their end without the rule are enough to evaluate it, because the rule changes nothing in a search before
stopping it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from support.calibration.cases import NETWORKS_MODULE, Cell, draw_examples, judge_reconstruction, make_cases
from support.calibration.confidence import place_cells
from support.calibration.grid import format_noise, format_prune
from support.contract import Options, ResultRow
from support.splits import Part

from attacker.attacks import Case, GradientMatching, inverting_gradients
from attacker.attacks.matching.case_batch import PLAIN_GREY
from attacker.attacks.matching.initialisation import solid
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.optimisers.stopping import INVERTING_STALL
from attacker.scoring.statistics import estimate_share

ITERATIONS = (3, 6, 10, 15, 30, 45, 60, 120)
"""Numbers of iterations after which a search may be given up, among which the tuning part chooses."""
MIN_PLAIN_SHARE = INVERTING_STALL.plain
"""Share of the loss of grey images at or below which the loss of a search does not count as near it."""
SEARCH_STEPS = (300, 1200)
CASES_PER_CLIENT = 16
"""Number of cases for each pair of a client setting and a number of steps."""
CONVNET_NAME, STRIDED_NAME, RESNET_NAME, TRANSFORMER_NAME = (
    f"{NETWORKS_MODULE}:{name}" for name in ("convnet", "strided", "resnet8", "transformer")
)
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
    {"data": "lfw", "defense": format_noise(3e-2)},
    {"data": "lfw", "network": STRIDED_NAME, "defense": format_noise(3e-2)},
    {"data": "lfw", "network": STRIDED_NAME, "batch": 8},
    {"data": "lfw", "network": STRIDED_NAME, "batch": 4, "steps": 2, "rate": 0.01},
    {"data": "cifar10", "network": STRIDED_NAME, "batch": 2, "steps": 2, "rate": 0.3},
    {"data": "lfw", "batch": 2, "steps": 2, "rate": 0.3},
    {"data": "cifar10", "batch": 16},
    {"data": "lfw", "network": STRIDED_NAME, "defense": format_prune(0.3)},
    {"data": "lfw", "network": TRANSFORMER_NAME},
    {"data": "cifar10", "network": TRANSFORMER_NAME, "batch": 2},
    {"data": "imagenet", "network": STRIDED_NAME, "half": False, "side": 64},
    {"data": "mnist", "arguments": {"activation": "relu"}, "half": False},
    {"data": "mnist", "half": False},
    {"data": "cifar10", "arguments": {"activation": "relu"}},
    {"data": "cifar10", "network": STRIDED_NAME},
    {"data": "cifar100", "network": CONVNET_NAME},
)


@dataclass(frozen=True)
class UnstoppedSearch:
    """A search that ran to its end without the rule.

    steps: maximum number of iterations. first: the loss at the start. plain: the loss of grey images. losses: the best loss after
    each iteration. Losses are relative to the loss of a zero gradient.
    recovered: whether the search recovered at least one example.
    """

    steps: int
    first: float
    plain: float
    losses: Sequence[float]
    recovered: bool

    def get_early_loss(self, iteration: int) -> float | None:
        """Return the best loss after this iteration over the loss at the start; None if the search had ended before it."""
        return self.losses[iteration - 1] / self.first if iteration <= len(self.losses) else None

    def get_fall(self, iteration: int) -> float | None:
        """Return the best loss after this iteration over the best loss after half as many iterations.

        None if the search had ended before it, or if the loss is at most `MIN_PLAIN_SHARE` of the loss of grey images, which does
        not count as near it.
        """
        if iteration > len(self.losses):
            return None
        loss = self.losses[iteration - 1]
        return loss / self.losses[iteration // 2 - 1] if loss > MIN_PLAIN_SHARE * self.plain else None

    def find_stop(self) -> int:
        """Return the iteration, from 1, after which the rule of Inverting Gradients stops this search; 0 if it does not."""
        stop = inverting_gradients(steps=self.steps).search.stop
        for iteration, loss in enumerate(self.losses[:-1], start=1):
            if loss > stop.unexplained and loss > stop.get_hopeless_loss(iteration, self.steps) * self.first:
                return iteration
            stall = stop.get_stall(iteration, self.steps)
            if stall is not None:
                known = {"loss": loss, "earlier": self.losses[stall.since - 1], "plain": self.plain}
                if stall.find(**{name: torch.tensor(value) for name, value in known.items()}):
                    return iteration
        return 0


def measure_give_up(options: Options) -> tuple[list[ResultRow], dict[str, Any]]:
    """Count how many of the successful and of the failed searches on the report part the rule stops.

    There is a row for each maximum number of iterations. The summary holds the share of the successful searches that the rule
    stops, the upper end of its 95 % interval, and the number of successful searches.
    """
    searches = run_unstopped(options, "report")
    rows = [{"steps": steps, **_judge_searches(searches, steps)} for steps in SEARCH_STEPS]
    successes = [search.find_stop() > 0 for search in searches if search.recovered]
    wrongly = estimate_share([float(one) for one in successes], range(len(successes)))
    return rows, {"stopped_wrongly": wrongly.value, "stopped_wrongly_high": wrongly.high, "successful_searches": len(successes)}


def _judge_searches(searches: Sequence[UnstoppedSearch], steps: int) -> dict[str, Any]:
    right, wrong = ([s for s in searches if s.steps == steps and s.recovered is kind] for kind in (True, False))
    stopped = [iteration for one in wrong if (iteration := one.find_stop())]
    return {
        "searches": len(right) + len(wrong),
        "successful": len(right),
        "stopped_wrongly": sum(one.find_stop() > 0 for one in right),
        "failed": len(wrong),
        "stopped_rightly": len(stopped),
        "iterations_until_stopped": mean(stopped) if stopped else None,
    }


def measure_early_losses(options: Options) -> tuple[list[ResultRow], dict[str, Any]]:
    """Return the largest early loss of successful searches, and the number of failed ones with a larger one, on the tuning part.

    There is one row for each maximum number of iterations in `SEARCH_STEPS` and each of `ITERATIONS`. Only searches
    that made at least so many iterations count. Losses are relative to the loss at the start of the search.
    Four more columns are on the searches whose loss is near the loss of grey images: successful_near_grey and failed_near_grey
    are their numbers, largest_fall is the largest `UnstoppedSearch.get_fall` of the successful ones, and failed_slower the
    number of failed ones whose `UnstoppedSearch.get_fall` is larger.
    """
    searches = run_unstopped(options, "tuning")
    rows = []
    for steps in SEARCH_STEPS:
        right, wrong = ([s for s in searches if s.steps == steps and s.recovered is kind] for kind in (True, False))
        for after in ITERATIONS:
            early = [[e for one in own if (e := one.get_early_loss(after))] for own in (right, wrong)]
            falls = [[f for one in own if (f := one.get_fall(after))] for own in (right, wrong)]
            most, slowest = (max(own[0], default=0.0) for own in (early, falls))
            rows.append(
                {
                    "steps": steps,
                    "after": after,
                    "successful": len(early[0]),
                    "largest": most,
                    "failed": len(early[1]),
                    "failed_above": sum(e > most for e in early[1]),
                    "successful_near_grey": len(falls[0]),
                    "largest_fall": slowest if falls[0] else None,
                    "failed_near_grey": len(falls[1]),
                    "failed_slower": sum(f > slowest for f in falls[1]),
                }
            )
    return rows, {}


def run_unstopped(options: Options, part: Part) -> list[UnstoppedSearch]:
    """Run searches to their end, without the rule, for each of `CLIENT_SETTINGS` and each number of iterations in `SEARCH_STEPS`.

    part: the part of the data that the examples come from. With --quick there are four searches.
    """
    searches: list[UnstoppedSearch] = []
    for steps in SEARCH_STEPS:
        cells = [
            Cell(
                **({"attack": "inverting_gradients", "settings": {"steps": steps}, "half": True, "cases": CASES_PER_CLIENT} | one)
            )
            for one in CLIENT_SETTINGS
        ]
        if options.quick:
            cells = [replace(cell, cases=2) for cell in cells[:2]] if steps == min(SEARCH_STEPS) else []
        for _, cell, at in place_cells([("", cell) for cell in cells]):
            searches += _search_cell(cell, options, part, at)
    return searches


def _search_cell(cell: Cell, options: Options, part: Part, skip: int) -> Iterator[UnstoppedSearch]:
    data = draw_examples(cell, options, part=part, skip=skip)
    made, truth = make_cases(cell, data, options)
    steps = cell.settings["steps"]
    attack = replace(inverting_gradients(steps=steps, give_up=0.0), device=options.device)
    first, plain = (_compute_first_losses(one, made, options.seed) for one in (attack, attack.copy_with(init=solid(PLAIN_GREY))))
    for case, x, one in zip(made, truth, attack(made, rng=torch.Generator().manual_seed(options.seed)), strict=True):
        recovered = any(judge_reconstruction(cell, one, x, data).recovered)
        yield UnstoppedSearch(steps, first[case.key], plain[case.key], one.loss.tolist(), recovered)


def _compute_first_losses(attack: GradientMatching, made: Sequence[Case], seed: int) -> dict[str, float]:
    """Return a dict from the key of each case to the loss at the start of its search, a cosine distance (1: zero gradient)."""
    probe = attack.copy_with(optimiser=Adam(), steps=1)
    return {one.case: float(one.loss[0]) for one in probe(made, rng=torch.Generator().manual_seed(seed))}
