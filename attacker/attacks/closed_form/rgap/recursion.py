"""R-GAP as a recursion: from the gradient of the last layer back to the input, with one linear system per layer.

Zhu and Blaschko 2021, algorithm 1. For each layer with output f and input x, from the last to the first:

    z = inverse(f);  k = dL/df * slope(f);  x = lstsq([W; K], [z - b; dL/dW]);  f, dL/df = x, W^T k

`slope` is the derivative of the activation, and the input x is the output f of the layer before. The method is extended to biases
and smooth activations here, so that it also inverts the sigmoid networks of the papers DLG and CPL.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.footprint import find_used_values
from attacker.attacks.closed_form.rgap.heads import HeadReading, read_heads
from attacker.attacks.closed_form.rgap.preconditioning import Inverse, build_preconditioner, estimate_bytes
from attacker.attacks.closed_form.rgap.signs import compute_root_mean_square, find_doubtful_signs, flip_outputs
from attacker.attacks.closed_form.rgap.system import (
    EquationValues,
    LayerSystem,
    SystemSolutions,
    apply_maps,
    broadcast_like,
    solve_least_squares,
)
from attacker.attacks.networks.activations import settle_zeros
from attacker.attacks.networks.chain import Chain
from attacker.attacks.networks.layers import Layer
from attacker.attacks.networks.traced import are_reshapes
from defenses.base import Tensors


@dataclass(frozen=True, kw_only=True)
class RgapSettings:
    """The settings of R-GAP, which solves for the input of each layer, from the last to the first.

    The defaults differ from the paper; `PAPER_RGAP` holds the settings of its authors' code.
    scaled:    whether to divide each equation by its expected error (`_estimate_errors`), and to use a preconditioner where there
               is one. False solves unscaled equations; linear layers without pooling are then solved by the paper's equation 3.
    mended:    whether to correct wrong signs of pre-activations near zero (`signs`).
    precision: data type to which the values passed from layer to layer are rounded.
    tolerance, iterations: relative gradient norm at which the least-squares solver stops, and its largest number of iterations.
    """

    scaled: bool = True
    mended: bool = True
    precision: torch.dtype = torch.float64
    tolerance: float = 1e-12
    iterations: int = 3000


DEFAULT_RGAP = RgapSettings()
PAPER_RGAP = RgapSettings(scaled=False, mended=False, precision=torch.float32, tolerance=1e-13, iterations=30_000)
"""The settings of the authors' code: unscaled equations, and float32 between layers."""


MAX_FLIPS = 16
"""Largest number of signs of one layer that are changed."""
MAX_KINK_DISTANCE = 5.0
"""Largest distance of a value from zero, in units of its error, at which the opposite sign is tried."""
ERROR_GROWTH = 4.0
"""Assumed error of a layer's values relative to the residual of the layers behind it."""
MAX_FLIP_RESIDUAL = 0.3
"""Relative residual of a layer above which no signs are changed, since wrong signs alone cannot cause so large a residual."""
MAX_FLIP_RATIO = 0.9
"""Largest residual after a sign change, relative to the one before, at which the change is kept."""
MIN_SURPLUS_EQUATIONS = 32
"""Number of surplus equations above which the residual is a measure of noise."""


@dataclass(frozen=True)
class Point:
    """The state of R-GAP, which solves for the input of each layer from the last to the first, between two layers.

    The state is for N problems, which are gradients of one example each.
    at:        index of the layer whose output is known; -1 if it is the network's input.
    f, gradient: that output and the loss gradient there, in the shape of the next layer's inputs, (N, *inputs).
    head:      the solution of the last layer from which R-GAP started.
    residuals: relative residuals (N,) of the layers solved so far, without the last layer, in the order in which they were
               solved.
    """

    at: int
    f: Tensor
    gradient: Tensor
    head: HeadReading
    residuals: tuple[Tensor, ...] = ()

    @property
    def residual(self) -> Tensor:
        """The largest residual of all layers solved so far, (N,); 0 if there is none."""
        return torch.stack(self.residuals).amax(dim=0) if self.residuals else torch.zeros_like(self.f.flatten(1)[:, 0])


def solve_last_layer(chain: Chain, weights: Tensors, gradient: Tensors, loss: str) -> list[Point]:
    """Return the possible solutions of the last layer for N problems, each as the `Point` at the layer's input.

    Every `Point` holds one solution for each problem. There are several points if the gradient leaves the label, or the scale of
    the layer's input, open (`read_heads`).
    weights: by name, (1 or N, *shape). gradient: by name, (N, *shape). loss: name of the loss.
    Raises ValueError if the last layer is a convolution, or if its gradient cannot be solved (`read_heads`).
    """
    layer = chain.layers[-1]
    if layer.kernel is not None:
        raise ValueError(
            f"the last layer, {layer.name}, is a convolution, and R-GAP needs a linear last layer; a search, such as the attack "
            "cpl, does not need it"
        )
    weight, bias = weights[layer.weight], weights[layer.bias] if layer.bias else None
    heads = read_heads(loss, weight, bias, gradient[layer.weight], gradient[layer.bias] if layer.bias else None)
    return [_build_point(layer, weight, gradient[layer.weight], head, len(chain.layers) - 2) for head in heads]


def _build_point(layer: Layer, weight: Tensor, gradient: Tensor, head: HeadReading, at: int) -> Point:
    system = LayerSystem(layer, weight, head.k)
    below = system.compute_gradient_below()
    if are_reshapes(layer.before):
        return Point(at, head.features.reshape(below.shape), below, head)
    lengths = head.k.abs()[..., None].expand_as(gradient)  # selects the pooling's input of least norm
    system.scale = EquationValues(torch.zeros_like(head.k), invert_lengths(lengths))
    solved = solve_least_squares(system, EquationValues(torch.zeros_like(head.k), gradient))
    return Point(at, solved.x, below, head)


def solve_layer(chain: Chain, weights: Tensors, gradient: Tensors, point: Point, rgap: RgapSettings = DEFAULT_RGAP) -> Point:
    """Solve the layer `point.at` for its input, and return the `Point` at this input."""
    system, target = build_equations(chain, weights, gradient, point, rgap)
    unknowns = int(find_used_values(chain)[point.at].sum())
    x, residual = _solve_system(system, target, unknowns, rgap)
    if rgap.mended and not system.layer.activation.smooth and are_reshapes(system.layer.after):
        system, x, residual = _flip_signs(chain, weights, gradient, point, rgap, unknowns, (system, target, x, residual))
    if point.at:
        x = settle_zeros(chain.layers[point.at - 1].activation, x)
    x, below = (t.to(rgap.precision).to(t.dtype) for t in (x, system.compute_gradient_below()))
    return replace(point, at=point.at - 1, f=x, gradient=below, residuals=(*point.residuals, residual))


def build_equations(
    chain: Chain, weights: Tensors, gradient: Tensors, point: Point, rgap: RgapSettings = DEFAULT_RGAP
) -> tuple[LayerSystem, EquationValues]:
    """Return the equations for the input of layer `point.at`, and their right-hand sides without scaling.

    `LayerSystem.scale` is 0 for weight constraints whose right-hand side is unknown: at the zeros of a ReLU, and at outputs that
    no later layer uses. For the other equations, it is 1 over the expected error if `rgap.scaled` is set (0 if that error is 0 or
    infinite), and 1 otherwise.
    """
    layer = chain.layers[point.at]
    f, act = point.f.reshape(-1, *layer.outputs), layer.activation
    z, k = act.inverse(f), point.gradient.reshape(f.shape) * act.slope(f)
    z, k = (t.to(rgap.precision).to(t.dtype) for t in (z, k))
    system = LayerSystem(layer, weights[layer.weight], k)
    known = act.known(f) * find_used_values(chain)[point.at + 1].to(f.device)
    sides = gradient[layer.weight].reshape(len(z), layer.shape[0], -1)
    if rgap.scaled:
        errors = _estimate_errors(system, f * known, point.gradient.reshape(f.shape), sides)
        system.scale = EquationValues(known * invert_lengths(errors.weights), invert_lengths(errors.gradients))
    else:
        system.scale = EquationValues(known, torch.ones_like(sides))
    offset = compute_offset(layer, weights[layer.bias]) if layer.bias else 0
    return system, EquationValues(z - offset, sides)


def _estimate_errors(system: LayerSystem, f: Tensor, gradient: Tensor, sides: Tensor) -> EquationValues:
    """Return the expected error of each equation of a layer, in units of the relative error of f.

    The relative error of f is the absolute error of its entries, assumed to be equal for all entries of a problem, divided by
    their root mean square. The gradient is assumed to have the same relative error. An error of f causes an error of z that is
    larger by 1 / slope, so that saturated values contribute little; it is inf at a slope of 0. An error of f also changes the
    slope, and with it k = gradient * slope.
    f, gradient: output of the layer and the loss gradient there, (N, *outputs). sides: dL/dW, (N, C_out, values under the
                 kernel).
    """
    act = system.layer.activation
    size = compute_root_mean_square(f)
    slope = act.slope(f)
    doubt = torch.hypot(gradient * act.bend(f) * size, slope * compute_root_mean_square(gradient))
    lengths, k = (LayerSystem(system.layer, system.weight, t).compute_norms().gradients for t in (doubt, gradient * slope))
    inputs = sides.flatten(1).norm(dim=1) * invert_lengths(k.flatten(1).norm(dim=1))  # estimate of the norm of a patch
    return EquationValues(size / slope, lengths * inputs[:, None, None])


def solve_layers(
    chain: Chain, weights: Tensors, gradient: Tensors, point: Point, rgap: RgapSettings = DEFAULT_RGAP, *, until: int = -1
) -> Point:
    """Solve layer after layer until the output of layer `until` is known; -1 is the network's input."""
    while point.at > until:
        point = solve_layer(chain, weights, gradient, point, rgap)
    return point


def is_homogeneous(chain: Chain) -> bool:
    """Return whether the network is positively homogeneous: it has no biases, and all activations are ReLU, leaky ReLU or none.

    Twins, two inputs with the same gradient, are then multiples of each other.
    """
    return all(layer.bias is None and layer.activation.name.startswith(("identity", "relu", "leaky")) for layer in chain.layers)


_Solved = tuple[LayerSystem, EquationValues, Tensor, Tensor]
"""Equations of a layer, their right-hand sides, the solution x, and its relative residual."""


def _flip_signs(
    chain: Chain, weights: Tensors, gradient: Tensors, point: Point, rgap: RgapSettings, unknowns: int, solved: _Solved
) -> tuple[LayerSystem, Tensor, Tensor]:
    """Change signs of pre-activations near zero where that reduces the residual; return new equations, solution and residual.

    unknowns: number of the layer's input values that the network uses.
    solved:   the equations before the changes, their right-hand sides, solution and residual.
    """
    layer, (system, target, x, residual) = chain.layers[point.at], solved
    names = [name for name in (layer.weight, layer.bias) if name]
    f, below = (t.reshape(-1, *layer.outputs) for t in (point.f, point.gradient))
    error = ERROR_GROWTH * point.residual if point.residuals else residual
    near = (f.abs() <= MAX_KINK_DISTANCE * broadcast_like(error, f) * compute_root_mean_square(f)) & broadcast_like(
        residual < MAX_FLIP_RESIDUAL, f
    )
    for _ in range(MAX_FLIPS):
        if not bool(near.any()):
            break
        flips = find_doubtful_signs(system, target, x, f, below, near)
        rows = flips.flatten(1).any(dim=1).nonzero()[:, 0]
        if not len(rows):
            break
        near &= ~flips
        trial = replace(point, f=torch.where(flips, flip_outputs(layer.activation, f), f)[rows], gradient=below[rows])
        row_weights, row_gradient = ({n: t[n][rows] if len(t[n]) > 1 else t[n] for n in names} for t in (weights, gradient))
        solution, new_residual = _solve_system(
            *build_equations(chain, row_weights, row_gradient, trial, rgap), unknowns, rgap, start=x[rows]
        )
        better = new_residual < MAX_FLIP_RATIO * residual[rows]
        improved = rows[better]
        x, residual, f = (
            old.index_copy(0, improved, new[better]) for old, new in ((x, solution), (residual, new_residual), (f, trial.f))
        )
        system, target = build_equations(chain, weights, gradient, replace(point, f=f), rgap)
    return system, x, residual


def _solve_system(
    system: LayerSystem, target: EquationValues, unknowns: int, rgap: RgapSettings, *, start: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Solve a layer's equations for its input x; return x and the relative residual (N,) of the scaled equations.

    With preconditioning (`rgap.scaled`), convolutions are solved in batches of problems that fit into memory.
    unknowns: number of the layer's input values that the network uses. start: x at which the iterations begin; 0 if None.
    """
    layer = system.layer
    if layer.kernel is None and are_reshapes(layer.before):
        return _solve_linear_layer(system, target, paper=not rgap.scaled)
    if not rgap.scaled:
        solved = solve_least_squares(system, target, tolerance=rgap.tolerance, iterations=rgap.iterations)
        return solved.x, solved.residual
    size = max(1, _get_memory_limit(system.k.device) // estimate_bytes(layer))
    solutions = [
        _solve_part(system.select(rows), target.select(rows), unknowns, rgap, None if start is None else start[rows])
        for rows in (slice(i, i + size) for i in range(0, len(system.k), size))
    ]
    return torch.cat([solution.x for solution in solutions]), torch.cat([solution.residual for solution in solutions])


def _solve_part(
    system: LayerSystem, target: EquationValues, unknowns: int, rgap: RgapSettings, start: Tensor | None
) -> SystemSolutions:
    spare, inverse = _count_spare_equations(system, unknowns), build_preconditioner(system)
    if inverse is not None:
        determined = torch.isfinite(spare).reshape(-1, *[1] * len(system.layer.inputs))
        inverse = _restrict_inverse(determined, inverse)  # without a preconditioner, CGLS finds the solution of least norm
    return solve_least_squares(
        system, target, tolerance=rgap.tolerance, iterations=rgap.iterations, start=start, inverse=inverse, spare=spare
    )


def _restrict_inverse(condition: Tensor, inverse: Inverse) -> Inverse:
    return inverse if bool(condition.all()) else lambda x: torch.where(condition, inverse(x), x)


def _count_spare_equations(system: LayerSystem, unknowns: int) -> Tensor:
    """Return the number of independent equations minus `unknowns`, (N,); inf if that is too small to estimate noise."""
    assert system.scale is not None
    weights, gradients = ((scale > 0).flatten(1).sum(dim=1) for scale in (system.scale.weights, system.scale.gradients))
    spare = weights + gradients - system.layer.shape[0] ** 2 - unknowns
    return torch.where(spare > MIN_SURPLUS_EQUATIONS, spare.to(system.k.dtype), torch.inf)


def _get_memory_limit(device: torch.device) -> int:
    """Return the memory in bytes that solving may use: a quarter of a GPU's free memory, or 128 MiB on a CPU."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 2**27


def _solve_linear_layer(system: LayerSystem, target: EquationValues, *, paper: bool) -> tuple[Tensor, Tensor]:
    """Solve for the input x of a linear layer, whose gradient constraints alone determine it.

    Returns x and its relative residual (N,) over the scaled equations of both kinds.
    paper: average over outputs as in equation 3 of the paper, instead of weighted least squares.
    """
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
    missed = wanted.add(system.apply(x), torch.full_like(k[:, 0], -1))
    return x, (missed.squared_norm() / wanted.squared_norm().clamp(min=torch.finfo(k.dtype).tiny)).sqrt()


def compute_offset(layer: Layer, bias: Tensor) -> Tensor:
    """Return a bias's contribution, after pooling, to the layer's pre-activation, (1 or N, *outputs). bias: (1 or N, C)."""
    spread = bias.reshape(*bias.shape, *[1] * (len(layer.product_outputs) - 1)).expand(-1, *layer.product_outputs)
    return apply_maps(layer.after, spread)


def invert_lengths(lengths: Tensor) -> Tensor:
    """Return 1 / lengths for lengths of at least 0, and 0 for lengths of 0."""
    return torch.where(lengths > 0, 1 / lengths, 0)
