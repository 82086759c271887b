"""Tests of groups: examples of one client are linked by neurons that a local step on one of them turns on."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.multi_round.spans.client_groups import group_by_client, link_examples
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples
from attacker.attacks.multi_round.spans.row_space import RowSpace, compute_row_space
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training
from fedsim.training.local import train

DATA = DataSpec(shape=(1, 6, 6), num_classes=4)
WIDTH = 384


def join(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors["1.weight"], tensors["1.bias"][:, None]], dim=1).double()


def make_sum(rate: float) -> tuple[RowSpace, Tensor, Tensor]:
    """Return the row space of a sum of two clients of three examples, vectors of these examples in order, and [W, b] sent.

    Each client takes one step on each of its examples.
    """
    network = models.build(ModelSpec(name="mlp", arguments={"hidden": [WIDTH]}), DATA, seed=3)
    weights = {name: p.detach().double() for name, p in network.double().named_parameters()}
    x = torch.rand(6, *DATA.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(6) % 4
    training = Training(learning_rate=rate, batch_size=1, steps=3)
    own = [[(x[i][None], y[i][None]) for i in rows] for rows in ((0, 1, 2), (3, 4, 5))]
    updates = [join(train(network, weights, batches, training, DATA).update) for batches in own]
    rows = (updates[0] + updates[1]) / 2
    noise = 1e-12 * rows.norm(dim=1)
    space = compute_row_space(rows, noise, 6, torch.Generator().manual_seed(0))
    vectors = torch.cat([DATA.normalise(x).flatten(1), torch.ones(6, 1, dtype=torch.float64)], dim=1)
    return space, 1e14 * vectors, join(weights)


@pytest.fixture(scope="module")
def moved() -> tuple[RowSpace, Tensor, Tensor]:
    return make_sum(rate=1.0)


def test_links_join_examples_of_one_client_only(moved: tuple[RowSpace, Tensor, Tensor]) -> None:
    space, vectors, sent = moved
    links = link_examples(vectors, space, sent, 2)
    assert len(links) >= 3
    assert all(i // 3 == j // 3 for i, j in links)
    found = RecoveredExamples(vectors, torch.ones(6), ((0,),) * 6)
    groups = group_by_client(found, [space], [sent], [2])
    assert all(len({i // 3 for i in group}) == 1 for group in groups)
    assert sum(map(len, groups)) >= 5


def test_negated_weights_do_not_link_the_same_examples(moved: tuple[RowSpace, Tensor, Tensor]) -> None:
    space, vectors, sent = moved
    assert set(link_examples(vectors, space, -sent, 2)) != set(link_examples(vectors, space, sent, 2))


def test_nothing_is_linked_by_rows_with_examples_that_were_not_recovered(moved: tuple[RowSpace, Tensor, Tensor]) -> None:
    """Rows of all neurons hold several examples here, so that two of one client and none of the other explain few of them."""
    space, vectors, sent = moved
    links = link_examples(vectors[:2], space, sent, 2)
    assert all({i, j} == {0, 1} for i, j in links)
    assert len(links) < len(link_examples(vectors, space, sent, 2))


def test_steps_too_small_to_turn_a_neuron_on_link_nothing() -> None:
    space, vectors, sent = make_sum(rate=1e-6)
    assert link_examples(vectors, space, sent, 2) == []
