"""Answers of R-GAP for observations of one example each, and the choice between twins, two inputs with the same gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.observations import ClosedFormAnswer, StackedObservations
from attacker.attacks.closed_form.rgap.heads import has_rank_above_one
from attacker.attacks.closed_form.rgap.recursion import (
    DEFAULT_RGAP,
    Point,
    RgapSettings,
    is_homogeneous,
    solve_last_layer,
    solve_layer,
    solve_layers,
)
from attacker.attacks.closed_form.rgap.system import broadcast_like
from attacker.attacks.confidence.evidence import measure_outside
from attacker.attacks.networks.chain import Chain
from defenses.base import Tensors

MAX_OUTSIDE = 1e-6
"""Largest mean squared distance to [0, 1] of an answer that counts as valid data."""
MISFIT_TO_NOTE = 0.01
"""`HeadReading.misfit` above which a doubt is added to the answer (`ClosedFormAnswer.doubts`)."""


@dataclass(frozen=True)
class LastLayerSolutions:
    """The chosen solutions of the last layer of N problems, from which R-GAP continues. Each is the `Point` at the layer's input.

    first:  the likeliest solution of each problem.
    twins:  mask (N,) of the problems that have a second solution that fits as well.
    factor: (N,) ratio of the second solution to the first, if there are twins and they are multiples of each other; else None.
    second: the second solution, if there are twins and they are not multiples of each other; else None. Valid only in `twins`.
    doubts: for each problem, see `ClosedFormAnswer`.
    """

    first: Point
    twins: Tensor
    factor: Tensor | None = None
    second: Point | None = None
    doubts: tuple[tuple[str, ...], ...] = field(default_factory=tuple)


def require_single(observed: StackedObservations) -> Chain:
    """Return the model as a chain of layers.

    Raises ValueError with the reason if the model is not such a chain, or the update is not of exactly one example.
    """
    chain = observed.chain
    if isinstance(chain, str):
        reason = chain
        raise ValueError(f"R-GAP cannot invert this network layer by layer: {reason}{observed.search_advice}")
    if observed.examples != 1:
        raise ValueError(
            f"the update was computed from {observed.examples} examples, and R-GAP recovers only a single one (from several, a "
            "mixture of them); a search, such as the attack cpl, has no such limit"
        )
    return chain


def choose_solutions(observed: StackedObservations, chain: Chain, rgap: RgapSettings) -> LastLayerSolutions:
    """Return the likeliest of the possible solutions of the last layer, and a second one where it fits as well (the twin).

    Solutions are compared by how badly they fit the last layer's gradient and how well the layer before can be solved with them.
    If there is only one layer, the distance of its input to [0, 1] takes the place of the second criterion. Solutions with
    another label than a known one come last.
    """
    gradient = observed.gradient
    points = solve_last_layer(chain, observed.weights, gradient, observed.training.loss)
    if len(points) == 1:
        return LastLayerSolutions(
            points[0], torch.zeros_like(points[0].head.clamped), doubts=_list_doubts(chain, gradient, points[0])
        )
    alone = len(chain.layers) == 1
    judged = points if alone else [solve_layer(chain, observed.weights, gradient, p, rgap) for p in points]
    scores = torch.stack([_score_solution(p, i, _read_known_labels(observed)) for i, p in enumerate(judged)])
    if alone:  # there is no layer before it to decide
        scores = scores + torch.stack([measure_outside(observed.restore_examples(p.f)) for p in points])
    fits = scores <= 10 * scores.amin(dim=0) + 1e-5  # of solutions that fit equally well, prefer the likelier one
    order = torch.where(fits, torch.arange(len(points), device=fits.device)[:, None] - len(points), scores).argsort(dim=0)
    first, second = _choose_points(points, order[0]), _choose_points(points, order[1])
    twins = fits.gather(0, order[1:2])[0] & torch.isfinite(scores.gather(0, order[1:2])[0])
    doubts = _list_doubts(chain, gradient, first)
    if not bool(twins.any()):
        return LastLayerSolutions(first, twins, doubts=doubts)
    if is_homogeneous(chain):
        ratio = (second.f * first.f).flatten(1).sum(dim=1) / first.f.flatten(1).square().sum(dim=1)
        return LastLayerSolutions(first, twins, factor=ratio, doubts=doubts)
    return LastLayerSolutions(first, twins, second=second, doubts=doubts)


def build_answers(
    observed: StackedObservations, solutions: LastLayerSolutions, first: Tensor, second: Tensor | None, route: str
) -> list[ClosedFormAnswer]:
    """Return one answer per problem (observation) from the normalised inputs (N, *shape) that R-GAP found.

    A twin is another input with the same gradient; of two twins, the answer holds the more plausible one (`_choose_twins`).
    first, second: inputs from the first solution of the last layer and from the second; None if R-GAP was not run for the second.
                   A twin that is a multiple of `first` is computed here (`LastLayerSolutions.factor`).
    """
    if second is None and solutions.factor is not None:
        second = first * solutions.factor.reshape(-1, *[1] * (first.ndim - 1))
    x = observed.restore_examples(first)
    if second is None:
        labels = solutions.first.head.y
        return [ClosedFormAnswer(x[i : i + 1], labels[i : i + 1], route, doubts=solutions.doubts[i]) for i in range(len(x))]
    return _choose_twins(solutions, x, observed.restore_examples(second), route)


def run_rgap(observed: StackedObservations, rgap: RgapSettings = DEFAULT_RGAP) -> list[ClosedFormAnswer]:
    """Solve for the input of each layer, from the last to the first (R-GAP), for all observations at once; return their answers.

    Raises ValueError if R-GAP does not apply, see `require_single`, or if the last layer cannot be solved, such as a convolution.
    """
    chain = require_single(observed)
    solutions = choose_solutions(observed, chain, rgap)
    first = solve_layers(chain, observed.weights, observed.gradient, solutions.first, rgap)
    second = solve_layers(chain, observed.weights, observed.gradient, solutions.second, rgap).f if solutions.second else None
    return build_answers(observed, solutions, first.f, second, "layers")


def _choose_twins(solutions: LastLayerSolutions, x: Tensor, candidate: Tensor, route: str) -> list[ClosedFormAnswer]:
    """Return one answer per problem, with x or, where there is a twin (`solutions.twins`), the better one of x and `candidate`.

    If both are in [0, 1], the better one has the larger variance of its values. If not, the better one is nearer to [0, 1]. The
    other one becomes the answer's `twin`.
    """
    off = measure_outside(x), measure_outside(candidate)
    both = (off[0] <= MAX_OUTSIDE) & (off[1] <= MAX_OUTSIDE)
    larger = candidate.flatten(1).var(dim=1) > x.flatten(1).var(dim=1)
    swap = solutions.twins & torch.where(both, larger, off[1] < off[0])
    chosen = []
    for i in range(len(x)):
        kept, left = (candidate, x) if bool(swap[i]) else (x, candidate)
        twin = left[i : i + 1] if bool(solutions.twins[i]) else None
        notes = (_describe_twins(kept[i], left[i]),) if twin is not None else ()
        y = solutions.first.head.y[i : i + 1]
        if bool(swap[i]) and solutions.second is not None:
            y = solutions.second.head.y[i : i + 1]
        chosen.append(ClosedFormAnswer(kept[i : i + 1], y, route, notes, solutions.doubts[i], twin=twin))
    return chosen


def _describe_twins(kept: Tensor, rejected: Tensor) -> str:
    inside = [f"{float(low):.3g} to {float(high):.3g}" for low, high in ((t.min(), t.max()) for t in (kept, rejected))]
    return f"another example, its twin, has the same gradient; this one has values from {inside[0]}, the other from {inside[1]}"


def _list_doubts(chain: Chain, gradient: Tensors, point: Point) -> tuple[tuple[str, ...], ...]:
    head = point.head
    several = has_rank_above_one(gradient[chain.layers[-1].weight])
    doubts = []
    for many, clamped, misfit in zip(several.tolist(), head.clamped.tolist(), head.misfit.tolist(), strict=True):
        notes = []
        if many:
            notes.append("the last layer's gradient has rank two or more: it is of more than one example, or contains noise")
        if clamped:
            notes.append("no single example has exactly the last layer's gradient, so the nearest possible one was used")
        if misfit > MISFIT_TO_NOTE:
            off = f"{misfit:.0%}" if misfit < 10 else "more than ten times its norm"
            notes.append(
                f"the last layer's gradient does not fit the loss, it is off by {off}: "
                "model or loss may be wrong, or there are more examples, or a defense changed it"
            )
        doubts.append(tuple(notes))
    return tuple(doubts)


def _read_known_labels(observed: StackedObservations) -> Tensor | None:
    """Return the true labels (N,), which no server knows, that the user gave; None unless each case has exactly one."""
    known = [case.known_labels for case in observed.cases]
    single = [t for t in known if t is not None and len(t) == 1]
    return torch.cat(single) if len(single) == len(known) else None


def _score_solution(point: Point, index: int, labels: Tensor | None) -> Tensor:
    """Return a score (N,) of a solution of the last layer: the residual of R-GAP up to `point` plus the solution's misfit.

    The residual is the largest of the layers solved so far. Lower is better. Solutions that are not valid get inf.
    index:  position of the solution in its list; the first of equal ones is preferred.
    labels: known labels (N,), or None; a solution with another label gets a large penalty.
    """
    score = point.residual + point.head.misfit + 1e-12 * index
    score = torch.where(point.head.valid, score.nan_to_num(nan=1e30), torch.inf)
    if labels is None:
        return score
    return score + torch.where(point.head.y == labels.to(score.device), 0, 1e6)


def _choose_points(points: Sequence[Point], index: Tensor) -> Point:
    """Return for each problem the one of `points` whose position is in `index` (P,)."""
    chosen = points[0]
    for i, point in enumerate(points[1:], start=1):
        here = index == i
        f, gradient = (
            torch.where(broadcast_like(here, value), value, other)
            for value, other in ((point.f, chosen.f), (point.gradient, chosen.gradient))
        )
        chosen = replace(chosen, f=f, gradient=gradient, head=point.head.where(here, chosen.head))
    return chosen
