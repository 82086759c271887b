"""Warm starts for the search."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Generator, Tensor

from attacker.attacks.base import Case


class Given(NamedTuple):
    """Examples x (n, *shape) in [0, 1] and their labels y (n,), of as many as are searched for, or fewer, in any order.

    alone: whether another start is tried only where the search from here is stuck. Else one is tried unless it has converged,
    since noise can spoil an answer that has no prior.
    """

    x: Tensor
    y: Tensor
    alone: bool = False


First = Callable[[Sequence[Case], Generator], Sequence[Given | None]]
"""A start for each case, or None."""


def placed(given: Given, own: Tensor, labels: Tensor | None) -> Tensor:
    """`own`, a start (V, *shape), with each given example at a place of its own label.

    labels: (V,), of the places; None where they are searched for, so that any place will do. An example whose label has no place
    left is left out: it would have to become another one.
    """
    x, free = own.clone(), list(range(len(own)))
    for example, label in zip(given.x, given.y.tolist(), strict=True):
        place = next((i for i in free if labels is None or int(labels[i]) == label), None)
        if place is not None:
            free.remove(place)
            x[place] = example.to(x)
    return x
