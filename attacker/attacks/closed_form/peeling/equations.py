"""Equations for the network's input that follow from the gradients of several layers.

If layer i has too few equations for its own input x_i, more equations follow from the layers before it, which compute x_i from
the network's input x_0. The pre-activations z_i and their gradients k_i = dL/dz_i are known from the layers behind; x_j and k_j
are functions of x_0. K is the linear map x -> dL/dW that k defines.

    W_i x_i(x_0) = z_i - b_i,    K_i x_i(x_0) = dL/dW_i,    K_j(x_0) x_j(x_0) = dL/dW_j    for all j < i

The first two equations depend on x_0 through activations, the last also through their derivatives, which jump where an activation
has a kink. In this module, "layers below" are the layers j < i, and "places" are the positions of a kernel.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.func import vjp

from attacker.attacks.closed_form.rgap.least_squares import ConstraintWeights, compute_whitening
from attacker.attacks.closed_form.rgap.system import (
    EquationValues,
    LayerSystem,
    apply_maps,
    apply_transposed_maps,
    broadcast_like,
    fold,
    unfold,
)
from attacker.attacks.networks.layers import Layer


@dataclass(frozen=True)
class EquationSides:
    """One side, left or right, of all equations of N problems (observations), or their residuals.

    Layer i is the deficient layer: the last one that has too few equations for its own input (see the module's docstring).
    top:   values for the equations of layer i.
    below: for each layer j < i, values for the equations of its weight gradient, one per weight: (N, C_out, values under the
           kernel), where the last axis has the length C_in * kernel height * kernel width.
    """

    top: EquationValues
    below: tuple[Tensor, ...]

    def squared_norm(self) -> Tensor:
        """Return the sum of squares over all equations of each problem, (N,)."""
        return self.top.squared_norm() + sum(rows.flatten(1).square().sum(dim=1) for rows in self.below)


@dataclass(frozen=True, kw_only=True)
class ComposedEquations:
    """The equations for the network's inputs of N problems (observations), and the factors by which they are scaled.

    layers:    layers 0 to i; layer i is the one with too few equations for its input. system: the equations of layer i, scaled by
               `system.scale`. target: their right-hand sides, not scaled.
    known:     mask (N, *outputs) of the outputs of layer i at which W x_i is known. At the others, the zeros of a ReLU, the
               target is only an upper bound.
    weights:   of the layers below i, (1 or N, C_out, values under the kernel). offsets: their biases after pooling, or 0.
    gradients: dL/dW of the layers below i, not scaled. lengths: factors by which their equations are multiplied.
    low, span: normalised input for a value of 0, and difference between the normalised inputs for 1 and 0.
    """

    layers: tuple[Layer, ...]
    system: LayerSystem
    target: EquationValues
    known: Tensor
    weights: tuple[Tensor, ...]
    offsets: tuple[Tensor | float, ...]
    gradients: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...]
    low: Tensor
    span: Tensor

    @property
    def below(self) -> tuple[Layer, ...]:
        return self.layers[:-1]

    @property
    def scale(self) -> EquationValues:
        """The factor by which each equation of layer i, the one with too few equations for its input, is multiplied."""
        assert self.system.scale is not None
        return self.system.scale

    @property
    def whole(self) -> ConstraintWeights:
        """The weighting that uses all equations of the layers below unchanged."""
        return ConstraintWeights((None,) * len(self.below))

    @property
    def sides(self) -> EquationSides:
        """The right-hand sides of all equations, scaled."""
        return EquationSides(self.target * self.scale, tuple(g * s for g, s in zip(self.gradients, self.lengths, strict=True)))

    def select(self, rows: Tensor) -> Self:
        """Return only the problems with the indices `rows`."""

        def pick(values: Tensor) -> Tensor:
            return values[rows] if len(values) > 1 or len(self.system.k) == 1 else values

        system = copy(self.system)
        system.weight, system.k = pick(system.weight), system.k[rows]
        system.scale = EquationValues(pick(self.scale.weights), pick(self.scale.gradients))
        return replace(
            self,
            system=system,
            target=EquationValues(pick(self.target.weights), pick(self.target.gradients)),
            known=self.known[rows],
            weights=tuple(map(pick, self.weights)),
            offsets=tuple(b if isinstance(b, float) else pick(b) for b in self.offsets),
            gradients=tuple(map(pick, self.gradients)),
            lengths=tuple(map(pick, self.lengths)),
        )

    def linearise(self, x: Tensor, weighing: ConstraintWeights | None = None) -> "Tangent":
        """Return the linearisation of the equations at x (N, *inputs), on the scale of [0, 1].

        weighing: weights of the equations of the layers below layer i; None leaves these equations out.
        """
        inputs, columns, z, slopes = self.low + self.span * x, [], [], []
        for layer, weight, offset in zip(self.below, self.weights, self.offsets, strict=True):
            columns.append(unfold(layer, apply_maps(layer.before, inputs)))
            z.append(_map_to_outputs(layer, weight @ columns[-1]) + offset)
            inputs = layer.activation.forward(z[-1])
            slopes.append(layer.activation.slope(inputs))
        outputs, k = self.backpropagate(slopes)
        bends = tuple(map(_compute_bend, self.below, z, slopes, outputs))
        system, missed = self._linearise_top(inputs)
        return Tangent(self, x, system, missed, tuple(columns), tuple(z), tuple(slopes), outputs, k, bends, weighing)

    def _linearise_top(self, inputs: Tensor) -> tuple[LayerSystem, EquationValues]:
        """Return the equations of layer i, without upper bounds that its `inputs` fulfil, and the residual, right less left."""
        left_sides = self.system.apply(inputs)
        missed = (self.target * self.scale).add(left_sides, torch.full_like(left_sides.weights.flatten(1)[:, 0], -1))
        if bool(self.known.all()):
            return self.system, missed
        system, holds = copy(self.system), (self.known | (missed.weights < 0)).to(left_sides.weights.dtype)
        system.scale = EquationValues(self.scale.weights * holds, self.scale.gradients)
        return system, EquationValues(missed.weights * holds, missed.gradients)

    def backpropagate(self, slopes: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return two tuples of loss gradients, with one entry for each layer below, from first to last.

        The first holds the gradients by the layer's outputs after the activation, (N, *outputs), the second the gradients by the
        products W U of weights and input patches, before pooling and activation, (N, C_out, places).
        slopes: derivatives of the activations of the layers below, from first to last.
        """
        outputs: list[Tensor] = []
        products: list[Tensor] = []
        gradient = self.system.compute_gradient_below() if self.below else self.system.k
        for j in reversed(range(len(self.below))):
            outputs.insert(0, gradient)
            products.insert(0, _map_to_products(self.layers[j], slopes[j] * gradient))
            gradient = _apply_transposed_weight(self.layers[j], self.weights[j], products[0])
        return tuple(outputs), tuple(products)


@dataclass(frozen=True)
class Tangent:
    """Linearisation at x of the equations for the network's input, where layer i has too few equations for its own input.

    `apply` multiplies a change of x by the scaled Jacobian, weighted by `weighing`; `adjoint` multiplies by its transpose. Slopes
    of piecewise linear activations count as constant.
    x:        (N, *inputs), in units in which data are in [0, 1], not normalised.
    system:   the equations of layer i, without the upper bounds that x fulfils (see `ComposedEquations.known`).
    top:      residual of these equations: right-hand side less left-hand side, scaled.
    columns, z, slopes: for each layer below, the input patches, pre-activations, and derivatives of the activation.
    outputs, k: for each layer below, the loss gradients at its outputs after the activation and at its products W U, as
              `ComposedEquations.backpropagate` returns them.
    bends:    for each layer below, the derivative of dL/dz by z at a fixed gradient of the outputs, (N, *outputs); None for
              piecewise linear activations.
    weighing: weights of the equations of the layers below; None leaves these equations out.
    """

    problem: ComposedEquations
    x: Tensor
    system: LayerSystem
    top: EquationValues
    columns: tuple[Tensor, ...]
    z: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    bends: tuple[Tensor | None, ...]
    weighing: ConstraintWeights | None

    @cached_property
    def missed(self) -> EquationSides:
        """Residual of all equations: right-hand sides less left-hand sides, scaled and weighted.

        Without `weighing`, it is 0 for the equations of the layers below.
        """
        problem = self.problem
        below = (k @ u.mT * s for k, u, s in zip(self.k, self.columns, problem.lengths, strict=True))
        wanted = problem.sides.below
        return self.weigh(EquationSides(self.top, tuple(a - b for a, b in zip(wanted, below, strict=True))))

    def select(self, rows: Tensor) -> "Tangent":
        """Return the linearisation at the same x for the problems with the indices `rows`.

        The result leaves out the equations of the layers below.
        """
        return self.problem.select(rows).linearise(self.x[rows])

    def weigh(self, sides: EquationSides, *, transposed: bool = False) -> EquationSides:
        if self.weighing is None:
            return EquationSides(sides.top, tuple(torch.zeros_like(rows) for rows in sides.below))
        return EquationSides(sides.top, self.weighing.apply(sides.below, transposed=transposed))

    def apply(self, v: Tensor) -> EquationSides:
        problem = self.problem
        v, columns, changes = problem.span * v, [], []
        for layer, weight, slope in zip(problem.below, problem.weights, self.slopes, strict=True):
            columns.append(unfold(layer, apply_maps(layer.before, v)))
            changes.append(_map_to_outputs(layer, weight @ columns[-1]))
            v = slope * changes[-1]
        top = self.system.apply(v)
        if self.weighing is None:
            return EquationSides(top, tuple(torch.zeros_like(s) for s in problem.lengths))
        below = [k @ u.mT for k, u in zip(self.k, columns, strict=True)]
        if any(bend is not None for bend in self.bends):
            for j, change in enumerate(self._compute_slope_changes(changes)):
                below[j] = below[j] + change @ self.columns[j].mT
        return self.weigh(EquationSides(top, tuple(rows * s for rows, s in zip(below, problem.lengths, strict=True))))

    def adjoint(self, sides: EquationSides) -> Tensor:
        problem, weighed = self.problem, self.weigh(sides, transposed=True)
        rows = [r * s for r, s in zip(weighed.below, problem.lengths, strict=True)]
        curved = any(bend is not None for bend in self.bends) and self.weighing is not None
        extra = self._transpose_slope_changes(rows) if curved else None
        v = self.system.adjoint(weighed.top)
        for j in reversed(range(len(problem.below))):
            layer, weight = problem.layers[j], problem.weights[j]
            change = self.slopes[j] * v
            if extra is not None:
                change = change + extra[j]
            columns = weight.mT @ _map_to_products(layer, change) + rows[j].mT @ self.k[j]
            v = apply_transposed_maps(layer.before, fold(layer, columns), layer.inputs)
        return problem.span * v

    def _compute_slope_changes(self, changes: Sequence[Tensor]) -> list[Tensor]:
        """Return, for each layer below, the change of k (N, C_out, places) that is due to changes of activation slopes.

        changes: for each layer below, the change of its pre-activations z, (N, *outputs), which changes the slopes.
        """
        slope_changes: list[Tensor] = []
        behind: Tensor | float = 0.0
        for j in reversed(range(len(changes))):
            layer, bend = self.problem.layers[j], self.bends[j]
            change = self.slopes[j] * behind + (0 if bend is None else bend * changes[j])
            slope_changes.insert(0, _map_to_products(layer, change))
            behind = _apply_transposed_weight(layer, self.problem.weights[j], slope_changes[0])
        return slope_changes

    def _transpose_slope_changes(self, rows: Sequence[Tensor]) -> list[Tensor]:
        transposed = []
        ahead: Tensor | float = 0.0
        for j, layer in enumerate(self.problem.below):
            change = _map_to_outputs(layer, rows[j] @ self.columns[j] + ahead)
            bend = self.bends[j]
            transposed.append(torch.zeros_like(change) if bend is None else bend * change)
            if j + 1 < len(self.problem.below):
                following = self.problem.layers[j + 1]
                columns = unfold(following, apply_maps(following.before, self.slopes[j] * change))
                ahead = self.problem.weights[j + 1] @ columns
        return transposed

    def suppress_doubtful(self, unsure: Sequence[Tensor]) -> ConstraintWeights:
        """Return weights for the equations of the layers below that suppress what depends on uncertain activation slopes.

        The slope of a ReLU or leaky ReLU is uncertain if the sign of its pre-activation is. The slope affects k at that position
        and in the layers before, and thus the equations k U^T = dL/dW of a filter by a multiple of the input patch there, a
        column of U. `compute_whitening` derives the weights from the variance of k.
        unsure: for each layer below, (N,) magnitude of a pre-activation below which its sign is uncertain.
        """
        problem = self.problem
        factors: list[Tensor | None] = []
        behind: Tensor | float = 0.0
        for j in reversed(range(len(problem.below))):
            layer = problem.layers[j]
            jump = _measure_jump(layer) * self.outputs[j] * (self.z[j].abs() < broadcast_like(unsure[j], self.z[j]))
            variance = _map_to_products(layer, self.slopes[j].square() * behind + jump.square())
            factors.insert(0, compute_whitening(self.columns[j], variance, problem.lengths[j]) if bool(variance.any()) else None)
            behind = _apply_transposed_weight(layer, problem.weights[j].square(), variance)
        return ConstraintWeights(tuple(factors))


def _compute_bend(layer: Layer, z: Tensor, slope: Tensor, gradient: Tensor) -> Tensor | None:
    if not layer.activation.smooth or layer.activation.name == "identity":
        return None
    bent: Tensor = vjp(layer.activation.slope, layer.activation.forward(z))[1](slope)[0]
    return bent * gradient


def _measure_jump(layer: Layer) -> float:
    """Return by how much the derivative of a layer's activation jumps at z = 0; 0 for smooth activations."""
    if layer.activation.smooth:
        return 0.0
    ends = layer.activation.slope(torch.tensor([-1.0, 1.0], dtype=torch.float64))
    return float(ends[1] - ends[0])


def _map_to_outputs(layer: Layer, product: Tensor) -> Tensor:
    """Return the pre-activation without bias, (N, *outputs), of products W U, (N, C_out, places): their pooling and reshapes."""
    return apply_maps(layer.after, product.reshape(len(product), *layer.product_outputs))


def _map_to_products(layer: Layer, outputs: Tensor) -> Tensor:
    """Apply the transpose of `_map_to_outputs` to values (N, *outputs), and return (N, C_out, places)."""
    return apply_transposed_maps(layer.after, outputs, layer.product_outputs).reshape(len(outputs), layer.shape[0], -1)


def _apply_transposed_weight(layer: Layer, weight: Tensor, k: Tensor) -> Tensor:
    """Return W^T k for k (N, C_out, places), in the shape of the layer's input before its pooling, (N, *inputs)."""
    return apply_transposed_maps(layer.before, fold(layer, weight.mT @ k), layer.inputs)
