"""Links: statements about which places (positions of examples in observations) hold the same example, and how they are found."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from attacker.attacks.linking.epochs import FALSE_MATCH_RATE, Passes, find_passes
from attacker.attacks.linking.matching import IMPOSSIBLE_COST, Filter, compute_certainty, match_greedily, match_optimally
from attacker.attacks.linking.pair_costs import PairCosts, RoundDescription, compute_pair_costs

Matching = Literal["assignment", "greedy"]

MIN_CERTAINTY = 0.05
"""Certainty below which a pair is not linked, since a wrong link spoils both examples."""


@dataclass(frozen=True)
class Links:
    """The examples of a case (observations that are attacked together), and the places at which each occurs.

    places:     one tensor (N_o,) int64 per observation of N_o examples: the number of the example at each place. Numbers are
                contiguous from 0, and none occurs twice in one observation.
    confidence: (examples,) in [0, 1]: estimated certainty that all places of an example are correct; 1 for an example with one
                place.
    labels:     (examples,) int64 inferred labels, or None.
    epochs:     1-based number of the pass over the examples (epoch) to which each observation belongs; empty if unknown.
    notes:      remarks on the observations, such as passes, gaps and rounds left out.
    """

    places: tuple[Tensor, ...]
    confidence: Tensor
    labels: Tensor | None = None
    epochs: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        each = [places.tolist() for places in self.places]
        used = sorted(set().union(*each))
        if used != list(range(len(self.confidence))):
            raise ValueError(
                f"Links.confidence has one entry for each of {len(self.confidence)} examples, so that Links.places must use all "
                f"example numbers from 0 to {len(self.confidence) - 1}, got {used}"
            )
        for places in each:
            if repeated := [example for example, count in Counter(places).items() if count > 1]:
                raise ValueError(
                    f"Links.places must hold an example once per observation, got example {repeated[0]} twice in {places}"
                )

    @property
    def examples(self) -> int:
        """Number of examples."""
        return len(self.confidence)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of examples of each observation: the length of its tensor in `places`."""
        return tuple(len(places) for places in self.places)


def build_unlinked(sizes: Sequence[int], notes: tuple[str, ...] = ()) -> Links:
    """Return links in which no two places hold the same example. sizes: number of examples of each observation."""
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    places = tuple(torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=False))
    return Links(places, torch.ones(sum(sizes)), notes=notes)


def repeat_links(links: Links, epochs: int) -> Links:
    """Return links for `epochs` local epochs that are simulated with separate examples.

    The places of each observation are repeated for every epoch e = 0, 1, ...; in epoch e they hold separate examples, whose
    numbers are larger by e times the number of examples of one epoch.
    """
    places = tuple(
        torch.cat([places_of_round + epoch * links.examples for epoch in range(epochs)]) for places_of_round in links.places
    )
    labels = None if links.labels is None else links.labels.repeat(epochs)
    return replace(links, places=places, confidence=links.confidence.repeat(epochs), labels=labels)


def link(
    rounds: Sequence[RoundDescription],
    *,
    batch_size: int,
    matching: Matching = "assignment",
    rule: Filter = "own",
    min_certainty: float = MIN_CERTAINTY,
    whole_passes: bool = False,
) -> Links:
    """Return the links of a client's rounds: find passes over its examples, and match examples of each pass with earlier ones.

    rounds:       descriptions of the rounds of one client, sorted by round. batch_size: prescribed by the server.
    matching:     "greedy" pairs each pass with the previous one (AGIC, section IV-B). "assignment" assigns the places of each
                  pass to all known examples at the smallest total cost. The cost of a place and a known example is the lowest
                  cost between the place and an earlier place that was linked to this example.
    rule:         "own" links only examples with equal labels. "lists" links examples with any labels, provided that their two
                  observations have a label in common. "none" links any examples.
    min_certainty: pairs with smaller certainty are not linked; 0 links all matched pairs.
    whole_passes: whether every round is a pass, because training is prescribed in epochs.
    No round is dropped: the places of a round that cannot be compared become separate examples, and a note states the reason.
    Raises ValueError without rounds, for an unknown `matching`, and as `compute_pair_costs` does.
    """
    if not rounds:
        raise ValueError("linking needs at least one observation, got none")
    if matching not in ("assignment", "greedy"):
        raise ValueError(f"matching must be 'assignment' or 'greedy', got {matching!r}")
    costs = compute_pair_costs(rounds, rule=rule)
    ends = [len(description.labels) % batch_size != 0 for description in rounds]
    passes = Passes(tuple(range(len(rounds))), None) if whole_passes else find_passes(costs, ends)
    example, sure, doubtful = _number_examples(costs, passes, len(rounds), matching, min_certainty)
    numbers, example = torch.unique(example, return_inverse=True)
    confidence = torch.ones(len(numbers), dtype=torch.float64).scatter_reduce(0, example, sure, "amin")
    places = tuple(example.split([len(description.labels) for description in rounds]))
    labels = _vote_labels(torch.cat([description.labels for description in rounds]), example)
    epochs = tuple(sum(start <= number for start in passes.starts) for number in range(len(rounds)))
    return Links(places, confidence.float(), labels, epochs, _write_notes(rounds, passes, batch_size, places, doubtful))


def _number_examples(
    costs: PairCosts, passes: Passes, count: int, matching: Matching, min_certainty: float
) -> tuple[Tensor, Tensor, int]:
    """Return the number (P,) of the example at each of P places, the certainty (P,) of its link, and a count of doubtful pairs.

    A place is a position in an observation. The certainty is 1 for places without a link to an earlier one. Doubtful pairs were
    not linked because their certainty was below `min_certainty`.
    passes: the client's passes over its examples. A pass is a run of successive observations that is taken to use no example
    twice, so that only places of different passes are linked. count: number of observations.
    matching: "greedy" links a pass only to the previous one, "assignment" to all earlier ones.
    """
    example = torch.arange(len(costs.owner))
    sure = torch.ones(len(costs.owner), dtype=torch.float64)
    usual, doubtful = (
        float(costs.different[int(FALSE_MATCH_RATE * len(costs.different))]) if len(costs.different) else IMPOSSIBLE_COST,
        0,
    )
    bounds = [*passes.starts, count]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if not number:
            continue
        here = ((costs.owner >= start) & (costs.owner < stop)).nonzero().flatten()
        first = bounds[number - 1] if matching == "greedy" else 0
        earlier = ((costs.owner >= first) & (costs.owner < start)).nonzero().flatten()
        cost, known = _reduce_to_examples(costs.cost[here][:, earlier], example[earlier])
        pairs = match_greedily(cost) if matching == "greedy" else match_optimally(cost)
        how_sure = compute_certainty(cost, pairs, usual)
        for (row, column), certain in zip(pairs, how_sure.tolist(), strict=True):
            if certain < min_certainty:
                doubtful += 1
                continue
            example[here[row]] = known[column]
            sure[here[row]] = certain
    return example, sure, doubtful


def _reduce_to_examples(cost: Tensor, example: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum of costs (N, M) over each example's places, (N, E), and the examples' ascending numbers, (E,)."""
    known, at = torch.unique(example, return_inverse=True)
    minimum = torch.full((len(cost), len(known)), IMPOSSIBLE_COST)
    return minimum.scatter_reduce(1, at.expand(len(cost), -1), cost, "amin"), known


def _vote_labels(labels: Tensor, example: Tensor) -> Tensor:
    """Return each example's most frequent label, the smaller one of equals, (examples,). labels, example: of each place, (P,)."""
    votes = torch.zeros(int(example.max()) + 1, int(labels.max()) + 1, dtype=torch.int64)
    return votes.index_put_((example, labels), torch.ones_like(labels), accumulate=True).argmax(dim=1)


def _write_notes(
    rounds: Sequence[RoundDescription], passes: Passes, batch_size: int, places: Sequence[Tensor], doubtful: int
) -> tuple[str, ...]:
    """Return remarks on the observations, as texts: rounds left out, gaps, batch sizes, passes, and pairs that were not linked.

    passes: the client's. places: for each observation, the number of the example at each place, as in `Links`.
    doubtful: number of pairs that were too uncertain to be linked.
    """
    notes = [
        f"round {description.round}: {description.problem}; its examples are not linked"
        for description in rounds
        if description.problem
    ]
    notes += [
        f"round {description.round}: neither features nor images are known; its examples are not linked"
        for description in rounds
        if not (description.problem or description.usable)
    ]
    notes += describe_gaps([description.round for description in rounds])
    notes += _describe_batches(rounds, batch_size)
    bounds = [*passes.starts, len(rounds)]
    for number, (start, stop) in enumerate(pairwise(bounds), start=1):
        notes.append(_describe_pass(rounds, places, number, start, stop, passes.examples))
    if len(passes.starts) == 1:
        notes.append("no second pass over the examples was found, so no rounds are linked")
    if doubtful:
        notes.append(f"{doubtful} {'pair was' if doubtful == 1 else 'pairs were'} too uncertain to be linked")
    return tuple(notes)


def _describe_pass(
    rounds: Sequence[RoundDescription], places: Sequence[Tensor], number: int, start: int, stop: int, batch_size: int | None
) -> str:
    first, last = rounds[start].round, rounds[stop - 1].round
    here = torch.cat(list(places[start:stop]))
    where = f"round {first}" if first == last else f"rounds {first} to {last}"
    text = f"pass {number}: {where}, {len(here)} {'example' if len(here) == 1 else 'examples'}"
    if batch_size is not None and len(here) < batch_size:
        text += f" of {batch_size}, so it is probably incomplete"
    if start:
        text += f", {int(torch.isin(here, torch.cat(list(places[:start]))).sum())} linked to earlier ones"
    return text


def describe_gaps(numbers: Sequence[int]) -> list[str]:
    """Return a list with one remark on the intervals between a client's rounds that are longer than the median; empty if none is.

    numbers: the client's rounds, ascending. Of two medians the smaller one counts.
    """
    steps = [b - a for a, b in pairwise(numbers)]
    if not steps or len(set(steps)) == 1:
        return []
    usual = sorted(steps)[(len(steps) - 1) // 2]
    wide = [(a, b) for a, b in pairwise(numbers) if b - a > usual]
    if not wide:
        return []
    shown = ", ".join(f"{a} and {b}" for a, b in wide[:3]) + (f" and {len(wide) - 3} more" if len(wide) > 3 else "")
    return [f"there is no usable round of this client between rounds {shown}; examples that it used there are not known"]


def _describe_batches(rounds: Sequence[RoundDescription], batch_size: int) -> list[str]:
    """Return a list with one remark on the rounds whose number of examples is not the client's most common one; else empty.

    batch_size: the batch size that the server prescribes, which the remark names.
    """
    sizes = [len(description.labels) for description in rounds]
    usual = max(set(sizes), key=lambda size: (sizes.count(size), size))
    other = [description for description in rounds if len(description.labels) != usual]
    if not other:
        return []
    shown = ", ".join(f"{len(description.labels)} in round {description.round}" for description in other[:3]) + (
        f" and {len(other) - 3} more" if len(other) > 3 else ""
    )
    examples = "example" if usual == 1 else "examples"
    return [f"{usual} {examples} in most rounds, {shown} (batches of {batch_size} were prescribed)"]
