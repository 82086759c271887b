"""Answers of R-GAP for observations of one example each, and the choice between twins."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.heads import more_than_one
from attacker.attacks.closed_form.observations import Observed
from attacker.attacks.closed_form.plausibility import outside
from attacker.attacks.closed_form.rgap.walk import OURS, Point, Tensors, Walk, beginnings, finish, homogeneous, step
from attacker.attacks.networks.chain import Chain

FITS = 1e-6
"""Largest mean squared distance to [0, 1] of an answer that counts as data."""
MISFIT = 0.01
"""Relative distance between the last layer's gradient and that of its own answer from which a note is added."""


@dataclass(frozen=True)
class ClosedFormAnswer:
    """Answer of a closed form: x (B, *shape), not clamped to [0, 1], and labels y (B,).

    route:      closed form that answered. notes: remarks for the reader.
    doubts:     reasons why it may be wrong; dropped if the answer turns out to be exact.
    stays:      (B,) in [0, 1], the route's own measure of certainty, if it has one; see `confidence.of_closed_form`.
    twin:       another x with the same gradient.
    determined: share of the input's values that the gradient determines, by count; below 1, the input is not unique.
    likeliest:  whether it is a MAP estimate, which does not fit noise.
    """

    x: Tensor
    y: Tensor
    route: str
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    stays: Tensor | None = None
    twin: Tensor | None = None
    determined: float = 1.0
    likeliest: bool = False


@dataclass(frozen=True)
class Readings:
    """Where the walks of N problems stand: the likeliest reading of each head, and its twin where there is one.

    factor: (N,) x of the twin over x, where one is a multiple of the other and has not been walked; else `second` is its walk.
    """

    first: Point
    twins: Tensor
    factor: Tensor | None = None
    second: Point | None = None
    doubts: tuple[tuple[str, ...], ...] = field(default_factory=tuple)


def require_single(observed: Observed) -> Chain:
    """The chain of a model whose observations are of one example. Raises ValueError, in words, where the walk cannot be taken."""
    chain = observed.chain
    if isinstance(chain, str):
        raise ValueError(f"no closed form walks back through this model: {chain}")
    if observed.examples != 1:
        raise ValueError(
            f"{observed.examples} examples are behind the update: layer by layer, one example is found; "
            "of several it would be a mixture"
        )
    return chain


def read(observed: Observed, chain: Chain, gradient: Tensors, walk: Walk = OURS) -> Readings:
    """Choose among the readings of each head by how well the layer before it can be solved."""
    points = beginnings(chain, observed.weights, gradient, observed.training.loss)
    if len(points) == 1:
        return Readings(points[0], torch.zeros_like(points[0].head.clamped), doubts=_doubts(chain, gradient, points[0]))
    alone = len(chain.layers) == 1
    judged = points if alone else [step(chain, observed.weights, gradient, p, walk) for p in points]
    scores = torch.stack([_score(p, i, case_labels(observed)) for i, p in enumerate(judged)])
    if alone:  # no layer is left that could tell
        scores = scores + torch.stack([outside(observed.data.denormalise(p.f)) for p in points])
    fits = scores <= 10 * scores.amin(dim=0) + 1e-5  # of readings that fit alike, the likelier one is walked
    order = torch.where(fits, torch.arange(len(points), device=fits.device)[:, None] - len(points), scores).argsort(dim=0)
    first, second = _chosen(points, order[0]), _chosen(points, order[1])
    twins = fits.gather(0, order[1:2])[0] & torch.isfinite(scores.gather(0, order[1:2])[0])
    doubts = _doubts(chain, gradient, first)
    if not bool(twins.any()):
        return Readings(first, twins, doubts=doubts)
    if homogeneous(chain):
        ratio = (second.f * first.f).flatten(1).sum(dim=1) / first.f.flatten(1).square().sum(dim=1)
        return Readings(first, twins, factor=ratio, doubts=doubts)
    return Readings(first, twins, second=second, doubts=doubts)


def answers(observed: Observed, readings: Readings, first: Tensor, second: Tensor | None, route: str) -> list[ClosedFormAnswer]:
    """From model inputs (N, *shape) of the first reading and, where walked, of the second, one answer a problem."""
    if second is None and readings.factor is not None:
        second = first * readings.factor.reshape(-1, *[1] * (first.ndim - 1))
    x = observed.data.denormalise(first)
    if second is None:
        labels = readings.first.head.y
        return [ClosedFormAnswer(x[i : i + 1], labels[i : i + 1], route, doubts=readings.doubts[i]) for i in range(len(x))]
    return _between_twins(observed, readings, x, observed.data.denormalise(second), route)


def walk_through(observed: Observed, gradient: Tensors | None = None, walk: Walk = OURS) -> list[ClosedFormAnswer]:
    """R-GAP on all observations at once. Raises ValueError where it cannot be taken, `require_single` says why."""
    chain = require_single(observed)
    gradient = observed.gradient if gradient is None else gradient
    readings = read(observed, chain, gradient, walk)
    first = finish(chain, observed.weights, gradient, readings.first, walk)
    second = finish(chain, observed.weights, gradient, readings.second, walk).f if readings.second else None
    return answers(observed, readings, first.f, second, "layers")


def _between_twins(observed: Observed, readings: Readings, x: Tensor, other: Tensor, route: str) -> list[ClosedFormAnswer]:
    """Of two data with the same gradient, the one that lies in [0, 1]; of two that do, the one with more contrast."""
    off = outside(x), outside(other)
    both = (off[0] <= FITS) & (off[1] <= FITS)
    larger = other.flatten(1).var(dim=1) > x.flatten(1).var(dim=1)
    swap = readings.twins & torch.where(both, larger, off[1] < off[0])
    found = []
    for i in range(len(x)):
        kept, left = (other, x) if bool(swap[i]) else (x, other)
        twin = left[i : i + 1] if bool(readings.twins[i]) else None
        words = (_of_twins(kept[i], left[i]),) if twin is not None else ()
        y = readings.first.head.y[i : i + 1]
        if bool(swap[i]) and readings.second is not None:
            y = readings.second.head.y[i : i + 1]
        found.append(ClosedFormAnswer(kept[i : i + 1], y, route, words, readings.doubts[i], twin=twin))
    return found


def _of_twins(kept: Tensor, left: Tensor) -> str:
    inside = [f"{float(low):.3g} to {float(high):.3g}" for low, high in ((t.min(), t.max()) for t in (kept, left))]
    return f"it has a twin with the same gradient; this one has values of {inside[0]}, the other of {inside[1]}"


def _doubts(chain: Chain, gradient: Tensors, point: Point) -> tuple[tuple[str, ...], ...]:
    head = point.head
    several = more_than_one(gradient[chain.layers[-1].weight])
    found = []
    for many, clamped, misfit in zip(several.tolist(), head.clamped.tolist(), head.misfit.tolist(), strict=True):
        words = []
        if many:
            words.append("the last layer's gradient has rank two or more: more than one example, or noise, is behind it")
        if clamped:
            words.append("no single example gives the last layer's gradient: it was moved to the nearest that one does give")
        if misfit > MISFIT:
            off = f"{misfit:.0%}" if misfit < 10 else "more than ten times its length"
            words.append(
                f"the last layer's gradient does not fit the loss, off by {off}: "
                "another model, another loss, more examples, or a defense"
            )
        found.append(tuple(words))
    return tuple(found)


def case_labels(observed: Observed) -> Tensor | None:
    """(N,) the labels of an oracle, where every case has one."""
    known = [case.known_labels for case in observed.cases]
    told = [t for t in known if t is not None and len(t) == 1]
    return torch.cat(told) if len(told) == len(known) else None


def _score(point: Point, place: int, labels: Tensor | None) -> Tensor:
    """(N,) how badly a reading fits; of equals, the one that came first is better."""
    score = point.residual + point.head.misfit + 1e-12 * place
    score = torch.where(point.head.valid, score.nan_to_num(nan=1e30), torch.inf)
    if labels is None:
        return score
    return score + torch.where(point.head.y == labels.to(score.device), 0, 1e6)


def _chosen(points: Sequence[Point], which: Tensor) -> Point:
    chosen = points[0]
    for i, point in enumerate(points[1:], start=1):
        here = which == i

        def pick(a: Tensor, b: Tensor, here: Tensor = here) -> Tensor:
            return torch.where(here.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        chosen = replace(
            chosen,
            f=pick(point.f, chosen.f),
            gradient=pick(point.gradient, chosen.gradient),
            head=point.head.where(here, chosen.head),
        )
    return chosen
