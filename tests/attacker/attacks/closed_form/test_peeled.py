"""Tests of the closed form (route) `peeled`: photographs are recovered although the second or third layer lacks equations."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.nn import functional

from attacker.attacks.closed_form.peeling import peeled as peeling
from attacker.attacks.closed_form.peeling.assembly import compose
from attacker.attacks.closed_form.peeling.equations import ComposedEquations, EquationSides, Tangent
from attacker.attacks.closed_form.peeling.peeled import EDGE, PeelingAnswers, peel
from attacker.attacks.closed_form.peeling.smoothness import TotalVariation
from attacker.attacks.closed_form.rgap.recursion import Point, solve_last_layer, solve_layer, solve_layers
from attacker.attacks.closed_form.rgap.system import EquationValues
from attacker.attacks.networks.chain import Chain, read_chain
from defenses.base import Tensors
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

LOW, HIGH = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)


class Seen(NamedTuple):
    """A chain with weights (1, ...) and gradients (N, ...) by name, and the state of R-GAP at the deficient layer."""

    chain: Chain
    weights: Tensors
    gradient: Tensors
    point: Point


def draw_photographs(count: int, side: int) -> Tensor:
    """Return crops of a photograph, (count, 3, side, side) in [0, 1], reduced eightfold."""
    picture = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None].float() / 255
    small = functional.avg_pool2d(picture, 8)[0]
    return torch.stack([small[:, 5 + 3 * i : 5 + 3 * i + side, 4 + 9 * i : 4 + 9 * i + side] for i in range(count)])


def two_layers(activation: Callable[[], nn.Module], *, bias: bool = False, pooled: bool = False, seed: int = 0) -> nn.Sequential:
    """Return a network for 3x12x12 inputs: the second layer lacks 20 equations of 392, and the first has enough surplus."""
    torch.manual_seed(seed)
    first: list[nn.Module] = [nn.Conv2d(3, 8, 4, stride=2, padding=2, bias=bias)]
    if pooled:
        first = [nn.Conv2d(3, 8, 3, padding=2, bias=bias), nn.AvgPool2d(2)]
    layers = [*first, activation(), nn.Conv2d(8, 6, 3, stride=2, padding=1, bias=bias), activation()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 10))


def three_layers(activation: Callable[[], nn.Module], seed: int = 0) -> nn.Sequential:
    """Return a network for 3x12x12 inputs whose third layer lacks equations."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 4, stride=2, padding=2), activation(), nn.Conv2d(8, 16, 3, padding=1), activation()]
    layers += [nn.Conv2d(16, 6, 3, stride=2, padding=1), activation()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 10))


def see(model: nn.Module, x: Tensor, *, at: int, dtype: torch.dtype = torch.float32, noise: float = 0.0) -> Seen:
    """Compute the gradients of cross-entropy for label 0 at each x (N, ...), in `dtype`, with relative noise."""
    model = model.to(dtype)
    rng = torch.Generator().manual_seed(1)
    names = [name for name, _ in model.named_parameters()]
    rows = []
    for one in x.to(dtype):
        loss = functional.cross_entropy(model(one[None]), torch.zeros(1, dtype=torch.long))
        found = torch.autograd.grad(loss, list(model.parameters()))
        rows.append([g + noise * g.square().mean().sqrt() * torch.randn(g.shape, generator=rng, dtype=dtype) for g in found])
    chain = read_chain(model, tuple(x.shape[1:]))
    weights = {name: p.detach().double()[None] for name, p in model.named_parameters()}
    gradient = {name: torch.stack([row[i] for row in rows]).double() for i, name in enumerate(names)}
    first = solve_last_layer(chain, weights, gradient, "cross_entropy")[0]
    return Seen(chain, weights, gradient, solve_layers(chain, weights, gradient, first, until=at))


def peeled(seen: Seen, low: Tensor = LOW, high: Tensor = HIGH) -> PeelingAnswers:
    return peel(seen.chain, seen.weights, seen.gradient, seen.point, low=low, high=high)


def composed(seen: Seen) -> ComposedEquations:
    return compose(seen.chain, seen.weights, seen.gradient, seen.point, LOW, HIGH)


def measure_errors(found: Tensor, x: Tensor) -> Tensor:
    return (found - x).flatten(1).square().mean(dim=1)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "leaky": (lambda: two_layers(lambda: nn.LeakyReLU(0.2)), 1),
    "tanh, biases": (lambda: two_layers(nn.Tanh, bias=True), 1),
    "tanh, pooled": (lambda: two_layers(nn.Tanh, bias=True, pooled=True), 1),
    "three layers, leaky": (lambda: three_layers(lambda: nn.LeakyReLU(0.2)), 2),
    "three layers, tanh": (lambda: three_layers(nn.Tanh), 2),
}


@pytest.fixture(params=NETWORKS, scope="module")
def seen(request: pytest.FixtureRequest) -> tuple[Seen, Tensor]:
    """Return two photographs with their gradients in float64."""
    build, at = NETWORKS[request.param]
    x = draw_photographs(2, 12).double()
    return see(build(), x, at=at, dtype=torch.float64), x


def test_true_input_satisfies_all_equations(seen: tuple[Seen, Tensor]) -> None:
    problem = composed(seen[0])
    missed = problem.linearise(seen[1], problem.whole).missed.squared_norm()
    assert (missed <= 1e-18 * problem.sides.squared_norm()).all()


@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_outputs_that_a_stride_skips_have_no_equations(activation: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), activation(), nn.Conv2d(4, 8, 3, stride=2), activation()]  # skips a row and a column of 6
    x = draw_photographs(1, 8).double()
    problem = composed(see(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10)), x, at=0, dtype=torch.float64))
    used = torch.zeros(1, 4, 6, 6, dtype=torch.bool)
    used[..., :5, :5] = True
    assert torch.equal(problem.scale.weights > 0, used)
    missed = problem.linearise(x, problem.whole).missed.squared_norm()
    assert (missed <= 1e-18 * problem.sides.squared_norm()).all()


def test_apply_is_minus_the_derivative_of_the_missed_part(seen: tuple[Seen, Tensor]) -> None:
    problem, x = composed(seen[0]), seen[1] + 0.01
    v, step = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=x.dtype), 1e-7
    here = problem.linearise(x, problem.whole)
    ahead, behind = (problem.linearise(x + sign * step * v, problem.whole) for sign in (1, -1))
    assert all(bool((a.sign() == b.sign()).all()) for a, b in zip(ahead.z, behind.z, strict=True))
    image = here.apply(v)
    pairs = zip((image.top.weights, image.top.gradients, *image.below), _all(behind), _all(ahead), strict=True)
    for got, before, after in pairs:
        torch.testing.assert_close(got, (before - after) / (2 * step), rtol=1e-5, atol=1e-6)


def _all(tangent: Tangent) -> tuple[Tensor, ...]:
    missed = tangent.missed
    return missed.top.weights, missed.top.gradients, *missed.below


@pytest.mark.parametrize("doubtful", [False, True])
def test_adjoint_is_the_transpose_of_apply(seen: tuple[Seen, Tensor], doubtful: bool) -> None:
    problem, x = composed(seen[0]), seen[1]
    rng = torch.Generator().manual_seed(3)
    tangent = problem.linearise(x, problem.whole)
    if doubtful:
        tangent = problem.linearise(x, tangent.suppress_doubtful([torch.full((2,), 0.02, dtype=x.dtype)] * len(problem.below)))
    v = torch.randn(x.shape, generator=rng, dtype=x.dtype)
    image = tangent.apply(v)
    rows = EquationValues(*(torch.randn(t.shape, generator=rng, dtype=x.dtype) for t in (image.top.weights, image.top.gradients)))
    sides = EquationSides(rows, tuple(torch.randn(t.shape, generator=rng, dtype=x.dtype) for t in image.below))
    there = (image.top.weights * rows.weights).sum() + (image.top.gradients * rows.gradients).sum()
    there = there + sum((a * b).sum() for a, b in zip(image.below, sides.below, strict=True))
    torch.testing.assert_close(there, (v * tangent.adjoint(sides)).sum(), rtol=1e-9, atol=1e-12)


def test_selected_problem_has_the_same_equations_alone(seen: tuple[Seen, Tensor]) -> None:
    problem, x = composed(seen[0]), seen[1] + 0.01
    both = problem.linearise(x, problem.whole).missed
    alone = problem.select(torch.tensor([1])).linearise(x[1:], problem.whole).missed
    torch.testing.assert_close(alone.top.weights, both.top.weights[1:])
    for a, b in zip(alone.below, both.below, strict=True):
        torch.testing.assert_close(a, b[1:])


def test_equations_that_depend_on_a_doubtful_slope_are_suppressed() -> None:
    x = draw_photographs(1, 12).double()
    problem = composed(see(two_layers(lambda: nn.LeakyReLU(0.2)), x, at=1, dtype=torch.float64))
    truth = problem.linearise(x, problem.whole)
    place = truth.z[0].abs().flatten().argmin()
    certain = truth.z[0].abs().flatten().kthvalue(2).values
    push = torch.zeros_like(truth.z[0]).flatten()
    push[place] = 1
    towards = torch.autograd.functional.vjp(lambda t: problem.linearise(t).z[0].flatten(), x, push)[1]
    over = x - towards * (2 * truth.z[0].flatten()[place] / towards.square().sum())  # the nearest x with the other sign
    wrong = problem.linearise(over, problem.whole)
    assert int((wrong.z[0].sign() != truth.z[0].sign()).sum()) == 1
    weighing = wrong.suppress_doubtful([((certain + truth.z[0].abs().min()) / 2)[None]])
    jumped = wrong.missed.below[0].norm()
    assert problem.linearise(over, weighing).missed.below[0].norm() < 0.05 * jumped
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    assert problem.linearise(over, weighing).apply(v).below[0].norm() > 0.5 * wrong.apply(v).below[0].norm()


@pytest.mark.parametrize("name", [name for name in NETWORKS if "pooled" not in name])  # which converge slowly
def test_small_networks_are_solved_exactly_from_float32_gradients(name: str) -> None:
    build, at = NETWORKS[name]
    x = draw_photographs(2, 12)
    seen = see(build(), x, at=at)
    alone = solve_layer(seen.chain, seen.weights, seen.gradient, seen.point)
    assert (alone.residual < 1e-5).all()
    found = peeled(seen)
    assert found.exact.all()
    assert (found.misfit < 1e-5).all()
    assert (found.weight == 0).all()
    assert measure_errors(found.x, x).max() < 1e-8


def test_photograph_is_recovered_exactly_from_cnn6_d() -> None:
    data = DataSpec(shape=(3, 32, 32), num_classes=10)
    x = draw_photographs(1, 32)
    seen = see(models.build(ModelSpec(name="cnn6_d"), data, seed=0), x, at=1)
    truth = seen.chain.layers[0].activation.forward(seen.chain.layers[0].apply_weight(x.double(), seen.weights["0.weight"][0]))
    alone = solve_layer(seen.chain, seen.weights, seen.gradient, seen.point)
    assert measure_errors(alone.f, truth) > 0.01 * truth.var()  # the layer's own equations do not determine its input
    found = peeled(seen)
    assert found.exact.all()
    assert measure_errors(found.x, x).item() < 1e-9


def test_undetermined_values_are_filled_in_smoothly_and_counted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(288, 10))
    x = draw_photographs(2, 12)
    seen = see(model, x, at=0)
    found, least = peeled(seen), solve_layers(*seen[:3], seen.point)
    assert (found.misfit < 1e-5).all()  # 288 + 54 equations of 432 values
    assert (found.free > 0.2).all()
    assert not found.exact.any()
    variation = TotalVariation(EDGE)
    assert (variation.value(found.x) < variation.value(x.double())).all()  # the true image also fits, and is less smooth
    assert (measure_errors(found.x, x) < 0.05 * measure_errors(least.f, x)).all()


def test_with_noise_the_prior_keeps_weight_and_lowers_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw_photographs(1, 12)
    seen = see(two_layers(lambda: nn.LeakyReLU(0.2)), x, at=1, noise=5e-2)
    found = peeled(seen)
    monkeypatch.setattr(peeling, "MAX_NOISE_RATIO", 0)
    without = peeled(seen)
    assert not found.exact.any()
    assert (found.weight > 0).all()
    assert (without.weight == 0).all()
    assert (measure_errors(found.x, x) < 0.5 * measure_errors(without.x, x)).all()
    assert (measure_errors(found.x, x) < measure_errors(torch.full_like(x, 0.5), x)).all()


def test_answers_do_not_depend_on_the_batch() -> None:
    x = draw_photographs(2, 12)
    together, alone = (peeled(see(two_layers(nn.Tanh), part, at=1)) for part in (x, x[1:2]))
    torch.testing.assert_close(together.x[1:2], alone.x, rtol=0, atol=1e-6)


def test_inputs_of_other_ranges_are_recovered() -> None:
    x = draw_photographs(1, 12)
    low, high = torch.tensor([-2.0, -1.0, 0.5]).reshape(3, 1, 1), torch.tensor([2.0, 3.0, 4.0]).reshape(3, 1, 1)
    taken = low + (high - low) * x
    found = peeled(see(two_layers(nn.Tanh), taken, at=1), low.double(), high.double())
    assert found.exact.all()
    assert measure_errors(found.x, taken) < 1e-8


def test_table_rows_are_recovered_equally_each_time() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    x = torch.rand(2, 20, generator=torch.Generator().manual_seed(0))
    rows = see(model, x, at=1)
    found = peeled(rows)
    assert found.exact.all()
    assert measure_errors(found.x, x).max() < 1e-8
    assert torch.equal(found.x, peeled(rows).x)
