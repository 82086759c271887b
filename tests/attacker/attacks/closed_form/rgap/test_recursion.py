"""Tests of R-GAP on real networks, with gradients from PyTorch."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from generators import seed_default
from rgap_cases import ACTIVATIONS, SHAPE, Act, Seen, gradient_of, mse, seen, strided, two_convolutions
from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks.closed_form.rgap.recursion import (
    Point,
    build_equations,
    is_homogeneous,
    solve_last_layer,
    solve_layer,
    solve_layers,
)
from attacker.attacks.closed_form.rgap.system import LayerSystem
from attacker.attacks.networks.chain import read_chain


@pytest.fixture(autouse=True)
def _weights_are_drawn_from_a_seed() -> Any:
    with seed_default(3):
        yield


def with_matrices(act: Act) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 12, 3), act(), nn.Flatten(), nn.Linear(144, 20), act(), nn.Linear(20, 9), act(), nn.Linear(9, 3)
    )


def from_a_matrix(act: Act) -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(60, 64), act(), nn.Unflatten(1, (4, 4, 4)), nn.Conv2d(4, 20, 2), act()),
        *(nn.Flatten(), nn.Linear(20 * 9, 3)),
    )


def build_pooled(act: Act) -> nn.Module:
    """Return a network with overlapping average pooling of zero-padded images, which loses no information."""
    return nn.Sequential(
        *(nn.Conv2d(2, 14, 3, padding=1), nn.AvgPool2d(2, stride=1, padding=1), act()),
        *(nn.AvgPool2d((2, 1), stride=1, padding=(1, 0)), nn.Conv2d(14, 30, 3, padding=1), act(), nn.Flatten(), nn.LazyLinear(3)),
    )


NETWORKS = {
    "convolutions": two_convolutions,
    "strides": strided,
    "matrices": with_matrices,
    "a matrix first": from_a_matrix,
    "pooling": build_pooled,
}


def draw_network(make: Callable[[Act], nn.Module], activation: str, shape: tuple[int, ...] = SHAPE) -> nn.Module:
    model = make(ACTIVATIONS[activation])
    model(torch.zeros(1, *shape))
    return model


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_input_is_recovered(network: str, activation: str, rounded: bool) -> None:
    s = seen(draw_network(NETWORKS[network], activation), rounded=rounded)
    (reading,) = s.readings()
    end = s.solve(reading)
    assert mse(end.f, s.x).item() < (1e-10 if rounded else 1e-15)
    assert end.at == -1
    assert end.head.y.tolist() == s.y.tolist()
    assert len(end.residuals) == len(s.chain.layers) - 1
    assert end.residual.item() < (2e-5 if rounded else 1e-7)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["leaky", "tanh", "relu"])
def test_input_is_recovered_from_the_logistic_loss(activation: str, bias: bool, y: int, rounded: bool) -> None:
    s = seen(two_convolutions(ACTIVATIONS[activation], 1, bias=bias), loss="logistic", rounded=rounded, y=y)
    assert len(s.readings()) == (1 if bias else 4)
    end = s.best()
    assert end.head.y.item() == y
    assert mse(end.f, s.x).item() < (1e-10 if rounded else 1e-15)


@pytest.mark.parametrize("activation", ["leaky", "sigmoid", "relu"])
@pytest.mark.parametrize("outputs", [2, 10])
def test_input_is_recovered_from_cross_entropy_without_biases(outputs: int, activation: str) -> None:
    s = seen(two_convolutions(ACTIVATIONS[activation], outputs, bias=False))
    end = s.best()
    assert mse(end.f, s.x).item() < 1e-15
    assert end.head.y.item() == 1


def test_table_row_is_recovered() -> None:
    s = seen(nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3)), (7,))
    assert mse(s.best().f, s.x).item() < 1e-20


def test_activations_and_gradients_of_every_layer_are_recovered() -> None:
    s = seen(two_convolutions(nn.Tanh))
    values, x = [], s.x.clone().requires_grad_()
    inner: Tensor = x
    for module in s.model:
        inner = module(inner)
        if not isinstance(module, nn.Conv2d | nn.Flatten):
            values.append(inner)
    gradients = torch.autograd.grad(functional.cross_entropy(inner, s.y), [x, *values[:2]])
    (point,) = s.readings()
    for at, value, gradient in ((1, values[1], gradients[2]), (0, values[0], gradients[1]), (-1, x, gradients[0])):
        assert point.at == at
        assert torch.allclose(point.f.reshape(value.shape), value, atol=1e-8)
        assert torch.allclose(point.gradient.reshape(value.shape), gradient, rtol=1e-6, atol=1e-9 * gradient.abs().max())
        point = solve_layer(s.chain, s.weights, s.gradient, point) if at >= 0 else point


def test_until_stops_at_a_layer_and_the_rest_can_follow() -> None:
    s = seen(two_convolutions(nn.Tanh))
    (reading,) = s.readings()
    half = solve_layers(s.chain, s.weights, s.gradient, reading, until=0)
    assert half.at == 0
    assert torch.equal(s.solve(half).f, s.solve(reading).f)


def twins(s: Seen) -> tuple[Point, Point]:
    """Return the results of R-GAP for the true input and for its twin: a multiple with the same label and gradient."""
    ends = [s.solve(point) for point in s.readings() if bool(point.head.valid.all()) and point.head.y.item() == s.y.item()]
    first, second = sorted(ends, key=lambda end: float(mse(end.f, s.x)))
    return first, second


@pytest.mark.parametrize("activation", ["leaky", "identity", "relu"])
@pytest.mark.parametrize(("outputs", "loss"), [(1, "logistic"), (2, "cross_entropy")])
def test_a_twin_has_the_same_gradient_and_is_a_multiple(activation: str, outputs: int, loss: str) -> None:
    model = two_convolutions(ACTIVATIONS[activation], outputs, bias=False)
    s = seen(model, loss=loss)
    logits = s.model(s.x)
    margin = logits[0, 0] if outputs == 1 else logits[0, 1] - logits[0, 0]
    with torch.no_grad():
        s.model[-1].weight.mul_(0.3 / margin)  # the label is right, without much confidence
    s = seen(model, loss=loss)
    truth, twin = twins(s)
    assert is_homogeneous(s.chain)
    assert mse(truth.f, s.x).item() < 1e-15
    factor = (twin.f * s.x).sum() / s.x.square().sum()
    assert factor > 2
    assert torch.allclose(twin.f, factor * s.x, rtol=1e-6, atol=1e-6 * factor)
    weights = {name: w[0] for name, w in s.weights.items()}
    again = gradient_of(s.model, weights, twin.f[0], s.y[0], loss)
    for name, g in s.gradient.items():
        assert (again[name] - g[0]).norm() < 1e-6 * g.norm()


def test_networks_with_biases_or_smooth_activations_are_not_homogeneous() -> None:
    for activation, bias, wanted in (
        ("leaky", False, True),
        ("leaky", True, False),
        ("tanh", False, False),
        ("sigmoid", False, False),
    ):
        assert is_homogeneous(read_chain(two_convolutions(ACTIVATIONS[activation], bias=bias), SHAPE)) is wanted


@pytest.mark.parametrize("bias", [False, True])
def test_batched_weights_are_solved_like_single_ones(bias: bool) -> None:
    shapes = [two_convolutions(nn.LeakyReLU, bias=bias) for _ in range(4)]
    alone = [seen(model) for model in shapes]
    xs = torch.rand(4, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    each = [
        gradient_of(one.model, {name: w[0] for name, w in one.weights.items()}, xs[i], torch.tensor(i % 3), one.loss)
        for i, one in enumerate(alone)
    ]
    weights = {name: torch.cat([one.weights[name] for one in alone]) for name in alone[0].weights}
    gradient = {name: torch.stack([g[name] for g in each]) for name in weights}
    (reading, *others) = solve_last_layer(alone[0].chain, weights, gradient, "cross_entropy")
    assert not any(bool(other.head.valid.any()) for other in others)
    together = solve_layers(alone[0].chain, weights, gradient, reading)
    assert mse(together.f, xs).max() < 1e-15
    assert together.head.y.tolist() == [0, 1, 2, 0]
    for i in range(4):
        own = {name: w[i : i + 1] for name, w in weights.items()}, {name: g[i : i + 1] for name, g in gradient.items()}
        end = solve_layers(alone[0].chain, *own, solve_last_layer(alone[0].chain, *own, "cross_entropy")[0])
        assert torch.allclose(end.f, together.f[i : i + 1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("weights", [1, 4])
def test_several_examples_are_recovered_equally_with_a_low_memory_limit(weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = seen(strided(nn.Sigmoid), count=4)
    each = {name: w.expand(weights, *w.shape[1:]) for name, w in s.weights.items()}
    s = s._replace(weights=each)
    whole = s.solve(s.readings()[0])
    monkeypatch.setattr(sys.modules[solve_layer.__module__], "_get_memory_limit", lambda device: 1)
    one_by_one = s.solve(s.readings()[0])
    assert mse(whole.f, s.x).max() < 1e-15
    assert mse(one_by_one.f, s.x).max() < 1e-15
    assert torch.allclose(one_by_one.residual, whole.residual, rtol=1e-2, atol=1e-9)


def rank_of(s: Seen, point: Point) -> int:
    """Return the numerical rank of the equations of layer `point.at`."""
    system, _ = build_equations(s.chain, s.weights, s.gradient, point)
    return int(np.linalg.matrix_rank(dense(system)))


def dense(system: LayerSystem) -> np.ndarray:
    width = int(np.prod(system.layer.inputs))
    units = torch.eye(width, dtype=torch.float64).reshape(width, 1, *system.layer.inputs)
    rows = [system.apply(unit) for unit in units]
    return torch.stack([torch.cat([r.weights.flatten(), r.gradients.flatten()]) for r in rows], dim=1).numpy()


@pytest.mark.parametrize(("shift", "full"), [(1.0, True), (-0.15, False)])
def test_zeros_of_a_relu_remove_equations(shift: float, full: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 42, 3))
    with torch.no_grad():
        model[0].bias.fill_(shift)
        model[0].weight.mul_(0.5)
    s = seen(model)
    (reading,) = s.readings()
    dead = (s.model[:2](s.x) == 0).double().mean()
    assert dead == 0 if full else 0.3 < dead < 0.95
    assert (rank_of(s, reading) == 60) is full
    end = s.solve(reading)
    assert (mse(end.f, s.x).item() < 1e-15) is full
    assert end.residual.item() < 1e-7  # the result solves all equations, which are too few where `full` is false


def test_zeros_of_a_relu_are_recognised_after_rounding() -> None:
    s = seen(two_convolutions(nn.ReLU), rounded=True)
    (reading,) = s.readings()
    point = solve_layer(s.chain, s.weights, s.gradient, reading)
    truth = s.model[:2](s.x.float())
    assert 0.1 < (truth == 0).float().mean() < 0.9
    assert torch.equal(point.f == 0, truth == 0)


def test_saturated_values_do_not_spoil_the_result() -> None:
    model = two_convolutions(nn.Sigmoid)
    with torch.no_grad():
        model[2].weight.mul_(60)
    s = seen(model, rounded=True)
    outputs = model[:4](s.x.float())
    assert (outputs * (1 - outputs)).min() < 1e-5
    (reading,) = s.readings()
    error = mse(s.solve(reading).f, s.x).item()
    assert error < 1e-10


def test_underdetermined_input_is_the_shortest_solution() -> None:
    s = seen(nn.Sequential(nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(2 * 20, 3)))
    (reading,) = s.readings()
    system, target = build_equations(s.chain, s.weights, s.gradient, reading)
    assert rank_of(s, reading) < 60
    assert system.scale is not None
    right = target * system.scale
    values = torch.cat([right.weights.flatten(), right.gradients.flatten()]).numpy()
    wanted = torch.from_numpy(np.linalg.lstsq(dense(system), values, rcond=1e-10)[0]).reshape(1, *SHAPE)
    end = s.solve(reading)
    assert mse(end.f, wanted).item() < 1e-14
    assert mse(end.f, s.x).item() > 1e-4
    assert end.residual.item() < 1e-6  # and nothing is left unexplained


def test_features_pooled_before_the_head_are_recovered_as_means() -> None:
    s = seen(nn.Sequential(nn.Conv2d(2, 30, 3, padding=1), nn.Tanh(), nn.AvgPool2d((3, 5)), nn.Flatten(), nn.Linear(60, 3)))
    (reading,) = s.readings()
    features = s.model[:2](s.x)
    means = functional.avg_pool2d(features, (3, 5)).repeat_interleave(3, 2).repeat_interleave(5, 3)
    assert torch.allclose(reading.f, means, atol=1e-9)


def test_pooling_that_keeps_the_size_is_inverted_before_the_head() -> None:
    model = nn.Sequential(nn.Conv2d(2, 12, 3, padding=1), nn.Tanh(), nn.AvgPool2d(3, 1, 1), nn.Flatten(), nn.Linear(432, 3))
    s = seen(model, (2, 6, 6))
    (reading,) = s.readings()
    assert torch.allclose(functional.avg_pool2d(reading.f, 3, 1, 1), s.model[:3](s.x), atol=1e-9)
    assert torch.allclose(reading.f, s.model[:2](s.x), atol=1e-6)


def test_pooling_that_keeps_the_size_is_inverted_before_a_hidden_layer() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(2, 12, 3, padding=1), nn.Tanh(), nn.AvgPool2d(3, 1, 1), nn.Flatten(), nn.Linear(432, 8), nn.Tanh()),
        nn.Linear(8, 3),
    )
    s = seen(model, (2, 6, 6))
    assert mse(s.best().f, s.x).item() < 1e-12


def test_convolution_as_last_layer_is_refused() -> None:
    s = seen(nn.Sequential(nn.Conv2d(2, 3, (6, 5)), nn.Flatten()))
    with pytest.raises(ValueError, match="0, is a convolution, and R-GAP needs a linear last layer"):
        s.readings()


def test_negated_gradient_or_weight_raises_the_residual() -> None:
    s = seen(two_convolutions(nn.Tanh))
    (reading,) = s.readings()
    assert s.solve(reading).residual.item() < 1e-7
    for name in ("0.weight", "2.weight"):
        turned = {**s.gradient, name: -s.gradient[name]}
        assert solve_layers(s.chain, s.weights, turned, reading).residual.item() > 0.1
    turned = {**s.weights, "2.weight": -s.weights["2.weight"]}
    assert solve_layers(s.chain, turned, s.gradient, reading).residual.item() > 0.1
