"""Distances and optimisers by the names that users give them; label rules are in `labels`."""

from collections.abc import Callable, Mapping
from typing import TypeVar, get_args

from attacker.attacks.matching.objectives import Distance, absolute, cosine, euclidean
from attacker.attacks.matching.simulation import LocalSteps
from attacker.attacks.optimisers.first_order import SGD, Adagrad, Adam, Optimiser
from attacker.attacks.optimisers.lbfgs import LBFGS

Part = TypeVar("Part")

DISTANCES: Mapping[str, Distance] = {"euclidean": euclidean, "cosine": cosine, "absolute": absolute}

OPTIMISERS: Mapping[str, tuple[Callable[[float], Optimiser], float]] = {
    "lbfgs": (lambda rate: LBFGS(learning_rate=rate), 1.0),
    "wolfe": (lambda rate: LBFGS(learning_rate=rate, line_search=True), 1.0),
    "adam": (lambda rate: Adam(learning_rate=rate, decay_at=()), 0.02),
    "momentum": (lambda rate: SGD(learning_rate=rate), 0.01),
    "adagrad": (lambda rate: Adagrad(learning_rate=rate), 0.1),
}
"""Each from a learning rate, and the one it has where none is given; `wolfe` is L-BFGS with a line search."""


def distance(name: str) -> Distance:
    """Raises ValueError for an unknown name."""
    return _named("distance", name, DISTANCES)


def optimiser(name: str, learning_rate: float = 0.0) -> Optimiser:
    """learning_rate: 0 for the optimiser's own. Raises ValueError for an unknown name."""
    made, own = _named("optimiser", name, OPTIMISERS)
    return made(learning_rate or own)


def _named(what: str, name: str, parts: Mapping[str, Part]) -> Part:
    if name not in parts:
        raise ValueError(f"unknown {what} {name!r}. Known: {', '.join(parts)}")
    return parts[name]


def local_steps(name: str) -> LocalSteps:
    """Raises ValueError for an unknown name."""
    return _named("local_steps", name, {known: known for known in get_args(LocalSteps)})
