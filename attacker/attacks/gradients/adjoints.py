"""Gradients of many problems that share weights, and how a distance between gradients depends on the guess, both written out.

In a chain of layers, z[i] = w[i] * a[i] + b[i] and a[i + 1] = f[i](z[i]). With d[i] = dL/dz[i], the gradient of w[i] is the
product of a[i] and d[i], for each problem by itself. Of a distance D between gradients, v[i] = dD/d(dL/dw[i]) given, dD/dx is the
gradient by x of the derivative of L along v, and that is one more pass forwards and backwards (Pearlmutter 1994, "Fast exact
multiplication by the Hessian", section 3, with its R{w} = v):

    Rz[i] = w[i] * Ra[i] + v[i] * a[i] + v_b[i],    Ra[i + 1] = f'(z[i]) Rz[i],                             Ra[0] = 0
    Ru[i] = w[i]^T Rd[i] + v[i]^T d[i],             Rd[i - 1] = f'(z) Ru[i] + f''(z) Rz[i - 1] u[i],        dD/dx = Ru[0]

Nothing is noted on the way, as autograd does; patches of images and slopes are had once; PyTorch can compile it as a whole.
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
from attacker.attacks.simulation.gradients import Gradient, Weights, agree, gradient_of, probe, probed
from fedsim import models
from fedsim.models.losses import Loss
from fedsim.recording.observation import DataSpec

log = logging.getLogger(__name__)

Back = Callable[[Gradient], tuple[Tensor, ...]]
"""From how something depends on gradients, how it does on x, (P, N, *shape), and on y, (P, N, K), where that is soft."""


class Adjoints(Protocol):
    """From x (P, N, *shape), as the network is fed, and y (P, N) or soft (P, N, K), to dL/dw of each problem's own mean loss by
    name, one row a problem, and the way back. Not differentiable otherwise.

    Of convolutions, gradients lie as (P, out, *kernel, in). Of one problem, `shaped` gives them the shapes of the weights, and
    `laid` is its inverse.
    """

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Gradient, Back]: ...

    def shaped(self, gradient: Mapping[str, Tensor]) -> Gradient: ...

    def laid(self, gradient: Mapping[str, Tensor]) -> Gradient: ...


def adjoints(model: nn.Module, data: DataSpec, loss: str, weights: Weights) -> Adjoints | None:
    """Those of a network with these weights.

    None where it is no chain of linear layers and small two-dimensional convolutions with activations between them, another
    device than the processor is to compute it, or what is written out is not what PyTorch computes, which is tried once.
    """
    chain = _checked_chain(model, data, loss)
    if chain is None or any(w.device.type != "cpu" for w in weights.values()):
        return None
    return _Written(chain, weights, models.loss_of(loss))


@lru_cache(maxsize=2)
def _checked_chain(model: nn.Module, data: DataSpec, loss: str) -> Chain | None:
    """The chain that a network is, if gradients and slopes by it are those of PyTorch on a probe."""
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
    log.warning("%s is not what its layers say: its gradients are left to autograd", type(model).__name__)
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
    """A layer's product, and what it needs of its inputs for the products with weights of each problem's own."""

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


class _Convolution:
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
    """What is known once all examples went forwards and back: of each layer, what it saw, and dL/dz.

    made: what the activations gave. slopes: their derivatives there. examples: of each problem.
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
        """dL/dlogits, and from a change of the logits what it adds to that, and to dL/dy where y is soft."""
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
        """Rz of each layer."""
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
    return _Convolution(weight, bias, Geometry(layer.kernel, layer.stride[0], layer.padding, _sides(layer.taken)))


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    return shape[-2], shape[-1]
