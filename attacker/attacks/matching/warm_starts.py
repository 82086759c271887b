"""Given examples of two kinds: warm starts, from which a search begins, and held examples, which it does not change."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Generator, Tensor

from attacker.attacks.cases import Case


class WarmStart(NamedTuple):
    """A warm start: examples x (n, *shape) in [0, 1] with labels y (n,), in any order, at most as many as are searched for.

    alone: whether a search from a regular start, a start without these examples, follows only if the search from this warm start
           is stuck (`Stop.stuck`). If False, it follows unless the search from this warm start has converged, since noise can
           spoil these examples.
    """

    x: Tensor
    y: Tensor
    alone: bool = False


class HeldExamples(NamedTuple):
    """Examples of a case that are known, so that a search leaves them as they are.

    V is the number of examples of the case, without their copies for local epochs; a search leaves all copies as they are.
    x: (V, *shape) in [0, 1], arbitrary where `mask` is false. mask: (V,) bool, true for the examples that are known.
    """

    x: Tensor
    mask: Tensor


WarmStartRule = Callable[[Sequence[Case], Generator], Sequence[WarmStart | None]]
"""Maps the cases and a random generator to a warm start for each case, or None."""


def place_start(warm_start: WarmStart, drawn: Tensor, labels: Tensor | None) -> Tensor:
    """Return a copy of the start `drawn` (V, *shape) in which examples are replaced by those of the warm start with equal labels.

    labels: (V,) labels of the examples that are searched for; None if labels are optimised, so that any position fits. A given
            example is left out if no position with its label is free.
    """
    x, free = drawn.clone(), list(range(len(drawn)))
    for example, label in zip(warm_start.x, warm_start.y.tolist(), strict=True):
        place = next((i for i in free if labels is None or int(labels[i]) == label), None)
        if place is not None:
            free.remove(place)
            x[place] = example.to(x)
    return x
