"""When a search can be given up: losses early in a search, and whether it recovered an example; for tuning.py and calibration.py.

`early` is the best loss after a share of the steps, relative to the loss at the start. A search is given up if that is above
`hopeless` (`attacker.attacks.optimisers.descent.Stop`). A search succeeds if it recovers at least one example of its case. As the
rule does not change a search before it ends it, full searches show what the rule would have done.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from support.calibration.cases import NETWORKS, Cell, cases, drawn, judged
from support.calibration.confidence import placed
from support.calibration.grid import noise, prune
from support.contract import Options

from attacker.attacks import ATTACKS, Case, GradientMatching
from attacker.attacks.optimisers.first_order import Adam

Rows = list[dict[str, Any]]
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3)
"""Shares of the steps after which a search may be given up, among which the tuning part chooses."""
CONVNET, STRIDED = (f"{NETWORKS}:{name}" for name in ("convnet", "strided"))
SEARCHES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "inverting_gradients": ("inverting_gradients", {"steps": 1200}),
    "inverting_gradients signed": ("inverting_gradients", {"steps": 1200, "signed": True, "tv": 1e-4}),
    "cpl": ("cpl", {"tv": 3e-5}),
}
CLIENTS: Sequence[Mapping[str, Any]] = (
    {"data": "lfw"},
    {"data": "cifar10"},
    {"data": "cifar100", "arguments": {"activation": "relu"}},
    {"data": "cifar10", "network": CONVNET},
    {"data": "lfw", "network": STRIDED},
    {"data": "lfw", "batch": 4},
    {"data": "cifar100", "batch": 2},
    {"data": "lfw", "defense": noise(1e-3)},
    {"data": "cifar10", "defense": noise(1e-2)},
    {"data": "lfw", "defense": prune(0.1)},
    {"data": "cifar100", "epochs": 2, "rate": 0.1},
    {"data": "cifar10", "batch": 8, "defense": noise(3e-2)},
)


@dataclass(frozen=True)
class Watched:
    """A full search. early: best loss after each of `SHARES`, relative to the loss at the start; None if it had ended before.

    spent: iterations made, relative to the maximum. recovered: whether it recovered an example.
    """

    search: str
    early: Mapping[float, float | None]
    spent: float
    recovered: bool

    def is_given_up(self, after: float, hopeless: float) -> bool:
        """Return whether the rule ends this search."""
        early = self.early[after]
        return early is not None and early > hopeless


def watched(asked: Options, part: str, count: int) -> list[Watched]:
    """Return full searches on `count` cases of each client of `CLIENTS`, with examples of one part."""
    made = [(name, Cell(attack=attack, settings=settings, half=True, cases=count, **one))
            for (name, (attack, settings)), one in product(SEARCHES.items(), CLIENTS)]  # fmt: skip
    if asked.quick:
        made = [(name, replace(cell, settings={**cell.settings, "steps": 20}, cases=2)) for name, cell in made[::17]]
    found = []
    for name, cell, at in placed(made):
        found += list(_searched(name, cell, asked, part, at))
    return found


def _searched(name: str, cell: Cell, asked: Options, part: str, skip: int) -> Iterator[Watched]:
    data = drawn(cell, asked, part=part, skip=skip)  # type: ignore[arg-type]
    made, truth = cases(cell, data, asked)
    attack = replace(ATTACKS[cell.attack](**cell.settings), device=asked.device)
    first = _first_losses(attack, made, asked.seed)
    steps = attack.search.steps
    for case, x, one in zip(made, truth, attack(made, rng=torch.Generator().manual_seed(asked.seed)), strict=True):
        at = {after: max(1, round(after * steps)) for after in SHARES}
        early = {after: float(one.loss[k - 1]) / first[case.key] if k < one.iterations else None for after, k in at.items()}
        yield Watched(name, early, one.iterations / steps, any(judged(cell, one, x, data).recovered))


def _first_losses(attack: GradientMatching, made: Sequence[Case], seed: int) -> dict[str, float]:
    """Return the loss at the start of each search."""
    probe = attack.changed(optimiser=Adam(), steps=1)
    return {one.case: float(one.loss[0]) for one in probe(made, rng=torch.Generator().manual_seed(seed))}
