"""Tests of lone rows: rows of an update that belong to a single example, by parallel rows or by 8-bit values."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.multi_round.spans.intersections import find_holders
from attacker.attacks.multi_round.spans.relu_zeros import find_eight_bit_rows, find_lone_rows, find_parallel_rows
from attacker.attacks.multi_round.spans.row_space import RowSpace, compute_row_space

VALUES = 64
LOW, HIGH = torch.full((VALUES,), -1.0, dtype=torch.float64), torch.full((VALUES,), 3.0, dtype=torch.float64)
"""Inputs of an example of all zeros and of one of all ones: the data has mean 0.25 and standard deviation 0.25."""


@pytest.fixture
def images() -> Tensor:
    """Three 8-bit images (3, 64) on the scale [0, 1]."""
    return torch.randint(0, 256, (3, VALUES), generator=torch.Generator().manual_seed(3)).double() / 255


def make_space(images: Tensor, shares: Tensor, most: int | None = None) -> RowSpace:
    """Return the row space of an update with the rows shares (neurons, images) @ [x, 1], x being normalised images."""
    x = torch.cat([LOW + images * (HIGH - LOW), torch.ones(len(images), 1, dtype=torch.float64)], dim=1)
    rows = shares.double() @ x
    return compute_row_space(rows, 1e-7 * rows.norm(dim=1), most, torch.Generator().manual_seed(0))


def recover(vectors: Tensor) -> Tensor:
    """Return the images (n, 64) on the scale [0, 1] of multiples of [x, 1]."""
    return (vectors[:, :-1] / vectors[:, -1:] - LOW) / (HIGH - LOW)


def test_row_of_one_image_is_known_by_its_eight_bit_values(images: Tensor) -> None:
    space = make_space(images, torch.tensor([[-0.5, 0, 0], [0.3, 0.7, 0], [0.2, -0.6, 0.4], [0, 0.5, 0.5]]), most=3)
    found = recover(find_eight_bit_rows(space, LOW, HIGH))
    torch.testing.assert_close(found, images[:1], atol=1e-4, rtol=0)
    assert len(find_parallel_rows(space)) == 0


def test_parallel_mixtures_are_left_out_if_parallel_rows_are_no_evidence(images: Tensor) -> None:
    mixed = make_space(images, torch.tensor([[0.3, 0.7, 0], [0.6, 1.4, 0], [0, 0.5, 0.4], [1, 0, 0]]), most=3)
    with_mixture = recover(find_lone_rows(mixed, LOW, HIGH, parallel=True)[0])
    torch.testing.assert_close(with_mixture, torch.stack([0.3 * images[0] + 0.7 * images[1], images[0]]), atol=1e-4, rtol=0)
    torch.testing.assert_close(recover(find_lone_rows(mixed, LOW, HIGH, parallel=False)[0]), images[:1], atol=1e-4, rtol=0)


def test_saturated_space_holds_only_examples_with_a_row_of_their_own(images: Tensor) -> None:
    space = make_space(images, torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5]]))
    assert space.saturated
    x = torch.cat([LOW + images * (HIGH - LOW), torch.ones(len(images), 1, dtype=torch.float64)], dim=1)
    assert find_holders(1e6 * torch.stack([x[0], x[1] + x[2], x[1]]), [space]) == ((0,), (0,), ())
    assert len(find_parallel_rows(space)) == 0
