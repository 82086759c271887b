"""Tests that the cosine for large gradients and its derivative equal the plain ones, for any memory layout."""

import pytest
import torch
from torch import Tensor

from attacker.attacks.gradients.convolutions import to_channels_last
from attacker.attacks.gradients.products import compute_products
from attacker.attacks.matching.objectives import cosine

SHAPES = {"a": (4, 3, 3, 2), "b": (5,), "c": (2, 6)}


def draw(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng, dtype=torch.double) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("of_simulated", [to_channels_last, torch.Tensor.contiguous])
@pytest.mark.parametrize("of_observed", [to_channels_last, torch.Tensor.contiguous])
def test_cosine_for_large_gradients_agrees_with_the_plain_one(of_simulated, of_observed) -> None:
    simulated = {name: of_simulated(t).requires_grad_() for name, t in draw(0).items()}
    observed = {name: of_observed(t) for name, t in draw(1).items()}
    assert cosine.of_large is not None
    both = [distance(simulated, observed) for distance in (cosine, cosine.of_large)]
    assert torch.allclose(*both, rtol=1e-12)
    assert abs(both[0].item() - 1) > 1e-3  # they are not orthogonal, so that a wrong sign would change the value
    slopes = [torch.autograd.grad(one, list(simulated.values())) for one in both]
    assert all(torch.allclose(*pair, rtol=1e-12) for pair in zip(*slopes, strict=True))


def test_parameters_that_were_not_observed_are_left_out() -> None:
    simulated, observed = draw(0), draw(1)
    del observed["b"]
    dot, own, theirs = compute_products(simulated, observed)
    assert torch.allclose(dot, sum((simulated[n] * observed[n]).sum() for n in observed))
    assert torch.allclose(own, sum(simulated[n].square().sum() for n in observed))
    assert torch.allclose(theirs, sum(o.square().sum() for o in observed.values()))
    assert torch.allclose(cosine.of_large(simulated, observed), cosine(simulated, observed))


def test_gradient_of_zeros_has_distance_one() -> None:
    zeros = {name: torch.zeros_like(t) for name, t in draw(0).items()}
    assert float(cosine.of_large(zeros, draw(1))) == 1.0
