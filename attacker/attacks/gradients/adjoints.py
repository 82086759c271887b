"""Explicit formulas for the weight gradients of many problems that share weights, and for their derivative by the examples.

In a chain of layers, z[i] = w[i] * a[i] + b[i] and a[i + 1] = f[i](z[i]). With d[i] = dL/dz[i], the gradient of w[i] is the
product of a[i] and d[i], for each problem separately. Let D be a distance that depends on these gradients, and
v[i] = dD/d(dL/dw[i]). Then dD/dx is the gradient by x of the directional derivative of L along v. It takes one more forward and
backward pass (Pearlmutter 1994, "Fast exact multiplication by the Hessian", section 3, with its R{w} = v):

    Rz[i] = w[i] * Ra[i] + v[i] * a[i] + v_b[i],    Ra[i + 1] = f'(z[i]) Rz[i],                             Ra[0] = 0
    Ru[i] = w[i]^T Rd[i] + v[i]^T d[i],             Rd[i - 1] = f'(z) Ru[i] + f''(z) Rz[i - 1] u[i],        dD/dx = Ru[0]

Compared with double backward in autograd, no graph is recorded, image patches and activation slopes are computed once and reused,
and PyTorch can compile the whole evaluation.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import grad, vjp
from torch.nn import functional

from attacker.attacks.gradients import convolutions
from attacker.attacks.gradients.convolutions import Geometry
from attacker.attacks.gradients.layer_gradients import of_linear_bias, of_linear_weight
from attacker.attacks.networks.chain import Chain, Layer, NotAChain, chain_of, only_reshapes
from attacker.attacks.simulation.gradients import agree, gradient_of, probe, probed
from defenses.rules import Gradient, Weights
from fedsim import models
from fedsim.models.losses import Loss
from fedsim.recording.observation import DataSpec

log = logging.getLogger(__name__)

Back = Callable[[Gradient], tuple[Tensor, ...]]
"""Vector-Jacobian product: maps the derivative of a function by the weight gradients to its derivatives by x (P, N, *shape) and,
if labels are soft, by y (P, N, K)."""


class Adjoints(Protocol):
    """Protocol of a function that returns the weight gradients of P problems and their vector-Jacobian product.

    x: normalised inputs (P, N, *shape). y: labels (P, N), or soft labels (P, N, K). It returns dL/dw of each problem's mean loss
    by parameter name, one row per problem, and the function that maps derivatives back to x and y. Autograd does not work on it.

    Gradients of convolutions are stored as (P, out, *kernel, in). For one problem, `shaped` converts them to the shape of the
    weights, and `laid` converts back.
    """

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Gradient, Back]: ...

    def shaped(self, gradient: Mapping[str, Tensor]) -> Gradient: ...

    def laid(self, gradient: Mapping[str, Tensor]) -> Gradient: ...


def adjoints(model: nn.Module, data: DataSpec, loss: str, weights: Weights) -> Adjoints | None:
    """Return the explicit gradient formulas of a network with these weights, or None if they do not apply.

    They apply if the network is a chain of linear layers and small 2D convolutions with activations between them, the weights are
    on the CPU, and the results agree with those of PyTorch in a test, which runs once per network.
    """
    chain = _checked_chain(model, data, loss)
    if chain is None or any(w.device.type != "cpu" for w in weights.values()):
        return None
    return _Written(chain, weights, models.loss_of(loss))


@lru_cache(maxsize=2)
def _checked_chain(model: nn.Module, data: DataSpec, loss: str) -> Chain | None:
    """Return the network as a chain of layers if its explicit gradients agree with PyTorch on the test problems, else None."""
    chain = _small_chain(model, data)
    if chain is None:
        return None
    weights, _, x, y = probe(model, data)
    written = _Written(chain, weights, models.loss_of(loss))
    fed, of_x, *_ = vjp(data.normalise, x)
    found, back = written(fed, y)
    slope = of_x(back({name: 2 * g for name, g in found.items()})[0])[0]
    rows = [written.shaped({name: g[i] for name, g in found.items()}) for i in range(len(x))]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in found}
    if agree((stacked, slope), probed(gradient_of(model, data, loss), model, data, loop=True)):
        return chain
    log.warning("%s: gradients from its traced layers differ from those of PyTorch, so autograd is used", type(model).__name__)
    return None


def _small_chain(model: nn.Module, data: DataSpec) -> Chain | None:
    try:
        chain = chain_of(model, data.shape)
    except NotAChain:
        return None
    return chain if all(_is_simple(layer) for layer in chain.layers) else None


def _is_simple(layer: Layer) -> bool:
    if not only_reshapes((*layer.before, *layer.after)):
        return False
    if layer.kernel is None:
        return True
    even = layer.stride[0] == layer.stride[1] and layer.dilation == (1, 1)
    return even and convolutions.is_small(layer.shape, layer.taken)


class _Weighted(Protocol):
    """Protocol of a layer with weights: its product with the shared weights, and with a separate weight tensor per problem.

    product:             weight * a + bias for inputs a. transposed: the transposed product, for the backward pass.
    seen:                what `weight_gradient` and `by_own` need of the inputs: inputs per problem, or image patches.
    weight_gradient, bias_gradient: gradients (P, ...) from the derivatives z by the layer's outputs.
    by_own:              product with a weight tensor of each problem.
    transposed_with_own: transposed product of z with the shared weights plus that of `other` with the weights of each problem.
    offset:              the biases of each problem, in the shape of the layer's outputs.
    """

    def product(self, a: Tensor, biased: bool) -> Tensor: ...

    def transposed(self, z: Tensor) -> Tensor: ...

    def seen(self, a: Tensor, problems: int) -> Tensor: ...

    def weight_gradient(self, seen: Tensor, z: Tensor) -> Tensor: ...

    def bias_gradient(self, z: Tensor, problems: int) -> Tensor: ...

    def by_own(self, seen: Tensor, weight: Tensor) -> Tensor: ...

    def transposed_with_own(self, z: Tensor, other: Tensor, weight: Tensor) -> Tensor: ...

    def offset(self, bias: Tensor, examples: int) -> Tensor: ...


@dataclass(frozen=True)
class _Matrix:
    weight: Tensor
    bias: Tensor | None

    def product(self, a: Tensor, biased: bool) -> Tensor:
        return functional.linear(a, self.weight, self.bias if biased else None)

    def transposed(self, z: Tensor) -> Tensor:
        return z @ self.weight

    def seen(self, a: Tensor, problems: int) -> Tensor:
        return a.reshape(problems, -1, a.shape[-1])

    def weight_gradient(self, seen: Tensor, z: Tensor) -> Tensor:
        return of_linear_weight(seen, z, len(seen))

    def bias_gradient(self, z: Tensor, problems: int) -> Tensor:
        return of_linear_bias(z, problems)

    def by_own(self, seen: Tensor, weight: Tensor) -> Tensor:
        return (seen @ weight.transpose(1, 2)).flatten(0, 1)

    def transposed_with_own(self, z: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        return z @ self.weight + (other.reshape(len(weight), -1, other.shape[-1]) @ weight).flatten(0, 1)

    def offset(self, bias: Tensor, examples: int) -> Tensor:
        return bias.repeat_interleave(examples, dim=0)


class _ConvolutionLayer:
    def __init__(self, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> None:
        self.weight, self.bias, self.geometry = convolutions.channels_last(weight), bias, geometry
        self.cells = convolutions.cell_weights(weight, geometry)

    def product(self, a: Tensor, biased: bool) -> Tensor:
        return convolutions.convolved(a, self.weight, self.geometry, self.bias if biased else None)

    def transposed(self, z: Tensor) -> Tensor:
        return convolutions.spread(convolutions.transposed(z, self.cells, self.geometry), self.geometry)

    def seen(self, a: Tensor, problems: int) -> Tensor:
        return convolutions.patches(a, problems, self.geometry)

    def weight_gradient(self, seen: Tensor, z: Tensor) -> Tensor:
        return convolutions.correlated(seen, z, self.geometry)

    def bias_gradient(self, z: Tensor, problems: int) -> Tensor:
        return z.reshape(problems, -1, *z.shape[1:]).sum(dim=(1, 3, 4))

    def by_own(self, seen: Tensor, weight: Tensor) -> Tensor:
        return convolutions.convolved_by_own(seen, weight, self.geometry)

    def transposed_with_own(self, z: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        own = convolutions.transposed_by_own(other, weight, self.geometry)
        return convolutions.spread(convolutions.transposed(z, self.cells, self.geometry) + own, self.geometry)

    def offset(self, bias: Tensor, examples: int) -> Tensor:
        return bias.repeat_interleave(examples, dim=0)[:, :, None, None]


@dataclass
class _Passed:
    """The intermediate results of one forward and backward pass, one entry per layer.

    seen:     inputs as `_Weighted.seen` prepares them. made: outputs of the activations. slopes: their derivatives.
    errors:   dL/dz, the derivatives by the layers' outputs. examples: number of examples per problem.
    """

    seen: list[Tensor]
    made: list[Tensor]
    slopes: list[Tensor]
    errors: list[Tensor]
    examples: int


class _Written:
    def __init__(self, chain: Chain, weights: Weights, loss: Loss) -> None:
        self.chain, self.loss, self.weights = chain.layers, loss, weights
        self.of_images = {layer.weight for layer in self.chain if layer.kernel is not None}
        self.layers: list[_Weighted] = [_weighted(layer, weights) for layer in self.chain]

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Gradient, Back]:
        problems, inputs = len(x), [x.flatten(0, 1)]
        passed = _Passed([], [], [], [], x.shape[1])
        for i, (layer, known) in enumerate(zip(self.layers, self.chain, strict=True)):
            a = inputs[-1].reshape(-1, *known.taken)
            passed.seen.append(layer.seen(a, problems))
            z = layer.product(a, biased=True)
            if i + 1 < len(self.layers):
                inputs.append(known.activation.forward(z))
                passed.slopes.append(known.activation.slope(inputs[-1]))
        passed.made = inputs[1:]
        error, of_loss = self._loss(z, y, problems)
        passed.errors = self._errors(error, passed)
        return self._gradient(passed, problems), lambda v: self._back(v, passed, of_loss, x.shape)

    def shaped(self, gradient: Mapping[str, Tensor]) -> Gradient:
        return {name: g.movedim(-1, 1) if name in self.of_images else g for name, g in gradient.items()}

    def laid(self, gradient: Mapping[str, Tensor]) -> Gradient:
        return {name: g.movedim(1, -1) if name in self.of_images else g for name, g in gradient.items()}

    def _loss(self, logits: Tensor, y: Tensor, problems: int) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
        """Return dL/dlogits, and its vector-Jacobian product by the logits and, if y is soft, by y."""
        soft, labels = y.is_floating_point(), y.flatten(0, 1)

        def error(logits: Tensor, *own: Tensor) -> Tensor:
            found: Tensor = grad(lambda z: problems * self.loss(z, own[0] if own else labels))(logits)
            return found

        found, back, *_ = vjp(error, logits, *([labels] if soft else []))
        return found, back

    def _errors(self, last: Tensor, passed: _Passed) -> list[Tensor]:
        errors = [last]
        for layer, slope in zip(reversed(self.layers[1:]), reversed(passed.slopes), strict=True):
            errors.append(layer.transposed(errors[-1]).reshape(slope.shape) * slope)
        return errors[::-1]

    def _gradient(self, passed: _Passed, problems: int) -> Gradient:
        found = {}
        for layer, known, seen, error in zip(self.layers, self.chain, passed.seen, passed.errors, strict=True):
            found[known.weight] = layer.weight_gradient(seen, error)
            if known.bias is not None:
                found[known.bias] = layer.bias_gradient(error, problems)
        return found | {name: w.new_zeros(problems, *w.shape) for name, w in self.weights.items() if name not in found}

    def _back(
        self, v: Gradient, passed: _Passed, of_loss: Callable[[Tensor], tuple[Tensor, ...]], shape: torch.Size
    ) -> tuple[Tensor, ...]:
        changes = self._changes(v, passed)
        change, *of_labels = of_loss(changes[-1])
        for i in reversed(range(len(self.layers))):
            layer, weight, error = self.layers[i], v[self.chain[i].weight], passed.errors[i]
            change = layer.transposed_with_own(change, error, weight)
            if i:
                slope, activation = passed.slopes[i - 1], self.chain[i - 1].activation
                change = change.reshape(slope.shape) * slope
                if activation.smooth:
                    change = change + passed.errors[i - 1] * activation.bend(passed.made[i - 1]) * changes[i - 1]
        return change.reshape(shape), *(c.reshape(*shape[:2], -1) for c in of_labels)

    def _changes(self, v: Gradient, passed: _Passed) -> list[Tensor]:
        """Return the directional derivatives Rz of each layer's output along v, see the module's formulas."""
        changes: list[Tensor] = []
        for i, (layer, known) in enumerate(zip(self.layers, self.chain, strict=True)):
            change = layer.by_own(passed.seen[i], v[known.weight])
            if known.bias is not None:
                change = change + layer.offset(v[known.bias], passed.examples)
            if i:
                moved = (passed.slopes[i - 1] * changes[-1]).reshape(-1, *known.taken)
                change = change + layer.product(moved, biased=False)
            changes.append(change)
        return changes


def _weighted(layer: Layer, weights: Weights) -> _Weighted:
    weight, bias = weights[layer.weight], weights[layer.bias] if layer.bias else None
    if layer.kernel is None:
        return _Matrix(weight, bias)
    return _ConvolutionLayer(weight, bias, Geometry(layer.kernel, layer.stride[0], layer.padding, _sides(layer.taken)))


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return shape[-2], shape[-1]
