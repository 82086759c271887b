"""Approximate inverses of a layer's normal matrix [W; K]^T [W; K], which save conjugate gradients most of their iterations.

K is the same for every input channel, and a stride of s parts the places of a channel into s * s classes that no equation of K
joins (R-GAP, section 3.1.3, writes K down whole). So K^T K is a few small matrices, inverted exactly; of W^T W, which joins all
channels, the diagonal is added to them, or where a layer gives few values, all of it by Woodbury's identity.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from attacker.attacks.closed_form.rgap.system import System, columns_of, fold
from attacker.attacks.networks.chain import Layer, only_reshapes

Inverse = Callable[[Tensor], Tensor]
"""Symmetric positive, of (N, *inputs) of a layer."""

LARGEST = 1100
"""Places of one class up to which its matrix is inverted; beyond, only the diagonal is."""
WORTH = 0.25
"""Independent equations of K as a share of its unknowns below which inverting it saves next to nothing."""
FEW = 1100
"""Values that a layer gives up to which all of W^T W is taken."""
SPARE = 1.3
"""How many times the equations of K must be its unknowns, in every class, to do without W."""
FLOOR = 1e-9
"""Added to K^T K, as a share of its mean diagonal, where W does the rest: what it must not do without."""


def inverse_of(system: System) -> Inverse | None:
    """What fits the equations of `system`, whose `scale` is of equal weight for all input channels; None for pooled inputs."""
    layer = system.layer
    if layer.kernel is None or not only_reshapes(layer.before) or system.scale is None:
        return None
    classes = classes_of(layer)
    if max(len(one.places) for one in classes) > LARGEST:
        return _of_diagonal(system)
    if sum(min(layer.shape[0] * len(one.taps), len(one.places)) for one in classes) < WORTH * prod(layer.taken[1:]):
        return _of_diagonal(system)
    if _takes_whole(layer, classes):
        return _Whole(system, classes)
    return _Blocks(system, classes, _diagonal_of_weights(system).mean(dim=1))


def bytes_of(layer: Layer) -> int:
    """What one problem takes while it is solved, about."""
    working = 12 * (prod(layer.shape[1:]) * prod(layer.given[1:]) + prod(layer.inputs) + prod(layer.outputs) + prod(layer.shape))
    if layer.kernel is None or not only_reshapes(layer.before):
        return 8 * working
    classes = classes_of(layer)
    most = max(len(one.places) for one in classes)
    if most > LARGEST:
        return 8 * working
    whole = 3 * prod(layer.given) ** 2 if _takes_whole(layer, classes) else 0
    return 8 * (working + 2 * len(classes) * most**2 + whole)


def _takes_whole(layer: Layer, classes: list["Class"]) -> bool:
    few = any(layer.shape[0] * len(one.taps) < SPARE * len(one.places) for one in classes)
    return few and only_reshapes(layer.after) and prod(layer.given) <= FEW


@dataclass(frozen=True)
class Class:
    """Places of an input channel that meet the same taps of the kernel.

    places: (P,) of the channel, row by row. taps: (A,) of the kernel. meets: (A, P) the place of the output at which the tap lies
    on the place of the input; as many as there are where at none.
    """

    places: Tensor
    taps: Tensor
    meets: Tensor


def classes_of(layer: Layer) -> list[Class]:
    """The classes of the places of a convolution's input, at most stride * stride."""
    assert layer.kernel is not None
    sides = [_axis(layer, i) for i in (0, 1)]
    outputs = prod(layer.given[1:])
    low, high = sides[0][:, None, :, None], sides[1][None, :, None, :]
    meets = torch.where((low >= 0) & (high >= 0), low * layer.given[2] + high, outputs)
    meets = meets.reshape(prod(layer.kernel), prod(layer.taken[1:]))
    rests = [torch.arange(side) % stride for side, stride in zip(layer.taken[1:], layer.stride, strict=True)]
    group = (rests[0][:, None] * layer.stride[1] + rests[1]).flatten()
    found = []
    for one in range(prod(layer.stride)):
        places = torch.nonzero(group == one)[:, 0]
        if not len(places):
            continue
        taps = torch.nonzero((meets[:, places] < outputs).any(dim=1))[:, 0]
        found.append(Class(places, taps, meets[taps][:, places]))
    return found


def _axis(layer: Layer, i: int) -> Tensor:
    """(taps, places) along one side: at which output place a tap lies on an input place; -1 for none."""
    assert layer.kernel is not None
    taps, places = torch.arange(layer.kernel[i])[:, None], torch.arange(layer.taken[1 + i])
    at = places + layer.padding[i] - layer.dilation[i] * taps
    there = (at >= 0) & (at % layer.stride[i] == 0) & (at < layer.stride[i] * layer.given[1 + i])
    return torch.where(there, at.div(layer.stride[i], rounding_mode="floor"), -1)


class _Blocks:
    """(K^T K + diagonal)^-1, class by class, the same for all channels."""

    def __init__(self, system: System, classes: list[Class], diagonal: Tensor) -> None:
        """diagonal: (N, places)."""
        count, most = len(system.k), max(len(one.places) for one in classes)
        self.inverse = system.k.new_zeros(count, len(classes), most, most)
        self.take = torch.zeros(len(classes), most, dtype=torch.long)
        self.give = torch.zeros(diagonal.shape[1], dtype=torch.long)
        for i, one in enumerate(classes):
            size = len(one.places)
            product = _rows(system, one)
            normal = product.mT @ product + torch.diag_embed(_above_zero(diagonal[:, one.places.to(diagonal.device)], product))
            self.inverse[:, i, :size, :size] = torch.cholesky_inverse(torch.linalg.cholesky_ex(normal)[0])
            self.take[i, :size] = one.places
            self.give[one.places] = i * most + torch.arange(size)
        self.take, self.give = self.take.to(system.k.device), self.give.to(system.k.device)

    def __call__(self, x: Tensor) -> Tensor:
        values = x.reshape(len(x), -1, len(self.give))
        parts = values[..., self.take.flatten()].reshape(*values.shape[:2], *self.take.shape).transpose(1, 2)
        solved = (parts @ self.inverse).transpose(1, 2).flatten(2)
        return solved[..., self.give].reshape(x.shape)


class _Whole:
    """(K^T K + W^T W)^-1 for a layer that gives few values z, from a matrix of z by z (Woodbury's identity)."""

    def __init__(self, system: System, classes: list[Class]) -> None:
        layer, count = system.layer, len(system.k)
        assert system.scale is not None
        self.layer, self.weight = layer, system.weight
        self.scale = system.scale.weights.reshape(count, layer.shape[0], -1)
        places = prod(layer.taken[1:])
        self.blocks = _Blocks(system, classes, self.scale.new_full((count, places), FLOOR) * _mean_square(system)[:, None])
        values = self.scale.flatten(1)
        joined = values[:, :, None] * self._between(classes) * values[:, None]
        self.factor = torch.linalg.cholesky_ex(joined + torch.eye(values.shape[1], dtype=values.dtype, device=values.device))[0]

    def __call__(self, x: Tensor) -> Tensor:
        near = self.blocks(x)
        columns = columns_of(self.layer, near.reshape(len(x), *self.layer.taken))
        given = ((self.weight @ columns) * self.scale).flatten(1)[..., None]
        taken = torch.cholesky_solve(given, self.factor).reshape(self.scale.shape) * self.scale
        return near - self.blocks(fold(self.layer, self.weight.mT @ taken).reshape(x.shape))

    def _between(self, classes: list[Class]) -> Tensor:
        """W (K^T K)^-1 W^T, (N, z, z), summed over pairs of taps of one class."""
        filters, channels = self.layer.shape[:2]
        weight = self.weight.reshape(len(self.weight), filters, channels, -1)
        count, places = len(self.scale), self.scale.shape[2]
        total = self.scale.new_zeros(count, filters * filters, places * places)
        for i, one in enumerate(classes):
            size, taps = len(one.places), len(one.taps)
            if not taps:
                continue
            sees = torch.full((taps, places + 1), size).scatter_(1, one.meets, torch.arange(size).expand(taps, -1))
            at = sees[:, :places].flatten().to(total.device)
            inverse = functional.pad(self.blocks.inverse[:, i, :size, :size], (0, 1, 0, 1))
            pairs = inverse[:, at][:, :, at].reshape(count, taps, places, taps, places).transpose(2, 3)
            own = weight[..., one.taps.to(weight.device)]
            products = torch.einsum("nocx,npcy->nopxy", own, own)
            total += products.reshape(len(weight), filters * filters, -1) @ pairs.reshape(count, taps * taps, -1)
        return total.reshape(count, filters, filters, places, places).transpose(2, 3).reshape(count, filters * places, -1)


def _of_diagonal(system: System) -> Inverse:
    diagonal = _diagonal_of_weights(system)
    square = _shared(system).square().mT @ system.k.square()
    shared = fold(system.layer, square.repeat(1, system.layer.taken[0], 1)).flatten(2)
    inverse = 1 / _above_zero(diagonal + shared, shared)
    return lambda x: (inverse * x.reshape(inverse.shape)).reshape(x.shape)


def _diagonal_of_weights(system: System) -> Tensor:
    """Of W^T W, (N, C_in, places); with average pooling behind it, of its mean."""
    layer = system.layer
    assert system.scale is not None
    spread = system.scale.weights.square()
    if only_reshapes(layer.after):
        spread = spread.reshape(len(spread), layer.shape[0], -1)
    else:
        mean = spread.flatten(1).mean(dim=1) * (prod(layer.outputs) / prod(layer.given)) ** 2
        spread = mean[:, None, None].expand(-1, layer.shape[0], prod(layer.given[1:]))
    return fold(layer, system.weight.square().mT @ spread).flatten(2)


def _shared(system: System) -> Tensor:
    """The scale of K's rows, (N, C_out, taps), as of the first input channel."""
    assert system.scale is not None
    channels = system.layer.shape[1]
    return system.scale.gradients.reshape(*system.scale.gradients.shape[:2], channels, -1)[:, :, 0]


def _rows(system: System, one: Class) -> Tensor:
    """K of one class, one input channel, rows scaled: (N, C_out * A, P)."""
    padded = functional.pad(system.k, (0, 1))
    rows = padded[..., one.meets.flatten().to(padded.device)].reshape(*padded.shape[:2], *one.meets.shape)
    return (rows * _shared(system)[..., one.taps.to(padded.device), None]).flatten(1, 2)


def _mean_square(system: System) -> Tensor:
    """(N,) of K's columns the mean squared length."""
    square = _shared(system).square().mT @ system.k.square()
    return square.flatten(1).sum(dim=1) / prod(system.layer.taken[1:])


def _above_zero(diagonal: Tensor, like: Tensor) -> Tensor:
    """A diagonal without zeros, so that what no equation holds is inverted, too."""
    mean = like.flatten(1).square().mean(dim=1) + diagonal.flatten(1).mean(dim=1)
    least = 1e-12 * torch.where(mean > 0, mean, 1)
    return diagonal.clamp(min=0) + least.reshape(-1, *[1] * (diagonal.ndim - 1))
