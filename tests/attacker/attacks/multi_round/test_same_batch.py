"""Tests of the recovery of whole batches that several rounds share, by the zeros of ReLU in all of their updates."""

import pytest
import torch
from generators import seeded
from test_spans import make_client

from attacker.attacks import Case, spans
from attacker.attacks.multi_round.spans.row_space import RowSpace
from attacker.attacks.multi_round.spans.same_batch import group_same_batches
from fedsim.recording import ModelSpec

WIDE = ModelSpec(name="mlp", arguments={"hidden": [256]})
SAME = (tuple(range(16)),) * 3
"""Three rounds of the same 16 examples, more than parallel rows separate."""


def find_nearest(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the distance (N,) of each example of x to the nearest one found, relative to its norm."""
    return torch.cdist(x.flatten(1).double(), found.flatten(1).double()).amin(dim=1) / x.flatten(1).norm(dim=1)


def test_whole_batch_of_several_rounds_is_recovered_and_certified() -> None:
    case, x, y = make_client(SAME, 16, WIDE)
    (found,) = spans()([case], rng=seeded())
    assert len(found.x) == 16
    assert float(find_nearest(found.x, x).max()) < 1e-4
    assert bool((found.confidence > 0.9).all())
    order = torch.cdist(x.flatten(1), found.x.flatten(1)).argmin(dim=1)
    assert found.y[order].tolist() == y.tolist()


def test_without_zeros_of_relu_equal_row_spaces_separate_nothing() -> None:
    case, _, _ = make_client(SAME, 16, WIDE)
    with pytest.raises(ValueError, match="no example could be recovered"):
        spans(relu=False)([case], rng=seeded())
    with pytest.raises(ValueError, match="no example could be recovered"):
        spans()([Case(case.observations[:1])], rng=seeded())


def test_examples_of_noisy_rounds_are_not_certified_unless_exact() -> None:
    case, x, _ = make_client(SAME, 16, WIDE, defense="gaussian(snr_db=30)")
    try:
        (found,) = spans()([case], rng=seeded())
    except ValueError:
        return
    sure = found.confidence > 0.9
    assert not bool(sure.any()) or float(find_nearest(x, found.x[sure]).max()) < 1e-3


def test_rounds_are_grouped_only_if_their_row_spaces_are_equal() -> None:
    def make_space(rank: int) -> RowSpace:
        return RowSpace(torch.eye(rank, 9), torch.zeros(4, rank), torch.ones(4), 2.0, saturated=False)

    spaces = [make_space(3), make_space(3), make_space(3), make_space(2)]
    shared = torch.tensor([[3, 3, 2, 2], [3, 3, 2, 2], [2, 2, 3, 0], [2, 2, 0, 2]])
    assert group_same_batches(spaces, shared, range(4)) == [[0, 1]]
    assert group_same_batches(spaces, shared, (0, 2, 3)) == []
