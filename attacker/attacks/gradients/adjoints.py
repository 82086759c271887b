"""Explicit formulas for the weight gradients of many problems that share weights, and for their derivative by the examples.

In a chain of layers, z[i] = w[i] * a[i] + b[i] and a[i + 1] = f[i](z[i]). With d[i] = dL/dz[i], the gradient of w[i] is the
product of a[i] and d[i], for each problem separately. Let D be a distance that depends on these gradients, and
v[i] = dD/d(dL/dw[i]). Then dD/dx is the gradient by x of the directional derivative of L along v. Computing it takes one more
forward and backward pass (Pearlmutter 1994, "Fast exact multiplication by the Hessian", section 3, with its R{w} = v), where
u[i] = dL/da[i] and v_b[i] is the part of v for b[i]:

    Rz[i] = w[i] * Ra[i] + v[i] * a[i] + v_b[i],    Ra[i + 1] = f'(z[i]) Rz[i],    Ra[0] = 0
    Ru[i] = w[i]^T Rd[i] + v[i]^T d[i],    Rd[i - 1] = f'(z[i - 1]) Ru[i] + f''(z[i - 1]) Rz[i - 1] u[i],    dD/dx = Ru[0]

The backward pass starts with the last layer's Rd = (d^2 L / dz^2) Rz. Compared with double backward in autograd, no graph is
recorded, image patches and activation slopes are computed once and reused, and PyTorch can compile the whole evaluation.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vjp
from torch.nn import functional

from attacker.attacks.gradients import convolutions
from attacker.attacks.gradients.convolutions import Geometry
from attacker.attacks.gradients.layer_gradients import compute_linear_bias_gradients, compute_linear_weight_gradients
from attacker.attacks.networks.chain import Chain, read_chain
from attacker.attacks.networks.layers import Layer
from attacker.attacks.networks.traced import NotAChain, are_reshapes
from attacker.attacks.simulation.gradients import build_gradient, draw_test_problems, evaluate_test_problems, is_close
from defenses.rules import Gradient, Weights
from fedsim import models
from fedsim.models.losses import Loss
from fedsim.recording.observation import DataSpec

log = logging.getLogger(__name__)

Back = Callable[[Gradient], tuple[Tensor, ...]]
"""Vector-Jacobian product: maps the derivative of a function by the weight gradients to its derivatives by x (P, N, *shape) and,
if labels are soft, by y (P, N, K)."""


class Adjoints(Protocol):
    """Protocol of a function that returns the weight gradients of P problems of N examples and their vector-Jacobian product.

    x: normalised inputs (P, N, *shape). y: labels (P, N), or soft labels (P, N, K). A call returns dL/dw of each problem's mean
    loss by parameter name, one row per problem, and the function that maps derivatives back to x and, if soft, y. Autograd cannot
    differentiate the gradients.

    Gradients of convolution weights are stored as (P, out, *kernel, in). For one problem, without the first axis,
    `restore_shapes` converts them to the shape of the weights, and `lay_out` converts back.
    """

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Gradient, Back]: ...

    def restore_shapes(self, gradient: Mapping[str, Tensor]) -> Gradient: ...

    def lay_out(self, gradient: Mapping[str, Tensor]) -> Gradient: ...


def build_adjoints(model: nn.Module, data: DataSpec, loss: str, weights: Weights) -> Adjoints | None:
    """Return the explicit gradient formulas of a network with these weights, or None if they do not apply.

    They apply if the network is a chain of linear layers and small 2D convolutions with activations between them, without
    pooling, dilation or unequal strides, the weights are on the CPU, and the results agree with those of PyTorch in a test, whose
    outcome is kept for the two latest networks.
    """
    chain = _find_checked_chain(model, data, loss)
    if chain is None or any(w.device.type != "cpu" for w in weights.values()):
        return None
    return _WrittenAdjoints(chain, weights, models.find_loss(loss))


@lru_cache(maxsize=2)
def _find_checked_chain(model: nn.Module, data: DataSpec, loss: str) -> Chain | None:
    """Return the network as a chain of layers if its explicit gradients agree with PyTorch on the test problems, else None."""
    chain = _find_small_chain(model, data)
    if chain is None:
        return None
    weights, _, x, y = draw_test_problems(model, data)
    written = _WrittenAdjoints(chain, weights, models.find_loss(loss))
    fed, of_x, *_ = vjp(data.normalise, x)
    gradients, back = written(fed, y)
    slope = of_x(back({name: 2 * g for name, g in gradients.items()})[0])[0]
    rows = [written.restore_shapes({name: g[i] for name, g in gradients.items()}) for i in range(len(x))]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in gradients}
    if is_close((stacked, slope), evaluate_test_problems(build_gradient(model, data, loss), model, data, loop=True)):
        return chain
    log.warning("%s: gradients from its traced layers differ from those of PyTorch, so autograd is used", type(model).__name__)
    return None


def _find_small_chain(model: nn.Module, data: DataSpec) -> Chain | None:
    try:
        chain = read_chain(model, data.shape)
    except NotAChain:
        return None
    return chain if all(_is_simple(layer) for layer in chain.layers) else None


def _is_simple(layer: Layer) -> bool:
    if not are_reshapes((*layer.before, *layer.after)):
        return False
    if layer.kernel is None:
        return True
    even = layer.stride[0] == layer.stride[1] and layer.dilation == (1, 1)
    return even and convolutions.is_small(layer.shape, layer.product_inputs)


class _Weighted(Protocol):
    """Protocol of a layer with weights: its product with the shared weights, and with a separate weight tensor per problem.

    a is the layer's input, `error` the derivative of the loss by the layer's output (d in the module); both hold the N examples
    of each of P problems along one axis of P * N. W is the shared weight.

    apply:             W * a, plus the bias if `biased`. apply_transposed: W^T error, the derivative by the input.
    arrange_inputs:    `inputs`, a in the form that the gradients and `apply_own` need: inputs per problem, or image patches.
    compute_weight_gradient, compute_bias_gradient: gradients of weight and bias for each problem, (P, ...).
    apply_own:         product V * a, (P * N, ...), with a separate V = `weight` (P, ...) for each problem.
    apply_transposed_with_own: W^T error + V^T other, with a separate V = `weight` per problem; `other` has the shape of `error`.
    expand_bias:       a separate bias for each problem, (P, out), as (P * N, out, ...), which broadcasts to the layer's output.
    """

    def apply(self, a: Tensor, biased: bool) -> Tensor: ...

    def apply_transposed(self, error: Tensor) -> Tensor: ...

    def arrange_inputs(self, a: Tensor, problems: int) -> Tensor: ...

    def compute_weight_gradient(self, inputs: Tensor, error: Tensor) -> Tensor: ...

    def compute_bias_gradient(self, error: Tensor, problems: int) -> Tensor: ...

    def apply_own(self, inputs: Tensor, weight: Tensor) -> Tensor: ...

    def apply_transposed_with_own(self, error: Tensor, own_error: Tensor, weight: Tensor) -> Tensor: ...

    def expand_bias(self, bias: Tensor, examples: int) -> Tensor: ...


@dataclass(frozen=True)
class _Matrix:
    weight: Tensor
    bias: Tensor | None

    def apply(self, a: Tensor, biased: bool) -> Tensor:
        return functional.linear(a, self.weight, self.bias if biased else None)

    def apply_transposed(self, error: Tensor) -> Tensor:
        return error @ self.weight

    def arrange_inputs(self, a: Tensor, problems: int) -> Tensor:
        return a.reshape(problems, -1, a.shape[-1])

    def compute_weight_gradient(self, inputs: Tensor, error: Tensor) -> Tensor:
        return compute_linear_weight_gradients(inputs, error, len(inputs))

    def compute_bias_gradient(self, error: Tensor, problems: int) -> Tensor:
        return compute_linear_bias_gradients(error, problems)

    def apply_own(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return (inputs @ weight.transpose(1, 2)).flatten(0, 1)

    def apply_transposed_with_own(self, error: Tensor, own_error: Tensor, weight: Tensor) -> Tensor:
        return error @ self.weight + (own_error.reshape(len(weight), -1, own_error.shape[-1]) @ weight).flatten(0, 1)

    def expand_bias(self, bias: Tensor, examples: int) -> Tensor:
        return bias.repeat_interleave(examples, dim=0)


class _ConvolutionLayer:
    def __init__(self, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
        self.weight, self.bias, self.geometry = convolutions.to_channels_last(weight), bias, geometry
        self.cells = convolutions.arrange_cells(weight, geometry)

    def apply(self, a: Tensor, biased: bool) -> Tensor:
        return convolutions.convolve_without_autograd(a, self.weight, self.geometry, self.bias if biased else None)

    def apply_transposed(self, error: Tensor) -> Tensor:
        return convolutions.spread(convolutions.convolve_transposed(error, self.cells, self.geometry), self.geometry)

    def arrange_inputs(self, a: Tensor, problems: int) -> Tensor:
        return convolutions.extract_patches(a, problems, self.geometry)

    def compute_weight_gradient(self, inputs: Tensor, error: Tensor) -> Tensor:
        return convolutions.correlate(inputs, error, self.geometry)

    def compute_bias_gradient(self, error: Tensor, problems: int) -> Tensor:
        return error.reshape(problems, -1, *error.shape[1:]).sum(dim=(1, 3, 4))

    def apply_own(self, inputs: Tensor, weight: Tensor) -> Tensor:
        return convolutions.convolve_per_problem(inputs, weight, self.geometry)

    def apply_transposed_with_own(self, error: Tensor, own_error: Tensor, weight: Tensor) -> Tensor:
        own = convolutions.convolve_transposed_per_problem(own_error, weight, self.geometry)
        return convolutions.spread(convolutions.convolve_transposed(error, self.cells, self.geometry) + own, self.geometry)

    def expand_bias(self, bias: Tensor, examples: int) -> Tensor:
        return bias.repeat_interleave(examples, dim=0)[:, :, None, None]


@dataclass
class _PassValues:
    """The intermediate results of one forward and backward pass, lists with one entry per layer from first to last.

    inputs:   inputs as `_Weighted.arrange_inputs` prepares them. errors: dL/dz, the derivatives by the layers' outputs.
    outputs:  outputs of the activations. slopes: their derivatives. Neither has an entry for the last layer.
    examples: number of examples per problem.
    """

    inputs: list[Tensor]
    outputs: list[Tensor]
    slopes: list[Tensor]
    errors: list[Tensor]
    examples: int


class _WrittenAdjoints:
    def __init__(self, chain: Chain, weights: Weights, loss: Loss) -> None:
        self.chain, self.loss, self.weights = chain.layers, loss, weights
        self.of_images = {layer.weight for layer in self.chain if layer.kernel is not None}
        self.layers: list[_Weighted] = [_build_weighted(layer, weights) for layer in self.chain]

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Gradient, Back]:
        problems, inputs = len(x), [x.flatten(0, 1)]
        passed = _PassValues([], [], [], [], x.shape[1])
        for i, (layer, known) in enumerate(zip(self.layers, self.chain, strict=True)):
            a = inputs[-1].reshape(-1, *known.product_inputs)
            passed.inputs.append(layer.arrange_inputs(a, problems))
            z = layer.apply(a, biased=True)
            if i + 1 < len(self.layers):
                inputs.append(known.activation.forward(z))
                passed.slopes.append(known.activation.slope(inputs[-1]))
        passed.outputs = inputs[1:]
        error, of_loss = self._linearise_loss(z, y, problems)
        passed.errors = self._backpropagate(error, passed)
        return self._compute_gradient(passed, problems), lambda v: self._pull_back(v, passed, of_loss, x.shape)

    def restore_shapes(self, gradient: Mapping[str, Tensor]) -> Gradient:
        return {name: g.movedim(-1, 1) if name in self.of_images else g for name, g in gradient.items()}

    def lay_out(self, gradient: Mapping[str, Tensor]) -> Gradient:
        return {name: g.movedim(1, -1) if name in self.of_images else g for name, g in gradient.items()}

    def _linearise_loss(self, logits: Tensor, y: Tensor, problems: int) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
        """Return dL/dlogits, and a function that returns a vector's products with the Jacobians of dL/dlogits.

        There is one product for the Jacobian by the logits and, if y is soft, one for the Jacobian by y. L is the sum of the mean
        losses of the problems.
        """
        soft, labels = y.is_floating_point(), y.flatten(0, 1)

        def compute_error(logits: Tensor, *own: Tensor) -> Tensor:
            error: Tensor = grad(lambda z: problems * self.loss(z, own[0] if own else labels))(logits)
            return error

        error, back, *_ = vjp(compute_error, logits, *([labels] if soft else []))
        return error, back

    def _backpropagate(self, last: Tensor, passed: _PassValues) -> list[Tensor]:
        errors = [last]
        for layer, slope in zip(reversed(self.layers[1:]), reversed(passed.slopes), strict=True):
            errors.append(layer.apply_transposed(errors[-1]).reshape(slope.shape) * slope)
        return errors[::-1]

    def _compute_gradient(self, passed: _PassValues, problems: int) -> Gradient:
        gradient = {}
        for layer, known, arranged, error in zip(self.layers, self.chain, passed.inputs, passed.errors, strict=True):
            gradient[known.weight] = layer.compute_weight_gradient(arranged, error)
            if known.bias is not None:
                gradient[known.bias] = layer.compute_bias_gradient(error, problems)
        return gradient | {name: w.new_zeros(problems, *w.shape) for name, w in self.weights.items() if name not in gradient}

    def _pull_back(
        self, v: Gradient, passed: _PassValues, of_loss: Callable[[Tensor], tuple[Tensor, ...]], shape: torch.Size
    ) -> tuple[Tensor, ...]:
        changes = self._push_forward(v, passed)
        change, *of_labels = of_loss(changes[-1])
        for i in reversed(range(len(self.layers))):
            layer, weight, error = self.layers[i], v[self.chain[i].weight], passed.errors[i]
            change = layer.apply_transposed_with_own(change, error, weight)
            if i:
                slope, activation = passed.slopes[i - 1], self.chain[i - 1].activation
                change = change.reshape(slope.shape) * slope
                if activation.smooth:
                    change = change + passed.errors[i - 1] * activation.bend(passed.outputs[i - 1]) * changes[i - 1]
        return change.reshape(shape), *(c.reshape(*shape[:2], -1) for c in of_labels)

    def _push_forward(self, v: Gradient, passed: _PassValues) -> list[Tensor]:
        """Return Rz of the module's formulas: the directional derivative of each layer's output along v."""
        changes: list[Tensor] = []
        for i, (layer, known) in enumerate(zip(self.layers, self.chain, strict=True)):
            change = layer.apply_own(passed.inputs[i], v[known.weight])
            if known.bias is not None:
                change = change + layer.expand_bias(v[known.bias], passed.examples)
            if i:
                moved = (passed.slopes[i - 1] * changes[-1]).reshape(-1, *known.product_inputs)
                change = change + layer.apply(moved, biased=False)
            changes.append(change)
        return changes


def _build_weighted(layer: Layer, weights: Weights) -> _Weighted:
    weight, bias = weights[layer.weight], weights[layer.bias] if layer.bias else None
    if layer.kernel is None:
        return _Matrix(weight, bias)
    _, height, width = layer.product_inputs
    return _ConvolutionLayer(weight, bias, Geometry(layer.kernel, layer.stride[0], layer.padding, (height, width)))
