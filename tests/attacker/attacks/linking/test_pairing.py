"""Tests of pair costs and matching, with values by hand and by enumeration."""

from itertools import permutations

import pytest
import torch

from attacker.attacks.linking.matching import (
    IMPOSSIBLE_COST,
    compute_certainty,
    cosine_distances,
    is_possible_pair,
    make_comparable,
    match_greedily,
    match_optimally,
    pool,
    squared_distances,
)

GREEDY_IS_WORSE = torch.tensor([[0.10, 0.20], [0.15, 0.90]])
"""Costs of which taking the cheapest pair first leaves the most expensive one for the rest."""


def test_greedy_matching_takes_the_cheapest_pair_first() -> None:
    assert match_greedily(GREEDY_IS_WORSE) == [(0, 0), (1, 1)]


def test_optimal_matching_has_the_lowest_total_cost() -> None:
    assert match_optimally(GREEDY_IS_WORSE) == [(0, 1), (1, 0)]
    cost = torch.rand(5, 5, generator=torch.Generator().manual_seed(3))
    best = min(permutations(range(5)), key=lambda p: sum(float(cost[i, j]) for i, j in enumerate(p)))
    assert match_optimally(cost) == list(enumerate(best))


@pytest.mark.parametrize("pair_up", [match_greedily, match_optimally])
def test_impossible_pairs_are_never_made(pair_up) -> None:
    cost = torch.tensor([[IMPOSSIBLE_COST, IMPOSSIBLE_COST], [0.5, IMPOSSIBLE_COST]])
    assert pair_up(cost) == [(1, 0)]
    assert pair_up(torch.full((2, 3), IMPOSSIBLE_COST)) == []
    assert pair_up(torch.empty(0, 3)) == []


def test_optimal_matching_makes_as_many_pairs_as_possible() -> None:
    assert match_optimally(torch.tensor([[0.0, 5.0], [5.0, IMPOSSIBLE_COST]])) == [(0, 1), (1, 0)]


def test_certainty_is_the_margin_to_the_next_best_pair() -> None:
    cost = torch.tensor([[0.2, 0.8, IMPOSSIBLE_COST], [0.4, 0.3, IMPOSSIBLE_COST], [IMPOSSIBLE_COST, IMPOSSIBLE_COST, 0.5]])
    assert compute_certainty(cost, [(0, 0), (1, 1), (2, 2)], usual=1.0).tolist() == pytest.approx([0.5, 0.25, 0.5])
    assert compute_certainty(cost, [(0, 1)], usual=1.0).tolist() == [0.0]


def test_only_pairs_of_equal_labels_or_common_label_lists_are_possible() -> None:
    a, b = torch.tensor([0, 1]), torch.tensor([1, 2, 0])
    owners = torch.tensor([0, 1]), torch.tensor([0, 0, 1])
    assert is_possible_pair(a, b, "own").tolist() == [[False, False, True], [True, False, False]]
    assert is_possible_pair(a, b, "lists", owners).tolist() == [[False, False, True], [True, True, False]]
    assert is_possible_pair(a, b, "none").all()
    with pytest.raises(ValueError, match="owners"):
        is_possible_pair(a, b, "lists")


def test_pooling_averages_blocks_of_images_and_keeps_rows() -> None:
    image = torch.arange(16.0).reshape(1, 1, 4, 4)
    assert pool(image).flatten().tolist() == [2.5, 4.5, 10.5, 12.5]
    assert pool(torch.ones(2, 5)).shape == (2, 5)


def test_distances_by_hand() -> None:
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert squared_distances(a, b).flatten().tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert cosine_distances(a, b).flatten().tolist() == pytest.approx([0.0, 1.0, 2.0])


def test_few_examples_in_many_dimensions_are_matched() -> None:
    rng = torch.Generator().manual_seed(0)
    examples = torch.randn(8, 256, generator=rng)
    found = make_comparable(
        [one[None] + 0.3 * torch.randn(1, 256, generator=rng) for one in (*examples, *examples.flip(0))], [None] * 16
    )
    cost = cosine_distances(torch.cat(found[:8]), torch.cat(found[8:]))
    assert match_optimally(cost) == [(i, 7 - i) for i in range(8)]
    assert cost.flip(1).diagonal().max() < 0.5 * cost.median()


def test_features_are_matched_after_shifts_and_scalings() -> None:
    rng = torch.Generator().manual_seed(0)
    examples, inputs = torch.randn(40, 8, generator=rng), torch.randn(200, 8, generator=rng)
    scales = torch.tensor([9.0, 3.0, 1.0, 1.0, 1.0, 0.3, 0.3, 0.1])
    before = [examples + 50]
    after = [(examples * scales - 20)[torch.arange(39, -1, -1)]]
    plain = cosine_distances(before[0], after[0])
    apart = cosine_distances(*make_comparable(before + after, [inputs + 50, inputs * scales - 20], towards_plain=0.1))
    right = [(i, 39 - i) for i in range(40)]
    assert match_optimally(apart) == right
    assert match_optimally(plain) != right
