"""Tests that a layer's equations agree with the explicit matrix computed by autograd."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from attacker.attacks.closed_form.rgap.system import EquationValues, LayerSystem, solve_least_squares
from attacker.attacks.networks.chain import read_chain
from attacker.attacks.networks.layers import Layer

F64 = torch.float64


def conv(*arguments: Any, **keywords: Any) -> list[nn.Module]:
    return [nn.Conv2d(*arguments, **keywords, bias=False)]


LAYERS: dict[str, tuple[tuple[int, ...], list[nn.Module]]] = {
    "plain": ((2, 4, 5), conv(2, 3, 3)),
    "padding": ((2, 4, 3), conv(2, 3, 3, padding=(2, 1))),
    "stride": ((1, 7, 6), conv(1, 2, (3, 2), stride=(2, 3), padding=1)),
    "rows that no output uses": ((1, 6, 6), conv(1, 2, 2, stride=3)),
    "dilation": ((2, 6, 5), conv(2, 2, 2, dilation=(2, 3), padding=(0, 1))),
    "one channel": ((1, 3, 3), conv(1, 1, 1)),
    "pooling after": ((2, 6, 5), [*conv(2, 3, 2, padding=1), nn.AvgPool2d(2)]),
    "pooling that overlaps": ((1, 5, 5), [*conv(1, 2, 2), nn.AvgPool2d(3, 1, 1)]),
    "pooling before": ((2, 6, 6), [nn.AvgPool2d(2), *conv(2, 3, 2)]),
    "pooling by uneven parts before": ((2, 5, 7), [nn.AdaptiveAvgPool2d((3, 4)), *conv(2, 3, 2)]),
    "pooling on both sides": ((1, 7, 7), [nn.AvgPool2d(2, ceil_mode=True), *conv(1, 2, 2, padding=1), nn.AvgPool2d((2, 1))]),
    "a matrix": ((6,), [nn.Linear(6, 4, bias=False)]),
    "a matrix of an image": ((2, 3, 2), [nn.Flatten(), nn.Linear(12, 4, bias=False)]),
    "a matrix of pooled ones": ((2, 4, 4), [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 4, bias=False)]),
    "an image of a matrix": ((6,), [nn.Linear(6, 12, bias=False), nn.Unflatten(1, (3, 2, 2)), nn.AvgPool2d(2)]),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def layer_of(name: str) -> tuple[Layer, nn.Module]:
    """Return the first layer of a network as read from it, and the same layer's linear part as a PyTorch module."""
    shape, modules = LAYERS[name]
    body = nn.Sequential(*modules).double()
    width = body(torch.zeros(1, *shape, dtype=F64))[0].numel()
    network = nn.Sequential(body, nn.Tanh(), nn.Flatten(), nn.Linear(width, 2))
    return read_chain(network, shape).layers[0], body


def build(name: str, count: int = 1, weights: int = 1, seed: int = 1) -> tuple[LayerSystem, nn.Module]:
    layer, body = layer_of(name)
    system = LayerSystem(layer, draw(weights, *layer.shape, seed=seed), draw(count, *layer.outputs, seed=seed + 50))
    return system, body


def compute_by_torch(name: str, weight: Tensor, k: Tensor) -> Tensor:
    """Return [W; K] (equations, unknowns) by autograd, with derivatives of z = W x and of the gradient of <k, z> as rows."""
    layer, body = layer_of(name)
    ((parameter, _),) = body.named_parameters()

    def given(w: Tensor, x: Tensor) -> Tensor:
        out: Tensor = functional_call(body, {parameter: w}, (x[None],))[0]
        return out

    x = draw(*layer.inputs, seed=9)
    linear = jacrev(given, argnums=1)(weight, x).reshape(k.numel(), -1)
    gradient = jacrev(lambda x: jacrev(lambda w: (given(w, x) * k).sum())(weight))(x)
    return torch.cat([linear, gradient.reshape(weight.numel(), -1)])


def dense(system: LayerSystem, at: int = 0) -> Tensor:
    """Return the matrix (equations, unknowns) of problem `at`, by applying the system to unit vectors."""
    count, width = len(system.k), int(np.prod(system.layer.inputs))
    columns = []
    for unit in torch.eye(width, dtype=F64):
        rows = system.apply(unit.reshape(1, *system.layer.inputs).expand(count, *system.layer.inputs))
        columns.append(torch.cat([rows.weights[at].flatten(), rows.gradients[at].flatten()]))
    return torch.stack(columns, dim=1)


def stack(rows: EquationValues, at: int = 0) -> Tensor:
    return torch.cat([rows.weights[at].flatten(), rows.gradients[at].flatten()])


def random_rows(system: LayerSystem, seed: int) -> EquationValues:
    layer, count = system.layer, len(system.k)
    values = int(np.prod(layer.shape[1:]))
    return EquationValues(draw(count, *layer.outputs, seed=seed), draw(count, layer.shape[0], values, seed=seed + 1))


@pytest.mark.parametrize("name", LAYERS)
def test_apply_agrees_with_the_jacobian_of_autograd(name: str) -> None:
    system, _ = build(name)
    weight = system.weight.reshape(system.layer.shape)
    k = draw(1, *system.layer.outputs, seed=51)
    assert torch.allclose(dense(system), compute_by_torch(name, weight, k[0]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_adjoint_is_the_transpose(name: str, scaled: bool) -> None:
    system, _ = build(name, count=3)
    if scaled:
        system.scale = random_rows(system, seed=20)
    x, rows = draw(3, *system.layer.inputs, seed=3), random_rows(system, seed=4)
    image, back = system.apply(x), system.adjoint(rows)
    one = (image.weights * rows.weights).flatten(1).sum(dim=1) + (image.gradients * rows.gradients).flatten(1).sum(dim=1)
    assert torch.allclose(one, (x * back).flatten(1).sum(dim=1), rtol=1e-12)
    assert torch.allclose(dense(system, at=1).T @ stack(rows, at=1), back[1].flatten(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_below_is_that_of_backpropagation(name: str) -> None:
    system, body = build(name, count=2)
    with torch.no_grad():
        next(body.parameters()).copy_(system.weight.reshape(system.layer.shape))
    x, k = draw(2, *system.layer.inputs, seed=5).requires_grad_(), draw(2, *system.layer.outputs, seed=51)
    (wanted,) = torch.autograd.grad((body(x) * k).sum(), x)
    assert torch.allclose(system.compute_gradient_below(), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in LAYERS if "pool" not in name and "image of a matrix" not in name])
def test_norms_are_the_lengths_of_the_rows(name: str) -> None:
    system, _ = build(name, count=2)
    for at in (0, 1):
        assert torch.allclose(stack(system.compute_norms(), at), dense(system, at).norm(dim=1), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in LAYERS if "pool" in name])
def test_norms_with_pooling_are_right_within_a_factor(name: str) -> None:
    system, _ = build(name)
    ratio = stack(system.compute_norms()) / dense(system).norm(dim=1)
    assert ((ratio > 0.5) & (ratio < 20)).all()


def test_scale_multiplies_rows_and_zero_removes_one() -> None:
    system, _ = build("padding")
    plain, scale = dense(system), random_rows(system, seed=30)
    scale.weights[0, 0, 0, 0] = 0
    system.scale = scale
    assert torch.allclose(dense(system), stack(scale)[:, None] * plain, rtol=1e-12, atol=1e-14)
    assert (dense(system)[0] == 0).all()


def solved_by_numpy(system: LayerSystem, target: EquationValues, at: int) -> Tensor:
    matrix, right = dense(system, at).numpy(), stack(target if system.scale is None else target * system.scale, at).numpy()
    return torch.from_numpy(np.linalg.lstsq(matrix, right, rcond=1e-11)[0]).reshape(system.layer.inputs)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("scaled", [False, True])
def test_least_squares_agrees_with_numpy_on_inconsistent_equations(name: str, scaled: bool) -> None:
    system, _ = build(name, count=2)
    if scaled:
        lengths = system.compute_norms()
        system.scale = EquationValues(1 / (lengths.weights + 0.1), 1 / (lengths.gradients + 0.1))
    target = random_rows(system, seed=11)
    found = solve_least_squares(system, target)
    for at in (0, 1):
        wanted = solved_by_numpy(system, target, at)
        assert torch.allclose(found.x[at], wanted, rtol=1e-6, atol=1e-8 * wanted.abs().max())
        scaled_target = stack(target if system.scale is None else target * system.scale, at)
        left = (dense(system, at) @ wanted.flatten() - scaled_target).norm() / scaled_target.norm()
        assert found.residual[at] == pytest.approx(left.item(), rel=1e-6, abs=1e-9)


def build_deficient_system(count: int = 1) -> LayerSystem:
    """Return a layer's system with 50 unknowns and 12 equations; 18 of the unknowns occur in none."""
    layer = read_chain(nn.Sequential(nn.Conv2d(2, 1, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 1)), (2, 5, 5)).layers[0]
    return LayerSystem(layer, draw(1, *layer.shape, seed=2), draw(count, *layer.outputs, seed=3))


def test_underdetermined_system_gets_the_shortest_solution() -> None:
    system, x = build_deficient_system(), draw(1, 2, 5, 5, seed=4)
    assert np.linalg.matrix_rank(dense(system).numpy()) < 50
    found = solve_least_squares(system, system.apply(x))
    assert torch.allclose(found.x[0], solved_by_numpy(system, system.apply(x), 0), atol=1e-10)
    assert found.residual < 1e-12
    assert found.x.norm() < x.norm()
    assert (found.x[..., 4] == 0).all()  # which the stride does not reach


def test_solution_is_the_nearest_to_the_start() -> None:
    system, x, start = build_deficient_system(), draw(1, 2, 5, 5, seed=4), draw(1, 2, 5, 5, seed=5)
    shift = system.apply(x).add(system.apply(start), -torch.ones(1, dtype=F64))
    wanted = start[0] + solved_by_numpy(system, shift, 0)
    assert torch.allclose(solve_least_squares(system, system.apply(x), start=start).x[0], wanted, atol=1e-10)


@pytest.mark.parametrize("weights", [1, 4])
def test_batched_problems_are_solved_like_single_ones(weights: int) -> None:
    name = "pooling on both sides"
    system, _ = build(name, count=4, weights=weights)
    target = random_rows(system, seed=12)
    target.weights[2] *= 1e6
    found = solve_least_squares(system, target)
    k = draw(4, *system.layer.outputs, seed=51)
    for at in range(4):
        weight = system.weight[at if weights > 1 else 0].reshape(1, *system.layer.shape)
        alone = LayerSystem(system.layer, weight, k[at : at + 1])
        single = solve_least_squares(alone, EquationValues(target.weights[at : at + 1], target.gradients[at : at + 1]))
        assert torch.allclose(found.x[at], single.x[0], rtol=1e-8, atol=1e-10 * single.x.abs().max())
        assert found.residual[at] == pytest.approx(single.residual.item(), rel=1e-8)


@pytest.mark.parametrize("weights", [1, 4])
@pytest.mark.parametrize("scales", [None, 1, 4])
def test_selected_problems_keep_their_equations(weights: int, scales: int | None) -> None:
    system, _ = build("pooling after", count=4, weights=weights)
    if scales is not None:
        scale = random_rows(system, seed=21)
        system.scale = EquationValues(scale.weights[:scales], scale.gradients[:scales])
    part = system.select(slice(1, 3))
    assert len(part.k) == 2
    for at in (0, 1):
        assert torch.equal(dense(part, at), dense(system, at + 1))


def test_zero_target_has_the_solution_zero_after_few_iterations() -> None:
    system, _ = build("padding", count=2)
    target = random_rows(system, seed=13)
    target.weights[0], target.gradients[0] = 0, 0
    found = solve_least_squares(system, target)
    assert (found.x[0] == 0).all()
    assert found.residual[0] == 0
    assert torch.allclose(found.x[1], solved_by_numpy(system, target, 1), atol=1e-9)
    alone = solve_least_squares(system, EquationValues(torch.zeros_like(target.weights), torch.zeros_like(target.gradients)))
    assert alone.iterations <= 10
    assert (alone.x == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_infinite_target_stops_and_changes_no_other_problem(value: float) -> None:
    system, _ = build("padding", count=2)
    target = random_rows(system, seed=14)
    clean = solve_least_squares(system, target).x[1]
    target.weights[0, 0, 0, 0] = value
    found = solve_least_squares(system, target)
    assert not torch.isfinite(found.x[0]).all()
    assert torch.allclose(found.x[1], clean, rtol=1e-9)
    assert not torch.isfinite(found.residual[0])
    only = LayerSystem(system.layer, draw(1, *system.layer.shape, seed=1), draw(1, *system.layer.outputs, seed=51))
    assert solve_least_squares(only, EquationValues(target.weights[:1], target.gradients[:1]), iterations=10_000).iterations <= 20


def test_iterations_are_a_limit_and_tolerance_ends_earlier() -> None:
    system, _ = build("dilation")
    target = random_rows(system, seed=15)
    assert solve_least_squares(system, target, iterations=3).iterations == 3
    loose, tight = (solve_least_squares(system, target, tolerance=t) for t in (1e-2, 1e-12))
    assert loose.iterations < tight.iterations
    wanted = solved_by_numpy(system, target, 0)
    assert (loose.x[0] - wanted).norm() > 1e3 * (tight.x[0] - wanted).norm()
