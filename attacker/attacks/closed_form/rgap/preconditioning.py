"""Preconditioners for conjugate gradients: approximate inverses of a layer's normal matrix [W; K]^T [W; K].

W and K are the matrices of the weight and gradient constraints (`system`). K is the same for every input channel. A stride s
divides the pixels of a channel into s * s classes, and no equation of K contains pixels of two classes (R-GAP, section 3.1.3,
stores all of K). Therefore K^T K consists of a few small blocks, which are inverted exactly. W^T W connects all channels. Only
the diagonal of W^T W, averaged over channels, is added to the blocks; but if K has few equations and the layer few outputs, all
of W^T W is added by Woodbury's identity. If the blocks are too large or K has very few equations, only the diagonal of the normal
matrix is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from attacker.attacks.closed_form.rgap.system import LayerSystem, broadcast_like, fold, unfold
from attacker.attacks.networks.layers import Layer
from attacker.attacks.networks.traced import are_reshapes

Inverse = Callable[[Tensor], Tensor]
"""A symmetric positive definite linear map of a layer's inputs (N, *inputs)."""

MAX_CLASS_PLACES = 1100
"""Largest number of pixels of a class for which its block is inverted; for larger ones only the diagonal is used."""
MIN_EQUATION_SHARE = 0.25
"""Smallest number of independent equations of K relative to the unknowns; below, inverting K saves hardly any iterations."""
MAX_WHOLE_OUTPUTS = 1100
"""Largest number of outputs of a layer for which all of W^T W is used."""
MIN_SURPLUS = 1.3
"""Smallest ratio of the equations of K to its unknowns, in every class, at which W is not needed."""
DIAGONAL_FLOOR = 1e-9
"""Multiple of the mean diagonal that is added to K^T K before it is inverted, if all of W^T W is added later."""


def build_preconditioner(system: LayerSystem) -> Inverse | None:
    """Return a preconditioner for the equations of `system`; None for linear layers, pooled inputs, and unscaled equations.

    The scale of the gradient constraints must be equal for all input channels.
    """
    layer = system.layer
    if layer.kernel is None or not are_reshapes(layer.before) or system.scale is None:
        return None
    classes = find_pixel_classes(layer)
    if max(len(pixel_class.places) for pixel_class in classes) > MAX_CLASS_PLACES:
        return _invert_diagonal(system)
    if sum(
        min(layer.shape[0] * len(pixel_class.taps), len(pixel_class.places)) for pixel_class in classes
    ) < MIN_EQUATION_SHARE * prod(layer.product_inputs[1:]):
        return _invert_diagonal(system)
    if _needs_whole(layer, classes):
        return _Whole(system, classes)
    return _Blocks(system, classes, _compute_weight_diagonal(system).mean(dim=1))


def estimate_bytes(layer: Layer) -> int:
    """Return the approximate memory in bytes that solving one problem for this layer takes."""
    working = 12 * (
        prod(layer.shape[1:]) * prod(layer.product_outputs[1:]) + prod(layer.inputs) + prod(layer.outputs) + prod(layer.shape)
    )
    if layer.kernel is None or not are_reshapes(layer.before):
        return 8 * working
    classes = find_pixel_classes(layer)
    maximum = max(len(pixel_class.places) for pixel_class in classes)
    if maximum > MAX_CLASS_PLACES:
        return 8 * working
    whole = 3 * prod(layer.product_outputs) ** 2 if _needs_whole(layer, classes) else 0
    return 8 * (working + 2 * len(classes) * maximum**2 + whole)


def _needs_whole(layer: Layer, classes: list["PixelClass"]) -> bool:
    few = any(layer.shape[0] * len(pixel_class.taps) < MIN_SURPLUS * len(pixel_class.places) for pixel_class in classes)
    return few and are_reshapes(layer.after) and prod(layer.product_outputs) <= MAX_WHOLE_OUTPUTS


@dataclass(frozen=True)
class PixelClass:
    """A class of pixels of an input channel: those whose row and column have the same remainders when divided by the stride.

    places: (P,) indices of the pixels, row by row. taps: (A,) indices of the taps (positions inside the kernel) that see any of
            them.
    meets:  (A, P) index of the output pixel that is computed with tap a on input pixel p. If there is none, it is the number of
            output pixels, an index beyond the last one.
    """

    places: Tensor
    taps: Tensor
    meets: Tensor


def find_pixel_classes(layer: Layer) -> list[PixelClass]:
    """Return the classes of the pixels of a convolution's input.

    There are at most as many as the product of the strides of both axes.
    """
    assert layer.kernel is not None
    sides = [_find_output_positions(layer, i) for i in (0, 1)]
    outputs = prod(layer.product_outputs[1:])
    low, high = sides[0][:, None, :, None], sides[1][None, :, None, :]
    meets = torch.where((low >= 0) & (high >= 0), low * layer.product_outputs[2] + high, outputs)
    meets = meets.reshape(prod(layer.kernel), prod(layer.product_inputs[1:]))
    rests = [torch.arange(side) % stride for side, stride in zip(layer.product_inputs[1:], layer.stride, strict=True)]
    group = (rests[0][:, None] * layer.stride[1] + rests[1]).flatten()
    classes = []
    for offset in range(prod(layer.stride)):
        places = torch.nonzero(group == offset)[:, 0]
        if not len(places):
            continue
        taps = torch.nonzero((meets[:, places] < outputs).any(dim=1))[:, 0]
        classes.append(PixelClass(places, taps, meets[taps][:, places]))
    return classes


def _find_output_positions(layer: Layer, i: int) -> Tensor:
    """Return for each tap and input position along axis i the output position that combines them, (taps, positions).

    It is -1 if there is none. i: 0 for rows, 1 for columns.
    """
    assert layer.kernel is not None
    taps, places = torch.arange(layer.kernel[i])[:, None], torch.arange(layer.product_inputs[1 + i])
    at = places + layer.padding[i] - layer.dilation[i] * taps
    there = (at >= 0) & (at % layer.stride[i] == 0) & (at < layer.stride[i] * layer.product_outputs[1 + i])
    return torch.where(there, at.div(layer.stride[i], rounding_mode="floor"), -1)


class _Blocks:
    """The preconditioner (K^T K + diagonal)^-1, computed by classes of pixels, the same for each input channel.

    K is the matrix of the gradient constraints.
    """

    def __init__(self, system: LayerSystem, classes: list[PixelClass], diagonal: Tensor) -> None:
        """Compute the inverses of all blocks. diagonal: (N, pixels of a channel), added to K^T K of every channel."""
        count, maximum = len(system.k), max(len(pixel_class.places) for pixel_class in classes)
        self.inverse = system.k.new_zeros(count, len(classes), maximum, maximum)
        self.take = torch.zeros(len(classes), maximum, dtype=torch.long)
        self.give = torch.zeros(diagonal.shape[1], dtype=torch.long)
        for i, pixel_class in enumerate(classes):
            size = len(pixel_class.places)
            product = _build_rows(system, pixel_class)
            normal = product.mT @ product + torch.diag_embed(
                _clamp_diagonal(diagonal[:, pixel_class.places.to(diagonal.device)], product)
            )
            self.inverse[:, i, :size, :size] = torch.cholesky_inverse(torch.linalg.cholesky_ex(normal)[0])
            self.take[i, :size] = pixel_class.places
            self.give[pixel_class.places] = i * maximum + torch.arange(size)
        self.take, self.give = self.take.to(system.k.device), self.give.to(system.k.device)

    def __call__(self, x: Tensor) -> Tensor:
        values = x.reshape(len(x), -1, len(self.give))
        parts = values[..., self.take.flatten()].reshape(*values.shape[:2], *self.take.shape).transpose(1, 2)
        solved = (parts @ self.inverse).transpose(1, 2).flatten(2)
        return solved[..., self.give].reshape(x.shape)


class _Whole:
    """The preconditioner (K^T K + W^T W)^-1 for a layer with few outputs, by Woodbury's identity.

    A small multiple of the identity (DIAGONAL_FLOOR) is added to K^T K, so that it can be inverted.
    """

    def __init__(self, system: LayerSystem, classes: list[PixelClass]) -> None:
        layer, count = system.layer, len(system.k)
        assert system.scale is not None
        self.layer, self.weight = layer, system.weight
        self.scale = system.scale.weights.reshape(count, layer.shape[0], -1)
        places = prod(layer.product_inputs[1:])
        diagonal = self.scale.new_full((count, places), DIAGONAL_FLOOR) * _compute_mean_square(system)[:, None]
        self.blocks = _Blocks(system, classes, diagonal)
        values = self.scale.flatten(1)
        joined = values[:, :, None] * self._compute_product(classes) * values[:, None]
        self.factor = torch.linalg.cholesky_ex(joined + torch.eye(values.shape[1], dtype=values.dtype, device=values.device))[0]

    def __call__(self, x: Tensor) -> Tensor:
        near = self.blocks(x)
        columns = unfold(self.layer, near.reshape(len(x), *self.layer.product_inputs))
        given = ((self.weight @ columns) * self.scale).flatten(1)[..., None]
        taken = torch.cholesky_solve(given, self.factor).reshape(self.scale.shape) * self.scale
        return near - self.blocks(fold(self.layer, self.weight.mT @ taken).reshape(x.shape))

    def _compute_product(self, classes: list[PixelClass]) -> Tensor:
        """Return W (K^T K)^-1 W^T with unscaled W, (N, outputs, outputs), summed over pairs of taps of each class."""
        filters, channels = self.layer.shape[:2]
        weight = self.weight.reshape(len(self.weight), filters, channels, -1)
        count, places = len(self.scale), self.scale.shape[2]
        total = self.scale.new_zeros(count, filters * filters, places * places)
        for i, pixel_class in enumerate(classes):
            size, taps = len(pixel_class.places), len(pixel_class.taps)
            if not taps:
                continue
            sees = torch.full((taps, places + 1), size).scatter_(1, pixel_class.meets, torch.arange(size).expand(taps, -1))
            at = sees[:, :places].flatten().to(total.device)
            inverse = functional.pad(self.blocks.inverse[:, i, :size, :size], (0, 1, 0, 1))
            pairs = inverse[:, at][:, :, at].reshape(count, taps, places, taps, places).transpose(2, 3)
            weight_of_class = weight[..., pixel_class.taps.to(weight.device)]
            products = torch.einsum("nocx,npcy->nopxy", weight_of_class, weight_of_class)
            total += products.reshape(len(weight), filters * filters, -1) @ pairs.reshape(count, taps * taps, -1)
        return total.reshape(count, filters, filters, places, places).transpose(2, 3).reshape(count, filters * places, -1)


def _invert_diagonal(system: LayerSystem) -> Inverse:
    diagonal = _compute_weight_diagonal(system)
    square = _compute_gradient_scale(system).square().mT @ system.k.square()
    shared = fold(system.layer, square.repeat(1, system.layer.product_inputs[0], 1)).flatten(2)
    inverse = 1 / _clamp_diagonal(diagonal + shared, shared)
    return lambda x: (inverse * x.reshape(inverse.shape)).reshape(x.shape)


def _compute_weight_diagonal(system: LayerSystem) -> Tensor:
    """Return the diagonal of W^T W for the scaled weight constraints W, (N, C_in, pixels).

    If the layer pools its outputs, the mean scale of its weight constraints is used for all of them, which is an approximation.
    """
    layer = system.layer
    assert system.scale is not None
    spread = system.scale.weights.square()
    if are_reshapes(layer.after):
        spread = spread.reshape(len(spread), layer.shape[0], -1)
    else:
        mean = spread.flatten(1).mean(dim=1) * (prod(layer.outputs) / prod(layer.product_outputs)) ** 2
        spread = mean[:, None, None].expand(-1, layer.shape[0], prod(layer.product_outputs[1:]))
    return fold(layer, system.weight.square().mT @ spread).flatten(2)


def _compute_gradient_scale(system: LayerSystem) -> Tensor:
    """Return the factors of the gradient constraints of one input channel, equal for all channels, (N or 1, C_out, taps)."""
    assert system.scale is not None
    channels = system.layer.shape[1]
    return system.scale.gradients.reshape(*system.scale.gradients.shape[:2], channels, -1)[:, :, 0]


def _build_rows(system: LayerSystem, pixel_class: PixelClass) -> Tensor:
    """Return the scaled gradient constraints of one class of P pixels and A taps, for one channel, (N, C_out * A, P)."""
    padded = functional.pad(system.k, (0, 1))
    rows = padded[..., pixel_class.meets.flatten().to(padded.device)].reshape(*padded.shape[:2], *pixel_class.meets.shape)
    return (rows * _compute_gradient_scale(system)[..., pixel_class.taps.to(padded.device), None]).flatten(1, 2)


def _compute_mean_square(system: LayerSystem) -> Tensor:
    """Return the mean squared norm of the columns of one channel's gradient constraints, (N,); too high with padding."""
    square = _compute_gradient_scale(system).square().mT @ system.k.square()
    return square.flatten(1).sum(dim=1) / prod(system.layer.product_inputs[1:])


def _clamp_diagonal(diagonal: Tensor, like: Tensor) -> Tensor:
    """Return a diagonal (N, ...) made positive, so that it can be inverted for unknowns without equations as well.

    For each problem, 1e-12 * (mean of the diagonal + mean square of `like`) is added, or 1e-12 if that is 0.
    like: (N, ...) values that set the scale: the matrix K if the diagonal is added to K^T K, otherwise the diagonal of K^T K.
    """
    mean = like.flatten(1).square().mean(dim=1) + diagonal.flatten(1).mean(dim=1)
    minimum = 1e-12 * torch.where(mean > 0, mean, 1)
    return diagonal.clamp(min=0) + broadcast_like(minimum, diagonal)
