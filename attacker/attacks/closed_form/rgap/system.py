"""The linear equations for one layer's input, for a batch of problems, without storing their matrix.

For a layer z = W x + b, the pre-activations z and their gradient k = dL/dz are known from the layers behind it. Its input x
fulfils (R-GAP, eq. 15 and 16)

    W x = z - b        weight constraints, one per pre-activation
    K x = dL/dW        gradient constraints, one per weight

With the patches of x as columns of a matrix U, one for each position of the kernel, both are small matrix products: W U = z - b
and k U^T = dL/dW. A problem is the gradient of one example, from which the layer's input is to be found.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vjp
from torch.nn import functional

from attacker.attacks.networks.layers import Layer
from attacker.attacks.networks.traced import Linear, are_reshapes


@dataclass(frozen=True)
class EquationValues:
    """One value for each equation of a layer, such as right-hand sides, residuals or scales.

    weights:   for the weight constraints, (N, *outputs).
    gradients: for the gradient constraints, (N, C_out, values under the kernel).
    The first axis is 1 instead of N for values that hold for all problems.
    """

    weights: Tensor
    gradients: Tensor

    def __mul__(self, other: "EquationValues") -> "EquationValues":
        return EquationValues(self.weights * other.weights, self.gradients * other.gradients)

    def select(self, rows: slice) -> "EquationValues":
        """Return the values of the problems `rows` only; a tensor with a first axis of 1 is kept."""
        return EquationValues(*(values[rows] if len(values) > 1 else values for values in (self.weights, self.gradients)))

    def add(self, other: "EquationValues", share: Tensor) -> "EquationValues":
        """Return self + share * other, with one factor per problem, share: (N,)."""
        return EquationValues(
            self.weights + broadcast_like(share, other.weights) * other.weights,
            self.gradients + broadcast_like(share, other.gradients) * other.gradients,
        )

    def squared_norm(self) -> Tensor:
        """Return the sum of squares over all equations of each problem, (N,)."""
        return self.weights.flatten(1).square().sum(dim=1) + self.gradients.flatten(1).square().sum(dim=1)


class LayerSystem:
    """The equations for the input of `layer` for N problems, as a linear map [W; K] with scaled rows.

    W and K are the matrices of the weight and the gradient constraints.

    `apply` multiplies by the map, `adjoint` by its transpose.
    The constructor takes `weight`, (1 or N, *shape of the layer's weight), and k, the loss gradient at the layer's outputs before
    the activation, (N, *outputs). It stores them as (1 or N, C_out, values under the kernel) and, before any pooling of the
    outputs, as (N, C_out, places of the kernel).
    scale: factor of each equation; 0 leaves an equation out. None, as initially, for no scaling.
    """

    def __init__(self, layer: Layer, weight: Tensor, k: Tensor) -> None:
        self.layer = layer
        self.weight = weight.reshape(len(weight), layer.shape[0], -1)
        self.k = apply_transposed_maps(layer.after, k, layer.product_outputs).reshape(len(k), layer.shape[0], -1)
        self.scale: EquationValues | None = None

    def select(self, rows: slice) -> "LayerSystem":
        """Return the equations of the problems `rows` only."""
        part = copy(self)
        part.weight, part.k = self.weight[rows] if len(self.weight) > 1 else self.weight, self.k[rows]
        if self.scale is not None:
            part.scale = self.scale.select(rows)
        return part

    def apply(self, x: Tensor) -> EquationValues:
        rows = self._apply_unscaled(x)
        return rows if self.scale is None else rows * self.scale

    def adjoint(self, rows: EquationValues) -> Tensor:
        return self._apply_transpose(rows if self.scale is None else rows * self.scale)

    def _apply_unscaled(self, x: Tensor) -> EquationValues:
        columns = unfold(self.layer, apply_maps(self.layer.before, x))
        outputs = (self.weight @ columns).reshape(len(x), *self.layer.product_outputs)
        return EquationValues(apply_maps(self.layer.after, outputs), self.k @ columns.mT)

    def _apply_transpose(self, rows: EquationValues) -> Tensor:
        products = apply_transposed_maps(self.layer.after, rows.weights, self.layer.product_outputs)
        columns = self.weight.mT @ products.reshape(len(products), self.layer.shape[0], -1) + rows.gradients.mT @ self.k
        return apply_transposed_maps(self.layer.before, fold(self.layer, columns), self.layer.inputs)

    def compute_gradient_below(self) -> Tensor:
        """Return the loss gradient at the layer's input, W^T k with unscaled W, (N, *inputs)."""
        return apply_transposed_maps(self.layer.before, fold(self.layer, self.weight.mT @ self.k), self.layer.inputs)

    def compute_norms(self) -> EquationValues:
        """Return the norm of each equation's coefficients, a row of the matrix [W; K], before they are scaled.

        Coefficients of values of the padding, which are 0, do not count. The norm is approximate with average pooling.
        """
        inside = unfold(self.layer, torch.ones(1, *self.layer.product_inputs, dtype=self.k.dtype, device=self.k.device))
        weights = (self.weight.square() @ inside).reshape(-1, *self.layer.product_outputs)
        weights = apply_maps(self.layer.after, weights).sqrt().expand(len(self.k), *self.layer.outputs)
        return EquationValues(weights, (self.k.square() @ inside.mT).sqrt())


def unfold(layer: Layer, x: Tensor) -> Tensor:
    """Return the input patches under the kernel as columns, (N, values under the kernel, places of the kernel).

    x: the layer's input after the reshapes and pooling that precede the kernel, (N, *layer.product_inputs). A linear layer has
       one place.
    """
    if layer.kernel is None:
        return x[..., None]
    return functional.unfold(x, layer.kernel, layer.dilation, layer.padding, layer.stride)


def fold(layer: Layer, columns: Tensor) -> Tensor:
    """Return the transpose of `unfold`, (N, *layer.product_inputs): the sums of the patches' entries of each input value."""
    if layer.kernel is None:
        return columns[..., 0]
    sides = layer.product_inputs[1:]
    return functional.fold(columns, sides, layer.kernel, layer.dilation, layer.padding, layer.stride)


def apply_maps(maps: Sequence[Linear], x: Tensor) -> Tensor:
    for layer_map in maps:
        x = layer_map(x)
    return x


def apply_transposed_maps(maps: Sequence[Linear], y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Apply the transposes of the linear `maps` to y, from the last to the first; the result has the shape (N, *shape)."""
    if not maps:
        return y
    if are_reshapes(maps):
        return y.reshape(len(y), *shape)
    transpose = vjp(lambda x: apply_maps(maps, x), torch.zeros(len(y), *shape, dtype=y.dtype, device=y.device))[1]
    result: Tensor = transpose(y)[0]
    return result


@dataclass(frozen=True)
class SystemSolutions:
    """The least-squares solutions of N problems.

    x: (N, *inputs). residual: (N,) norm of the residual, relative to the norm of the right-hand sides, both of the scaled
       equations. iterations: number of iterations that were made.
    """

    x: Tensor
    residual: Tensor
    iterations: int


CHECK_INTERVAL = 10
"""Number of iterations between two convergence checks, each of which synchronises with a GPU."""


def solve_least_squares(
    system: LayerSystem,
    target: EquationValues,
    *,
    tolerance: float = 1e-14,
    iterations: int = 2000,
    start: Tensor | None = None,
    inverse: Callable[[Tensor], Tensor] | None = None,
    spare: Tensor | None = None,
) -> SystemSolutions:
    """Solve the equations by least squares, with conjugate gradients on the normal equations (CGLS).

    If there are several solutions, the one nearest to `start`, or to 0, is approached, unless `inverse` is given.
    target:    right-hand sides without scaling; `system.scale` is applied to them.
    tolerance: norm of the gradient, relative to the initial one, at which a problem has converged. It is checked every
               CHECK_INTERVAL iterations.
    iterations: largest number of iterations.
    inverse:   preconditioner, an approximate inverse of the normal matrix. It decides which of several solutions is found.
    spare:     (N,) number of surplus equations. If given, a problem also stops when CHECK_INTERVAL iterations reduce the squared
               residual by less than 1 / spare of it, one surplus equation's share, since such changes are below the noise.
    """
    flat, precondition = _Flat(system, target), inverse or (lambda x: x)
    x = torch.zeros(len(system.k), *system.layer.inputs, dtype=system.k.dtype, device=system.k.device) if start is None else start
    residual = flat.target if start is None else flat.target - flat.apply(x)
    gradient = flat.adjoint(residual)
    direction = precondition(gradient)
    power, tiny = _dot(gradient, direction), torch.finfo(x.dtype).tiny
    enough, live, left, done = tolerance**2 * power, (power > 0).to(x.dtype), _dot(residual, residual), 0
    for done in range(1, iterations + 1):
        image = flat.apply(direction)
        step = live * power / (_dot(image, image) + tiny)
        x = torch.addcmul(x, broadcast_like(step, x), direction)
        residual = torch.addcmul(residual, step[:, None], image, value=-1)
        if done % CHECK_INTERVAL == 0:
            previous, left = left, _dot(residual, residual)
            running = power > enough
            live = live * (running if spare is None else running & ((previous - left) * spare > left))
            if not bool(live.any()):
                break
        gradient = flat.adjoint(residual)
        better = precondition(gradient)
        previous, power = power, _dot(gradient, better)
        direction = torch.addcmul(better, broadcast_like(power / (previous + tiny), better), direction)
    whole = _dot(flat.target, flat.target).clamp(min=tiny)
    return SystemSolutions(x, (_dot(residual, residual) / whole).sqrt(), done)


class _Flat:
    """The scaled equations of a system, with the values of all equations of a problem in one vector."""

    def __init__(self, system: LayerSystem, target: EquationValues) -> None:
        self.system = system
        self.sides = target.weights.shape, target.gradients.shape
        self.cut = target.weights[0].numel()
        self.scale = None
        if system.scale is not None:
            scale = system.scale
            self.scale = _concatenate(
                EquationValues(scale.weights.expand_as(target.weights), scale.gradients.expand_as(target.gradients))
            )
        self.target = self._scale_rows(_concatenate(target))

    def apply(self, x: Tensor) -> Tensor:
        return self._scale_rows(_concatenate(self.system._apply_unscaled(x)))

    def adjoint(self, rows: Tensor) -> Tensor:
        scaled = self._scale_rows(rows)
        weights, gradients = scaled[:, : self.cut], scaled[:, self.cut :]
        return self.system._apply_transpose(EquationValues(weights.reshape(self.sides[0]), gradients.reshape(self.sides[1])))

    def _scale_rows(self, rows: Tensor) -> Tensor:
        return rows if self.scale is None else rows * self.scale


def _concatenate(rows: EquationValues) -> Tensor:
    return torch.cat([rows.weights.flatten(1), rows.gradients.flatten(1)], dim=1)


def broadcast_like(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one value per problem, (N,), to (N, 1, ..., 1) with as many axes as `like` has."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    product: Tensor = torch.linalg.vecdot(x.flatten(1), y.flatten(1))
    return product
