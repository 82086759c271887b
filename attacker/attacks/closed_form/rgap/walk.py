"""R-GAP: from the gradient of the last layer back to the input, one linear system a layer (Zhu and Blaschko 2021, algorithm 1).

    z = inverse(f);  k = dL/df * slope(f);  x = lstsq([W; K], [z - b; dL/dW]);  f, dL/df = x, W^T k

with f the layer's output, and x its input, that is the output of the layer before. With biases and smooth activations the same
walk opens the sigmoid networks of DLG and CPL.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.heads import HeadReading, read_heads
from attacker.attacks.closed_form.rgap.footprint import used_values
from attacker.attacks.closed_form.rgap.preconditioning import Inverse, bytes_of, inverse_of
from attacker.attacks.closed_form.rgap.signs import doubted, level, other_side
from attacker.attacks.closed_form.rgap.system import EquationValues, Solved, System, least_squares, through
from attacker.attacks.networks.activations import settled
from attacker.attacks.networks.chain import Chain, Layer, only_reshapes

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How to walk. The defaults are ours.

    scaled:    divide each equation by its expected error (`expected_errors`), and precondition.
    mended:    where values near a kink were taken for its wrong side, take them for the other one (`signs`).
    precision: what is carried from layer to layer.
    tolerance, iterations: of the solver.
    """

    scaled: bool = True
    mended: bool = True
    precision: torch.dtype = torch.float64
    tolerance: float = 1e-12
    iterations: int = 3000


OURS = Walk()
PAPER = Walk(scaled=False, mended=False, precision=torch.float32, tolerance=1e-13, iterations=30_000)
"""As the authors' code: equations as they are, and float32 between layers."""


MENDS = 16
"""Largest number of signs of one layer that are flipped."""
NEAR = 5.0
"""Largest distance from the kink, in units of its error, at which a value's sign is tried the other way."""
FURTHER = 4.0
"""Largest error of a value relative to the residual of the layers behind it."""
HOPELESS = 0.3
"""Relative residual from which wrong signs cannot be the cause."""
BETTER = 0.9
"""Largest residual after a flipped sign, relative to the one before, at which the flip is kept."""
HARDLY = 32
"""Number of surplus equations from which the residual counts as noise."""


@dataclass(frozen=True)
class Point:
    """Where a walk stands: at the output f (N, *outputs) of layer `at`, with the gradient of the loss there; -1 is the input.

    residuals: of the layers walked through, each (N,), the last layer first. head: the reading that it started from.
    """

    at: int
    f: Tensor
    gradient: Tensor
    head: HeadReading
    residuals: tuple[Tensor, ...] = ()

    @property
    def residual(self) -> Tensor:
        """(N,) the largest of all layers."""
        return torch.stack(self.residuals).amax(dim=0) if self.residuals else torch.zeros_like(self.f.flatten(1)[:, 0])


def beginnings(chain: Chain, weights: Tensors, gradient: Tensors, loss: str) -> list[Point]:
    """The last layer's readings, as points at its input. Tensors are stacked: weights (1 or N, ...), gradients (N, ...)."""
    layer = chain.layers[-1]
    if layer.kernel is not None:
        raise ValueError(f"its last layer, {layer.name}, is a convolution, and no closed form reads that")
    weight, bias = weights[layer.weight], weights[layer.bias] if layer.bias else None
    heads = read_heads(loss, weight, bias, gradient[layer.weight], gradient[layer.bias] if layer.bias else None)
    return [_at_input(layer, weight, gradient[layer.weight], head, len(chain.layers) - 2) for head in heads]


def _at_input(layer: Layer, weight: Tensor, gradient: Tensor, head: HeadReading, at: int) -> Point:
    system = System(layer, weight, head.k)
    below = system.gradient_below()
    if only_reshapes(layer.before):
        return Point(at, head.features.reshape(below.shape), below, head)
    lengths = head.k.abs()[..., None].expand_as(gradient)  # what is pooled first comes back with least norm
    system.scale = EquationValues(torch.zeros_like(head.k), _inverse(lengths))
    solved = least_squares(system, EquationValues(torch.zeros_like(head.k), gradient))
    return Point(at, solved.x, below, head)


def step(chain: Chain, weights: Tensors, gradient: Tensors, point: Point, walk: Walk = OURS) -> Point:
    """One layer further to the input."""
    system, target = equations(chain, weights, gradient, point, walk)
    unknowns = int(used_values(chain)[point.at].sum())
    x, residual = _solution(system, target, unknowns, walk)
    if walk.mended and not system.layer.activation.smooth and only_reshapes(system.layer.after):
        system, x, residual = _mended(chain, weights, gradient, point, walk, unknowns, (system, target, x, residual))
    if point.at:
        x = settled(chain.layers[point.at - 1].activation, x)
    x, below = (t.to(walk.precision).to(t.dtype) for t in (x, system.gradient_below()))
    return replace(point, at=point.at - 1, f=x, gradient=below, residuals=(*point.residuals, residual))


def equations(
    chain: Chain, weights: Tensors, gradient: Tensors, point: Point, walk: Walk = OURS
) -> tuple[System, EquationValues]:
    """The system of the layer that `point` stands behind, its rows scaled, and its right-hand side."""
    layer = chain.layers[point.at]
    f, act = point.f.reshape(-1, *layer.outputs), layer.activation
    z, k = act.inverse(f), point.gradient.reshape(f.shape) * act.slope(f)
    z, k = (t.to(walk.precision).to(t.dtype) for t in (z, k))
    system = System(layer, weights[layer.weight], k)
    known = act.known(f) * used_values(chain)[point.at + 1].to(f.device)
    sides = gradient[layer.weight].reshape(len(z), layer.shape[0], -1)
    if walk.scaled:
        errors = expected_errors(system, f * known, point.gradient.reshape(f.shape), sides)
        system.scale = EquationValues(known * _inverse(errors.weights), _inverse(errors.gradients))
    else:
        system.scale = EquationValues(known, torch.ones_like(sides))
    offset = _offset(layer, weights[layer.bias]) if layer.bias else 0
    return system, EquationValues(z - offset, sides)


def expected_errors(system: System, f: Tensor, gradient: Tensor, sides: Tensor) -> EquationValues:
    """How far each equation of a layer may be off, as a multiple of the relative error of f; inf where it says nothing.

    f, gradient: (N, *outputs) the layer's output, and the gradient of the loss there. sides: dL/dW, (N, C_out, ...).
    An error of f is one of z divided by the slope, so that saturated values tell next to nothing, and one of k = gradient * slope
    through the change of the slope. The gradient, a sum over what comes behind, is as exact as f, each value as the mean one.
    """
    act = system.layer.activation
    size = level(f)
    slope = act.slope(f)
    doubt = torch.hypot(gradient * act.bend(f) * size, slope * level(gradient))
    lengths, k = (System(system.layer, system.weight, t).norms().gradients for t in (doubt, gradient * slope))
    inputs = sides.flatten(1).norm(dim=1) * _inverse(k.flatten(1).norm(dim=1))  # what K multiplies, about
    return EquationValues(size / slope, lengths * inputs[:, None, None])


def finish(chain: Chain, weights: Tensors, gradient: Tensors, point: Point, walk: Walk = OURS, *, until: int = -1) -> Point:
    """Walk on to the output of layer `until`; -1 is the input."""
    while point.at > until:
        point = step(chain, weights, gradient, point, walk)
    return point


def homogeneous(chain: Chain) -> bool:
    """Whether a multiple of an input gives the same multiple of every output: then twins are multiples of each other."""
    return all(layer.bias is None and layer.activation.name.startswith(("identity", "relu", "leaky")) for layer in chain.layers)


_Solved = tuple[System, EquationValues, Tensor, Tensor]
"""Equations, the x that solves them, and its residual."""


def _mended(
    chain: Chain, weights: Tensors, gradient: Tensors, point: Point, walk: Walk, unknowns: int, solved: _Solved
) -> tuple[System, Tensor, Tensor]:
    """The system, x and its residual, with values near a kink on the other side where that explains more."""
    layer, (system, target, x, residual) = chain.layers[point.at], solved
    names = [name for name in (layer.weight, layer.bias) if name]
    f, below = (t.reshape(-1, *layer.outputs) for t in (point.f, point.gradient))
    error = FURTHER * point.residual if point.residuals else residual
    near = (f.abs() <= NEAR * _each(error, f) * level(f)) & _each(residual < HOPELESS, f)
    for _ in range(MENDS):
        if not bool(near.any()):
            break
        flips = doubted(system, target, x, f, below, near)
        rows = flips.flatten(1).any(dim=1).nonzero()[:, 0]
        if not len(rows):
            break
        near &= ~flips
        trial = replace(point, f=torch.where(flips, other_side(layer.activation, f), f)[rows], gradient=below[rows])
        own, right = ({n: t[n][rows] if len(t[n]) > 1 else t[n] for n in names} for t in (weights, gradient))
        other, left = _solution(*equations(chain, own, right, trial, walk), unknowns, walk, start=x[rows])
        better = left < BETTER * residual[rows]
        kept = rows[better]
        x, residual, f = (old.index_copy(0, kept, new[better]) for old, new in ((x, other), (residual, left), (f, trial.f)))
        system, target = equations(chain, weights, gradient, replace(point, f=f), walk)
    return system, x, residual


def _solution(
    system: System, target: EquationValues, unknowns: int, walk: Walk, *, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x and its residual; so many problems at a time as there is room for."""
    layer = system.layer
    if layer.kernel is None and only_reshapes(layer.before):
        return _of_matrix(system, target, paper=not walk.scaled)
    if not walk.scaled:
        solved = least_squares(system, target, tolerance=walk.tolerance, iterations=walk.iterations)
        return solved.x, solved.residual
    size = max(1, _room(system.k.device) // bytes_of(layer))
    found = [
        _part(system.of(rows), target.of(rows), unknowns, walk, None if start is None else start[rows])
        for rows in _slices(len(system.k), size)
    ]
    return torch.cat([one.x for one in found]), torch.cat([one.residual for one in found])


def _part(system: System, target: EquationValues, unknowns: int, walk: Walk, start: Tensor | None) -> Solved:
    spare, inverse = _spare(system, unknowns), inverse_of(system)
    if inverse is not None:
        determined = torch.isfinite(spare).reshape(-1, *[1] * len(system.layer.inputs))
        inverse = _where(determined, inverse)  # else of all solutions the shortest
    return least_squares(
        system, target, tolerance=walk.tolerance, iterations=walk.iterations, start=start, inverse=inverse, spare=spare
    )


def _where(condition: Tensor, inverse: Inverse) -> Inverse:
    return inverse if bool(condition.all()) else lambda x: torch.where(condition, inverse(x), x)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _spare(system: System, unknowns: int) -> Tensor:
    """(N,) independent equations beyond the unknowns; inf where there are hardly any, so that noise has nowhere to show."""
    assert system.scale is not None
    weights, gradients = ((scale > 0).flatten(1).sum(dim=1) for scale in (system.scale.weights, system.scale.gradients))
    spare = weights + gradients - system.layer.shape[0] ** 2 - unknowns
    return torch.where(spare > HARDLY, spare.to(system.k.dtype), torch.inf)


def _room(device: torch.device) -> int:
    """Bytes to solve in."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 2**27


def _of_matrix(system: System, target: EquationValues, *, paper: bool) -> tuple[Tensor, Tensor]:
    """Of a matrix, gradient constraints alone give x: by least squares, or as the paper by the mean over outputs (its eq. 3)."""
    k, rows, scale = system.k[..., 0], target.gradients, system.scale
    assert scale is not None
    if paper:
        there = (k != 0).to(k.dtype)
        share = torch.where(k != 0, 1 / k, 0) / there.sum(dim=1, keepdim=True).clamp(min=1)
    else:
        sure = k * scale.gradients[..., 0].square()
        share = sure / (sure * k).sum(dim=1, keepdim=True).clamp(min=torch.finfo(k.dtype).tiny)
    x = (share[:, None] @ rows)[:, 0].reshape(len(k), *system.layer.inputs)
    wanted = target * scale
    missed = wanted.plus(system.apply(x), torch.full_like(k[:, 0], -1))
    return x, (missed.squared_norm() / wanted.squared_norm().clamp(min=torch.finfo(k.dtype).tiny)).sqrt()


def _offset(layer: Layer, bias: Tensor) -> Tensor:
    """A bias (1 or N, C) as it comes out of the layer, (1 or N, *outputs)."""
    spread = bias.reshape(*bias.shape, *[1] * (len(layer.given) - 1)).expand(-1, *layer.given)
    return through(layer.after, spread)


def _each(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _inverse(lengths: Tensor) -> Tensor:
    return torch.where(lengths > 0, 1 / lengths, 0)
