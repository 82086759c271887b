"""Search for the order in which a client used its examples, if each of its local steps is on a batch of some of them.

The server does not see which examples were in which batch, but the update depends on it: later batches are used at other weights,
and with momentum they enter the update with smaller factors. Given examples from a first search, the order is found by local
search, which begins at the order that `labels.step_labels` infers, if there is one: exchange two examples of different batches as
long as the simulated update comes closer to the observed one; then fit the examples to each of the nearest orders for a few
iterations, and go on around the order that fits best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations

from torch import Tensor

MAX_ORDERED_EXAMPLES = 32
"""Largest number of examples of a client whose order is searched for."""
MAX_MEASURED = 2000
"""Largest number of orders whose updates are simulated for fixed examples."""
FITTED_AT_ONCE = 12
"""Number of orders to which the examples are fitted before the search goes on around the best of them."""


@dataclass(frozen=True)
class StepOrder:
    """An assumption about which examples a client used in which local step, and about their labels.

    examples: index of the example at each position of each local step, one step after the other.
    labels:   label of each example.
    """

    examples: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """The distance between simulated and observed update after the examples were fitted to an order, and their latent vector."""

    distance: float
    z: Tensor


Measure = Callable[[Sequence[StepOrder]], Sequence[float]]
"""Returns the distance between simulated and observed update for each order, with fixed examples."""
FitExamples = Callable[[Sequence[StepOrder]], Sequence[Fit]]
"""Fits the examples to each order for a few iterations, always from the same start."""


def search_order(
    start: StepOrder,
    sizes: Sequence[int],
    measure: Measure,
    fit: FitExamples,
    *,
    fits: int,
    classes: int = 0,
    likely: bool = False,
    alone: bool = True,
) -> tuple[StepOrder, Fit | None]:
    """Return the order whose simulated update comes closest to the observed one after a fit, with this fit.

    Without fits, the order that is best for the fixed examples is returned, and None.

    start: the order at which the search begins. sizes: number of examples of each local step. fits: largest number of fits.
    classes: number of classes if labels may be changed as well; 0 if they are known. likely: whether `start` is fitted
    in any case, and kept if none of the orders that are fitted with it is better. alone: whether the examples are in no other
    update, see `identify`.
    """
    measured = {start: measure([start])[0]}
    best = _climb(start, sizes, measure, measured, classes)
    near = list(measured)
    if likely:
        best, measured[start] = start, 0.0  # so that it is fitted first
    fitted: dict[object, tuple[StepOrder, Fit]] = {}
    while fits > 0:
        new = {identify(order, sizes, alone): order for order in sorted(near, key=measured.__getitem__, reverse=True)}
        chosen = [order for key, order in new.items() if key not in fitted]
        chosen = sorted(chosen, key=measured.__getitem__)[: min(fits, FITTED_AT_ONCE)]
        if not chosen:
            break
        fitted |= {identify(order, sizes, alone): (order, misfit) for order, misfit in zip(chosen, fit(chosen), strict=True)}
        fits -= len(chosen)
        best, _ = min(fitted.values(), key=lambda pair: pair[1].distance)
        if likely and best == start:
            break
        near = list_neighbours(best, sizes, range(classes))
        _measure_new(near, measure, measured)
    found = fitted.get(identify(best, sizes, alone))
    return found if found is not None else (best, None)


def _climb(start: StepOrder, sizes: Sequence[int], measure: Measure, measured: dict[StepOrder, float], classes: int) -> StepOrder:
    """Return an order that is better than its neighbours for the fixed examples, and add all measured distances to `measured`."""
    best = start
    while len(measured) < MAX_MEASURED:
        near = list_neighbours(best, sizes, range(classes))
        _measure_new(near, measure, measured)
        nearest = min([best, *near], key=measured.__getitem__)
        if nearest == best:
            break
        best = nearest
    return best


def _measure_new(orders: Sequence[StepOrder], measure: Measure, measured: dict[StepOrder, float]) -> None:
    new = [order for order in dict.fromkeys(orders) if order not in measured]
    if new:
        measured |= dict(zip(new, measure(new), strict=True))


def list_neighbours(order: StepOrder, sizes: Sequence[int], classes: Sequence[int] = ()) -> list[StepOrder]:
    """Return all orders that differ from `order` in one way.

    Two examples of different steps of one epoch change places, or two steps of one epoch that have equally many examples do, or
    one example has another label, which is one of `classes`. sizes: number of examples of each local step.
    """
    ends = list(accumulate(sizes))
    steps = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    pairs = [(a, b) for a, b in combinations(steps, 2) if a.start // len(order.labels) == b.start // len(order.labels)]
    exchanged = [[(p, q)] for a, b in pairs for p in a for q in b]
    exchanged += [list(zip(a, b, strict=True)) for a, b in pairs if len(a) == len(b) > 1]
    neighbours = []
    for places in exchanged:
        examples = list(order.examples)
        for p, q in places:
            examples[p], examples[q] = examples[q], examples[p]
        neighbours.append(replace(order, examples=tuple(examples)))
    for index, label in enumerate(order.labels):
        others = [other for other in classes if other != label]
        neighbours += [replace(order, labels=(*order.labels[:index], other, *order.labels[index + 1 :])) for other in others]
    return neighbours


def identify(order: StepOrder, sizes: Sequence[int], alone: bool = True) -> object:
    """Return a key that is equal for orders which differ only in the numbers of examples, so that one fit is enough for them.

    With one epoch, examples with equal labels are interchangeable, since both are fitted, unless they are in other updates, too.
    alone: whether they are in no other update.
    """
    once = alone and len(order.examples) == len(order.labels)
    batches = [order.examples[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    named = [sorted(order.labels[index] if once else index for index in batch) for batch in batches]
    return tuple(map(tuple, named)), () if once else order.labels
