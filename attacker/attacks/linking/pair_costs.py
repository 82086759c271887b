"""The input of linking: descriptions of observations, and pairwise costs between their examples."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.linking.matching import (
    IMPOSSIBLE_COST,
    Filter,
    cosine_distances,
    is_possible_pair,
    make_comparable,
    pool,
    squared_distances,
)

SAMPLED_EXAMPLES = 400
"""Largest number of examples from which the cost of different pairs is estimated."""


class RoundDescription(NamedTuple):
    """The description of one observation of a client.

    round:     number of the round, 1-based. labels: inferred labels (N,), int64, of the N examples of the update.
    features:  (N, F) inputs of the network's last layer for each example, from `solve_head_features`, or None.
    reference: (P, F) features of the attacker's own inputs at the weights of this round, or None.
    images:    (N, *shape) in [0, 1], reconstructed from this observation alone, or None.
    problem:   reason why the observation cannot be compared, as text after "round 3: "; "" if it can.
    Features and images must be finite, unless a problem is stated.
    """

    round: int
    labels: Tensor
    features: Tensor | None = None
    reference: Tensor | None = None
    images: Tensor | None = None
    problem: str = ""

    @property
    def usable(self) -> bool:
        """Whether the examples can be compared with others: no problem is stated, and features or images are given."""
        return not self.problem and (self.features is not None or self.images is not None)


class PairCosts(NamedTuple):
    """Pairwise costs between the P places of all observations. A place is the position of one example in one observation.

    cost:      (P, P) float32, symmetric; low if two examples are similar, IMPOSSIBLE_COST (infinity) if they cannot be linked.
    owner:     (P,) int64, index of the observation of each place.
    different: costs, ascending, of a sample of pairs that are taken to be different examples, since their labels differ or they
               are in one observation.
    """

    cost: Tensor
    owner: Tensor
    different: Tensor


def compute_pair_costs(rounds: Sequence[RoundDescription], *, rule: Filter) -> PairCosts:
    """Return the costs between all pairs of places (positions in observations), at least 0 and low for similar examples.

    The cost of features is 1 - cosine, after `make_comparable`. The cost of images is their mean squared difference, after
    averages over squares of 2x2 pixels. Each of these two costs is divided by its median over pairs of different examples.
    Features are compared if all usable observations have features, and images if all have images; if both are compared, the two
    costs are averaged. The cost is infinite for pairs within one observation, for pairs with an observation that is not usable,
    and for pairs that `rule` excludes.
    rule: "own" allows only pairs with equal labels, "lists" all pairs of two observations that have a label in common, "none"
          (no filter) all pairs.
    Raises ValueError if neither features nor images are given for all usable observations, if rounds are not ascending, or if
    sizes or values are invalid.
    """
    _check_rounds(rounds)
    owner = torch.repeat_interleave(torch.arange(len(rounds)), torch.tensor([len(description.labels) for description in rounds]))
    labels = torch.cat([description.labels for description in rounds])
    usable = [description for description in rounds if description.usable]
    places = torch.tensor([description.usable for description in rounds])[owner].nonzero().flatten()
    cost = torch.full((len(owner), len(owner)), IMPOSSIBLE_COST)
    if not usable:
        return PairCosts(cost, owner, torch.empty(0))
    different = (labels[places][:, None] != labels[places][None]) | (owner[places][:, None] == owner[places][None])
    costs = [part / _estimate_typical_cost(part, different) for part in _compute_costs(usable)]
    total = torch.stack(costs).mean(dim=0) if len(costs) > 1 else costs[0]
    owners = owner[places]
    possible = is_possible_pair(labels[places], labels[places], rule, (owners, owners)) & (owners[:, None] != owners[None])
    cost[places[:, None], places[None]] = total.where(possible, IMPOSSIBLE_COST)
    return PairCosts(cost, owner, _sample_costs(total, different))


def _compute_costs(usable: Sequence[RoundDescription]) -> list[Tensor]:
    parts = []
    features = [description.features for description in usable if description.features is not None]
    if len(features) == len(usable):
        all_features = torch.cat(make_comparable(features, [description.reference for description in usable]))
        parts.append(cosine_distances(all_features, all_features).clamp(min=0).float())
    images = [description.images for description in usable if description.images is not None]
    if len(images) == len(usable):
        small = pool(torch.cat(images).clamp(0, 1))
        parts.append(squared_distances(small, small).float())
    if not parts:
        raise ValueError("some observations have only features and some only images; give features for all, or images for all")
    return parts


def _estimate_typical_cost(cost: Tensor, different: Tensor) -> Tensor:
    sample = _sample_costs(cost, different)
    return sample.median().clamp(min=1e-12) if len(sample) else torch.ones(())


def _sample_costs(cost: Tensor, different: Tensor) -> Tensor:
    """Return, in ascending order, the costs of a sample of the pairs in the mask `different`.

    cost: (N, N). different: (N, N), the pairs with different labels and those within one observation. Pairs of an example with
    itself are left out. The sample consists of the pairs of at most SAMPLED_EXAMPLES examples.
    """
    at = torch.linspace(0, len(cost) - 1, min(SAMPLED_EXAMPLES, len(cost))).long()
    apart = different[at][:, at] & ~torch.eye(len(at), dtype=torch.bool)
    chosen: Tensor = cost[at][:, at][apart].sort().values
    return chosen


def _check_rounds(rounds: Sequence[RoundDescription]) -> None:
    for before, after in pairwise(rounds):
        if after.round <= before.round:
            raise ValueError(
                f"observations of one client must be sorted by round, each round once, but round {before.round} precedes round "
                f"{after.round}"
            )
    for description in rounds:
        for name, values in (("features", description.features), ("images", description.images)):
            if values is None or description.problem:
                continue
            if len(values) != len(description.labels):
                raise ValueError(
                    f"round {description.round} must have as many {name} as labels, got {len(values)} {name} and "
                    f"{len(description.labels)} labels"
                )
            if not bool(values.isfinite().all()):
                raise ValueError(
                    f"{name} of round {description.round} contain NaN or infinite values; set RoundDescription.problem of this "
                    "round to a text that says so, and it is not compared"
                )
