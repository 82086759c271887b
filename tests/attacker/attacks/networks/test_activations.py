"""Tests that activations, their inverses and derivatives agree with PyTorch."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attacker.attacks.networks.activations import IDENTITY, RELU, SIGMOID, TANH, Activation, leaky_relu

Z = torch.tensor([-9.0, -2.5, -1.0, -0.3, -1e-6, 1e-6, 0.2, 1.0, 3.0, 8.0], dtype=torch.float64)[None]
TORCHS = [
    (IDENTITY, lambda z: z),
    (RELU, functional.relu),
    (SIGMOID, torch.sigmoid),
    (TANH, torch.tanh),
    (leaky_relu(0.2), lambda z: functional.leaky_relu(z, 0.2)),
    (leaky_relu(3.0), lambda z: functional.leaky_relu(z, 3.0)),
]
NAMES = [activation.name for activation, _ in TORCHS]
Torch = tuple[Activation, object]


@pytest.mark.parametrize(("activation", "torchs"), TORCHS, ids=NAMES)
def test_values_and_slopes_agree_with_torch(activation: Activation, torchs: object) -> None:
    z = Z.clone().requires_grad_()
    f = torchs(z)
    (slope,) = torch.autograd.grad(f.sum(), z)
    assert torch.allclose(activation.forward(Z), f, rtol=1e-15)
    assert torch.allclose(activation.slope(f.detach()), slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("activation", "torchs"), TORCHS, ids=NAMES)
def test_inverse_is_exact_where_it_is_known(activation: Activation, torchs: object) -> None:
    f = activation.forward(Z)
    known = activation.known(f).bool()
    assert torch.allclose(activation.inverse(f)[known], Z[known], rtol=1e-7, atol=0)
    assert known.all() or activation is RELU


def test_inverse_of_a_relu_is_known_only_above_zero() -> None:
    f = torch.tensor([[0.0, 2.0, 0.0, 1e-3]])
    assert RELU.known(f).tolist() == RELU.slope(f).tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize(("activation", "torchs"), TORCHS, ids=NAMES)
def test_outputs_lie_within_the_stated_bounds(activation: Activation, torchs: object) -> None:
    f = activation.forward(torch.linspace(-60, 60, 1001, dtype=torch.float64))
    low, high = activation.bounds
    assert low <= f.min()
    assert f.max() <= high
    assert math.isinf(low) or f.min() == pytest.approx(low, abs=1e-6)
    assert math.isinf(high) or f.max() == pytest.approx(high, abs=1e-6)


@pytest.mark.parametrize("activation", [SIGMOID, TANH], ids=["sigmoid", "tanh"])
@pytest.mark.parametrize("beyond", [0.0, 1e-9, 0.3])
def test_values_beyond_a_bound_are_treated_as_the_bound(activation: Activation, beyond: float) -> None:
    low, high = activation.bounds
    f = torch.tensor([[low - beyond, high + beyond]], dtype=torch.float64)
    z, slope = activation.inverse(f), activation.slope(f)
    assert torch.isfinite(z).all()
    assert (slope > 0).all()
    assert z[0, 0] == pytest.approx(-z[0, 1].item(), rel=1e-3)
    assert z[0, 1] > 10
    assert (slope < 1e-10).all()


@pytest.mark.parametrize("activation", [RELU, leaky_relu(0.2)], ids=["relu", "leaky"])
def test_piecewise_linear_activations_are_not_smooth(activation: Activation) -> None:
    assert not activation.smooth
    assert SIGMOID.smooth
    assert TANH.smooth
    assert IDENTITY.smooth


def test_inverse_of_nan_is_nan() -> None:
    f = torch.tensor([[float("nan")]])
    for activation in (IDENTITY, SIGMOID, TANH, leaky_relu(0.2)):
        z: Tensor = activation.inverse(f)
        assert z.isnan().all()
