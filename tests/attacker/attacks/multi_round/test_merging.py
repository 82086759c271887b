"""Tests of merging: candidates of the same example from unlinked rounds become one, others stay separate."""

import pytest
import torch
from observations import observe_rounds
from reconstructions import make_reconstruction
from torch import Tensor

from attacker.attacks.multi_round.merging import MAX_CANDIDATES, group_candidates, merge
from attacker.attacks.papers.agic import agic
from attacker.reconstruction import Reconstruction, Slot
from fedsim.recording import DataSpec, ModelSpec

LABELS = torch.tensor([0, 0, 1, 1])


def four(seed: int = 0) -> Tensor:
    return torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def answer(x: Tensor, y: Tensor, rounds: list[int], confidence: Tensor | None = None) -> Reconstruction:
    """Return a reconstruction with one example for each slot of the rounds."""
    slots = tuple(Slot(number, "c", 1, i, i) for i, number in enumerate(rounds))
    confidence = torch.ones(len(x)) if confidence is None else confidence
    return make_reconstruction("k", x, y, confidence=confidence, slots=slots, loss=torch.ones(3))


def two_passes(noise: float) -> tuple[Tensor, Tensor, list[int]]:
    """Return candidates of four examples in two passes of two rounds each; the second pass has another order, and noise."""
    x, order = four(), [2, 0, 3, 1]
    second = x[order] + noise * torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return torch.cat([x, second]), torch.cat([LABELS, LABELS[order]]), [1, 1, 2, 2, 3, 3, 4, 4]


EQUAL_MISFITS = dict.fromkeys(range(1, 9), 0.1)


def test_example_of_several_rounds_is_returned_once_with_all_places() -> None:
    x, y, rounds = two_passes(0.05)
    found = merge(answer(x, y, rounds), EQUAL_MISFITS)
    assert torch.equal(found.x, x[:4])
    assert torch.equal(found.y, LABELS)
    assert [(slot.round, slot.example) for slot in found.slots] == [
        *((1, 0), (1, 1), (2, 2), (2, 3)),
        *((3, 2), (3, 0), (4, 3), (4, 1)),
    ]
    assert found.notes == ("4 of 8 candidates were merged with others of other rounds, by their images",)
    assert len(found.loss) == 3


def test_most_certain_candidate_is_kept_and_ties_go_to_the_smaller_misfit() -> None:
    x, y, rounds = two_passes(0.05)
    sure = torch.tensor([0.5, 0.9, 0.9, 0.9, 0.2, 0.8, 0.2, 0.2])
    found = merge(answer(x, y, rounds, sure), EQUAL_MISFITS)
    assert torch.equal(found.x[0], x[5])
    assert found.confidence.tolist() == pytest.approx([0.8, 0.9, 0.9, 0.9])
    explained = merge(answer(x, y, rounds), {1: 0.5, 2: 0.1, 3: 0.01, 4: 0.7})
    assert torch.equal(explained.x, torch.cat([x[5:6], x[1:2], x[4:5], x[3:4]]))
    undecided = merge(answer(x, y, rounds, torch.full((8,), torch.nan)), EQUAL_MISFITS)
    assert torch.equal(undecided.x, x[:4])


def test_candidates_of_one_round_or_of_other_labels_are_not_merged() -> None:
    x = four()
    alike = torch.cat([x, x])
    assert len(merge(answer(alike, torch.arange(8), [1, 1, 2, 2, 3, 3, 4, 4]), EQUAL_MISFITS).x) == 8
    same_round = merge(answer(x[[0, 0, 1, 1]], torch.zeros(4, dtype=torch.int64), [1, 1, 2, 2]), EQUAL_MISFITS)
    assert len(same_round.x) == 4


def test_different_examples_are_not_merged() -> None:
    x = torch.cat([four(0), four(1)])
    found = answer(x, torch.cat([LABELS, LABELS]), [1, 1, 2, 2, 3, 3, 4, 4])
    assert merge(found, EQUAL_MISFITS) is found


@pytest.mark.parametrize("size", [1, MAX_CANDIDATES + 1])
def test_one_candidate_or_too_many_are_left_unchanged(size: int) -> None:
    found = answer(torch.zeros(size, 1, 2, 2), torch.zeros(size, dtype=torch.int64), list(range(size)))
    assert merge(found, dict.fromkeys(range(size), 0.0)) is found


def test_nothing_is_merged_without_pairs_known_to_differ() -> None:
    x = torch.rand(3, 1, 8, 8)
    assert group_candidates(x, torch.zeros(3), [{1}, {2}, {3}], same=0.5) == [[0], [1], [2]]


def test_nan_candidate_is_not_merged() -> None:
    x, y, rounds = two_passes(0.0)
    x = torch.cat([x[:7], torch.full_like(x[:1], torch.nan)])
    assert len(merge(answer(x, y, rounds), EQUAL_MISFITS).x) == 5


def test_attack_without_links_merges_its_candidates() -> None:
    """With batches of two and three passes, a search without links returns twelve candidates of four examples."""
    data, x = DataSpec(shape=(1, 8, 8), num_classes=4), four()
    order = ((0, 2), (1, 3), (1, 2), (0, 3), (0, 2), (1, 3))
    rounds = [[(x[list(rows)], LABELS[list(rows)])] for rows in order]
    case = observe_rounds(rounds, model=ModelSpec(name="lenet_dlg"), data=data, learning_rate=0.01)
    attack = agic(compare="none", distance="euclidean", optimiser="wolfe", steps=50, tv=0.0)
    (found,) = attack([case], rng=torch.Generator().manual_seed(0))
    assert len(found.x) < 8
    assert len(found.slots) == 12
    for number in range(1, 7):
        assert len({slot.example for slot in found.slots if slot.round == number}) == 2
    errors = (found.x.clamp(0, 1)[:, None] - x[None]).flatten(2).square().mean(dim=2)
    assert (errors.min(dim=0).values < 0.009).sum() >= 3
    (null,) = attack.null()([case], rng=torch.Generator().manual_seed(0))
    assert len(null.x) == 12
