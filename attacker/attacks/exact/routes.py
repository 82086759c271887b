"""The closed forms by name, in the order in which they are tried."""

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from attacker.attacks.exact.layers import Answer, answers, read, require_single, walk_through
from attacker.attacks.exact.observed import Observed
from attacker.attacks.exact.peeled import Peeled, peel
from attacker.attacks.exact.rank import rank_report
from attacker.attacks.exact.walk import Walk, finish

Route = Callable[[Observed, Generator, Walk], Sequence[Answer]]
"""From N observations, N answers. Raises ValueError, in words, where it cannot be taken."""


def layers(observed: Observed, rng: Generator, walk: Walk) -> Sequence[Answer]:
    """R-GAP, from the last layer to the first."""
    return walk_through(observed, walk=walk)


def peeled(observed: Observed, rng: Generator, walk: Walk) -> Sequence[Answer]:
    """R-GAP to the last layer that lacks equations, and all that is left in one system, with the belief that images are smooth."""
    chain = require_single(observed)
    deficient = rank_report(chain).deficient_layers
    if not deficient:
        raise ValueError("no layer lacks equations: there is nothing to peel off")
    readings = read(observed, chain, observed.gradient, walk)
    point = finish(chain, observed.weights, observed.gradient, readings.first, walk, until=deficient[-1])
    low, high = _range(observed)
    found = peel(chain, observed.weights, observed.gradient, point, low=low, high=high)
    name = chain.layers[deficient[-1]].name
    return [
        Answer(
            x=answer.x,
            y=answer.y,
            route=answer.route,
            notes=(*answer.notes, *_shaped(found, i, name)),
            confidence=_seen(found, i),
            twin=answer.twin,
        )
        for i, answer in enumerate(answers(observed, readings, found.x, None, "peeled"))
    ]


ROUTES: dict[str, Route] = {"layers": layers, "peeled": peeled}


def _range(observed: Observed) -> tuple[Tensor, Tensor]:
    """The model's inputs for values of 0 and of 1."""
    ends = (torch.full(observed.data.shape, value, dtype=observed.dtype, device=observed.device) for value in (0.0, 1.0))
    low, high = (observed.data.normalise(end) for end in ends)
    return low, high


def _shaped(found: Peeled, i: int, layer: str) -> tuple[str, ...]:
    if bool(found.exact[i]):
        return ()
    return (f"layer {layer} lacks equations, and what the gradient leaves open is filled in by a prior",)


def _seen(found: Peeled, i: int) -> Tensor:
    """(1,) how much of the answer the equations determine."""
    share = (1 - found.free[i]).nan_to_num(nan=0.5).clamp(0, 1)
    return share.reshape(1)
