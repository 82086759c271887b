"""Tests of the implementation of SRATTA that the benchmark of secure sums compares with."""

import torch
from support.rounds.sratta import explain_rows, join_groups, recover_examples
from torch import Tensor


def draw_images(count: int) -> Tensor:
    return torch.randint(256, (count, 40), generator=torch.Generator().manual_seed(0)).double() / 255


def join(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight, bias[:, None]], dim=1)


def test_quotient_of_a_row_is_recovered_if_it_is_a_stored_image() -> None:
    x = draw_images(3)
    share = torch.tensor([[0.3, 0, 0], [-0.2, 0, 0], [0, 0.1, 0.2], [0, 0, 1e-7]], dtype=torch.float64)
    found = recover_examples([join(share @ x, share.sum(dim=1))])
    assert torch.allclose(found, x[:1])


def test_row_of_few_known_images_is_explained_by_them() -> None:
    x = draw_images(8)
    share = torch.zeros(5, 8, dtype=torch.float64)
    share[0, [1, 4]] = torch.tensor([0.5, -0.2], dtype=torch.float64)
    share[1, 2] = 0.4  # of one image only, which links nothing
    share[2] = 0.1  # of more images than allowed
    share[3, [0, 3]] = torch.tensor([0.2, 0.3], dtype=torch.float64)
    share[4, [5, 6]] = torch.tensor([0.3, 0.3], dtype=torch.float64)
    bias = share.sum(dim=1)
    bias[3] = -bias[3]
    rows = join(share @ x, bias)
    rows[4, :-1] += draw_images(9)[8] / 10  # with an image that is not known
    assert [(neuron, sorted(used)) for neuron, used in explain_rows(rows, x)] == [(0, [1, 4])]


def test_examples_are_joined_once_those_that_moved_the_neuron_are_of_one_client() -> None:
    def pair(on: set[int], turned_on: set[int]) -> tuple[frozenset[int], frozenset[int]]:
        return frozenset(on), frozenset(turned_on)

    relations = {pair({0, 1}, {2}), pair({0}, {1}), pair({3, 2}, {4}), pair(set(), {5, 0})}
    assert join_groups(relations, 6) == [[0, 1, 2]]
