"""Tests of the directions of a batch's other examples, given some that are known."""

import pytest
import torch
from torch import Generator, Tensor

from attacker.attacks.closed_form.linear.known_examples import find_remaining
from attacker.attacks.closed_form.linear.low_rank import Factors, factorise
from attacker.attacks.closed_form.linear.sparse import Directions

EXAMPLES, FEATURES, NEURONS = 10, 24, 240


class Batch:
    """Known vectors [x, 1] (N, F + 1) of a batch, [W, b] of a layer with ReLU, and the factorised gradient at its weights."""

    def __init__(self) -> None:
        rng = Generator().manual_seed(0)
        x = torch.rand(EXAMPLES, FEATURES, generator=rng, dtype=torch.float64)
        self.x = torch.cat([x, torch.ones(EXAMPLES, 1).double()], dim=1)
        self.weight = torch.randn(NEURONS, FEATURES + 1, generator=rng, dtype=torch.float64)
        self.d = torch.randn(EXAMPLES, NEURONS, generator=rng, dtype=torch.float64) * (self.x @ self.weight.T > 0)
        factors = factorise((self.d.T @ self.x).float(), EXAMPLES)
        assert factors is not None
        self.factors: Factors = factors
        self.forward, self.constant = self.weight @ self.factors.basis.T, self.factors.basis[:, -1]

    def locate(self, vectors: Tensor) -> Tensor:
        return vectors @ self.factors.basis.T


def measure_distance(found: Directions, batch: Batch) -> float:
    """Return the largest distance of a true example to the nearest one that the directions give, both with a last entry of 1."""
    vectors = torch.linalg.inv(found.q) @ batch.factors.basis
    return float(torch.cdist(batch.x, vectors / vectors[:, -1:]).amin(dim=1).max())


@pytest.mark.parametrize("count", [1, 4, EXAMPLES])
def test_what_is_left_is_the_gradient_of_the_other_examples(count: int) -> None:
    """The search is an oracle that knows the other examples; a mixture of two examples among the known ones is ignored."""
    batch, met = Batch(), list[int]()

    def find(factors: Factors, forward: Tensor, constant: Tensor) -> Directions:
        met.append(factors.rank)
        rest = batch.d[count:].T @ batch.x[count:]
        torch.testing.assert_close(factors.coordinates @ factors.basis, rest, rtol=0, atol=1e-4)
        torch.testing.assert_close(constant, factors.basis[:, -1])
        torch.testing.assert_close(forward, batch.weight @ factors.basis.T)
        q = torch.linalg.inv(batch.x[count:] @ factors.basis.T)
        return Directions(q, torch.ones(len(q)), 7)

    known = batch.locate(torch.cat([batch.x[:count] * 3, batch.x[-2:].mean(dim=0, keepdim=True)]))
    known = known[:count] if count == EXAMPLES else known
    found = find_remaining(batch.factors, known, batch.forward, batch.constant, find)
    assert met == ([EXAMPLES - count] if count < EXAMPLES else [])
    assert float(found.agreement.min()) > 0.99
    assert measure_distance(found, batch) < 1e-4


def test_without_known_examples_or_other_directions_nothing_is_found() -> None:
    batch = Batch()
    fail = pytest.fail
    mixed = batch.locate(batch.x[-2:].mean(dim=0, keepdim=True))
    for known in (mixed, mixed[:0]):
        assert find_remaining(batch.factors, known, batch.forward, batch.constant, lambda *_: fail("nothing is known")) is None
    assert find_remaining(batch.factors, batch.locate(batch.x[:2]), batch.forward, batch.constant, lambda *_: None) is None
