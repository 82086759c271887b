"""Tests that preconditioners agree with the inverse of the explicit normal matrix."""

from math import prod

import pytest
import torch
from torch import Tensor, nn

from attacker.attacks.closed_form.rgap import preconditioning
from attacker.attacks.closed_form.rgap.preconditioning import (
    DIAGONAL_FLOOR,
    build_preconditioner,
    estimate_bytes,
    find_pixel_classes,
)
from attacker.attacks.closed_form.rgap.system import EquationValues, LayerSystem, solve_least_squares
from attacker.attacks.networks.chain import read_chain
from attacker.attacks.networks.layers import Layer

F64 = torch.float64

CONVOLUTIONS: dict[str, tuple[tuple[int, ...], nn.Conv2d]] = {
    "plain": ((2, 4, 5), nn.Conv2d(2, 3, 2)),
    "padding": ((2, 4, 3), nn.Conv2d(2, 6, 3, padding=(2, 1))),
    "stride": ((2, 6, 7), nn.Conv2d(2, 12, 3, stride=2, padding=1)),
    "uneven strides": ((1, 7, 6), nn.Conv2d(1, 4, (3, 2), stride=(2, 3), padding=1)),
    "dilation": ((2, 6, 5), nn.Conv2d(2, 4, 2, dilation=(2, 3), padding=(0, 1))),
    "stride and dilation": ((1, 8, 7), nn.Conv2d(1, 6, 2, stride=2, dilation=3, padding=2)),
    "rows that no output uses": ((1, 6, 6), nn.Conv2d(1, 3, 2, stride=3)),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def system_of(name: str, *, count: int = 2, weights: int = 1) -> LayerSystem:
    shape, module = CONVOLUTIONS[name]
    width = module(torch.zeros(1, *shape))[0].numel()
    layer = read_chain(nn.Sequential(module, nn.Tanh(), nn.Flatten(), nn.Linear(width, 2)), shape).layers[0]
    system = LayerSystem(layer, draw(weights, *layer.shape, seed=1), draw(count, *layer.outputs, seed=2))
    rows = draw(count, layer.shape[0], 1, prod(layer.kernel or ()), seed=4).abs() + 0.1
    rows = rows.expand(-1, -1, layer.product_inputs[0], -1).flatten(2)
    system.scale = EquationValues(draw(count, *layer.outputs, seed=3).abs() + 0.3, rows)
    return system


def right_of(system: LayerSystem, x: Tensor) -> EquationValues:
    """Return the right-hand sides of the equations, before scaling."""
    plain = system.select(slice(0, len(x)))
    plain.scale = None
    return plain.apply(x)


def normal(system: LayerSystem, at: int, *, weights: bool) -> Tensor:
    """Compute [W; K]^T [W; K], or K^T K alone, of one problem, column by column.

    W holds the equations of the layer's forward pass, K those of its weights' gradient.
    """
    one = system.select(slice(at, at + 1))
    one.scale = EquationValues(one.scale.weights * weights, one.scale.gradients)
    unit = torch.eye(prod(system.layer.inputs), dtype=F64).reshape(-1, 1, *system.layer.inputs)
    return torch.stack([one.adjoint(one.apply(x)).flatten() for x in unit], dim=1)


def as_matrix(inverse: object, system: LayerSystem, at: int) -> Tensor:
    unit = torch.eye(prod(system.layer.inputs), dtype=F64).reshape(-1, 1, *system.layer.inputs)
    columns = [inverse(x.expand(len(system.k), *x.shape[1:]))[at].flatten() for x in unit]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_pixel_classes_are_a_partition_and_share_no_equation_of_k(name: str) -> None:
    system = system_of(name, count=1)
    layer, classes = system.layer, find_pixel_classes(system.layer)
    places = torch.cat([one.places for one in classes])
    side = prod(layer.product_inputs[1:])
    assert torch.equal(places.sort().values, torch.arange(side))
    together = torch.zeros(side, side, dtype=torch.bool)
    for one in classes:
        together[one.places[:, None], one.places] = True
    assert (normal(system, 0, weights=False)[:side, :side][~together] == 0).all()


def build_full_preconditioner(system: LayerSystem, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(preconditioning, "MIN_SURPLUS", 1e9)
    monkeypatch.setattr(preconditioning, "MIN_EQUATION_SHARE", 0.0)
    return build_preconditioner(system)


@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_small_layer_gets_the_inverse_of_the_full_matrix(name: str, weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    system = system_of(name, weights=weights)
    inverse = build_full_preconditioner(system, monkeypatch)
    for at in (0, 1):
        wanted = normal(system, at, weights=True)
        product = wanted @ as_matrix(inverse, system, at) @ wanted  # A A^+ A = A, since some matrices are singular
        assert torch.allclose(product, wanted, atol=1e4 * DIAGONAL_FLOOR * wanted.diagonal().max())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_large_layer_gets_the_inverse_of_k_plus_the_mean_diagonal_of_w(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "MAX_WHOLE_OUTPUTS", 0)
    monkeypatch.setattr(preconditioning, "MIN_EQUATION_SHARE", 0.0)
    system = system_of(name)
    inverse = build_preconditioner(system)
    channels = system.layer.product_inputs[0]
    for at in (0, 1):
        of_k, both = normal(system, at, weights=False), normal(system, at, weights=True)
        diagonal = (both - of_k).diagonal().reshape(channels, -1).mean(dim=0).repeat(channels)
        used = (of_k.diagonal() + diagonal) > 0
        product = (of_k + torch.diag(diagonal)) @ as_matrix(inverse, system, at)
        assert torch.allclose(product[used][:, used], torch.eye(int(used.sum()), dtype=F64), atol=1e-7)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_too_large_classes_get_the_inverse_of_the_diagonal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "MAX_CLASS_PLACES", 0)
    system = system_of(name)
    diagonal = normal(system, 1, weights=True).diagonal()
    found = as_matrix(build_preconditioner(system), system, 1)
    assert torch.allclose(found, torch.diag(found.diagonal()))
    assert torch.allclose((found.diagonal() * diagonal)[diagonal > 0], torch.ones_like(diagonal)[diagonal > 0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["whole", "blocks", "diagonal"])
@pytest.mark.parametrize("name", ["padding", "stride"])
def test_preconditioners_keep_the_solution_and_add_no_iterations(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditioning, "MIN_EQUATION_SHARE", 0.0)
    monkeypatch.setattr(
        preconditioning,
        *{"whole": ("MIN_SURPLUS", 1e9), "blocks": ("MAX_WHOLE_OUTPUTS", 0), "diagonal": ("MAX_CLASS_PLACES", 0)}[kind],
    )
    system = system_of(name)
    x = draw(2, *system.layer.inputs, seed=9)
    plain = solve_least_squares(system, right_of(system, x))
    assert torch.allclose(plain.x, x, atol=1e-7)
    found = solve_least_squares(system, right_of(system, x), inverse=build_preconditioner(system))
    assert torch.allclose(found.x, x, atol=1e-7)
    assert found.iterations <= plain.iterations
    if kind == "whole":
        assert found.iterations <= 20


def test_solver_stops_at_the_noise_level() -> None:
    system = system_of("stride")
    x = draw(2, *system.layer.inputs, seed=9)
    exact = right_of(system, x)
    noise = EquationValues(1e-3 * draw(*exact.weights.shape, seed=5), 1e-3 * draw(*exact.gradients.shape, seed=6))
    target = exact.add(noise, torch.ones(2, dtype=F64))
    spare = torch.full((2,), float(exact.weights[0].numel() + exact.gradients[0].numel() - x[0].numel()), dtype=F64)
    whole, rested = (solve_least_squares(system, target, spare=s) for s in (None, spare))
    assert rested.iterations < whole.iterations
    assert (rested.x - whole.x).norm() < 0.3 * (whole.x - x).norm()


def test_estimated_bytes_grow_with_the_layer() -> None:
    def layer(side: int) -> Layer:
        module = nn.Conv2d(3, 8, 3, padding=1)
        return read_chain(nn.Sequential(module, nn.Tanh(), nn.Flatten(), nn.Linear(8 * side**2, 2)), (3, side, side)).layers[0]

    assert 8 * 2 * (32**2) ** 2 < estimate_bytes(layer(32)) < 4 * 8 * (32**2) ** 2
    assert estimate_bytes(layer(16)) < estimate_bytes(layer(24)) < estimate_bytes(layer(32))
