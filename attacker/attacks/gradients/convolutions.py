"""Convolutions to be differentiated twice, by what goes in: weights get no gradient. Images lie channels last.

`library` is torch's; of torch's own derivative, the second one works out the gradient of the weights too, wanted or not.
`convolution` is for few channels on processors. There, torch's gradient of the input takes several times as long as the
convolution, the more so with strides. Here it is a convolution too: of stride 1, whose channels are the pixels of a cell of
stride x stride.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Pair = tuple[int, int]
Setting = tuple[Pair, Pair, Pair, int]
"""Stride, padding, dilation, groups."""


def channels_last(t: Tensor) -> Tensor:
    """The same values, as convolutions want them: of (..., in, H, W), the channels of a pixel next to each other."""
    return t.movedim(-3, -1).contiguous().movedim(-1, -3) if t.ndim >= 4 else t


def library(x: Tensor, weight: Tensor, setting: Setting) -> Tensor:
    """(M, out, H', W') from images (M, in, H, W) and weights (out, in / groups, *kernel)."""
    found: Tensor = _Library.apply(x, weight, setting)
    return found


class _Library(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, setting: Setting) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.setting = x.shape, setting
        return functional.conv2d(x, weight, None, *setting)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return _LibraryTransposed.apply(outputs[0], *ctx.saved_tensors, ctx.shape, ctx.setting), None, None


class _LibraryTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor, shape: torch.Size, setting: Setting) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.setting = setting
        images = torch.empty(shape, dtype=output.dtype, device=output.device, memory_format=torch.channels_last)
        found: Tensor = derivatives(output, images, weight, setting, (True, False, False))[0]
        return found

    @staticmethod
    def backward(ctx: Any, *images: Any) -> Any:
        return _Library.apply(images[0], *ctx.saved_tensors, ctx.setting), None, None, None


def derivatives(output: Tensor, x: Tensor, weight: Tensor, setting: Setting, wanted: tuple[bool, bool, bool]) -> Any:
    """By input, weight and bias, from that of its output; for the first, only the shape of x counts."""
    stride, padding, dilation, groups = setting
    return torch.ops.aten.convolution_backward(output, x, weight, None, stride, padding, dilation, False, (0, 0), groups, wanted)


@dataclass(frozen=True)
class Geometry:
    """kernel, padding, sides of the image: rows and columns. stride: of both. What follows from them is rows and columns too."""

    kernel: Pair
    stride: int
    padding: Pair
    sides: Pair

    @property
    def out(self) -> Pair:
        """The sides of the output."""
        return self._each(lambda k, p, side: (side + 2 * p - k) // self.stride + 1)

    @property
    def grid(self) -> Pair:
        """How many cells the image has."""
        return self._each(lambda k, p, side: -(-side // self.stride))

    @property
    def lead(self) -> Pair:
        """Zeros before the kernel, so that it starts with a cell."""
        return self._each(lambda k, p, side: -p % self.stride)

    @property
    def cells(self) -> Pair:
        """How many cells the kernel covers then."""
        return self._each(lambda k, p, side: -(-(-p % self.stride + k) // self.stride))

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """Zeros left, right, above and below an output, with which the turned kernel gives all cells of the image."""
        before = self._each(lambda k, p, side: -(-p // self.stride))
        (top, bottom), (left, right) = (
            (cells - 1 - first, grid + first - out)
            for cells, first, grid, out in zip(self.cells, before, self.grid, self.out, strict=True)
        )
        return left, right, top, bottom

    def _each(self, of: Callable[[int, int, int], int]) -> Pair:
        rows, columns = (of(*each) for each in zip(self.kernel, self.padding, self.sides, strict=True))
        return rows, columns


SMALL = 8e6
"""Multiplications of a convolution of stride 1, on one image: LeNets lie below, residual networks above, and no more is known."""


def is_small(weight: Sequence[int], image: Sequence[int]) -> bool:
    """Whether a convolution with such weights of such images, (in, H, W), is for what follows, or for torch's."""
    return prod(weight) * prod(image[1:]) < SMALL


def convolution(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """(M, out, H', W') from images (M, in, H, W) and weights (out, in, *kernel) that get no gradient."""
    found: Tensor = _Convolution.apply(x, channels_last(weight), cell_weights(weight, geometry), geometry)
    return found


def cell_weights(weight: Tensor, geometry: Geometry) -> Tensor:
    """Weights (out, in, *kernel) as `transposed` takes them, (stride * stride * in, out, *cells)."""
    turned = _turned(weight.permute(0, 2, 3, 1)[None], geometry)[0]
    return channels_last(turned.reshape(*geometry.cells, len(weight), -1).permute(3, 2, 0, 1))


class _Convolution(torch.autograd.Function):
    """By weights as they are; its derivative by weights `turned` round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(weight, cells)
        ctx.geometry = geometry
        return convolved(x, weight, geometry)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return _Transposed.apply(outputs[0], *ctx.saved_tensors, ctx.geometry), None, None, None


class _Transposed(torch.autograd.Function):
    """The transpose of a convolution."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(weight, cells)
        ctx.geometry = geometry
        return spread(transposed(output, cells, geometry), geometry)

    @staticmethod
    def backward(ctx: Any, *images: Any) -> Any:
        return _Convolution.apply(images[0], *ctx.saved_tensors, ctx.geometry), None, None, None


def convolved(x: Tensor, weight: Tensor, geometry: Geometry, bias: Tensor | None = None) -> Tensor:
    """`convolution`, which is not to be differentiated."""
    laid = x.contiguous(memory_format=torch.channels_last)
    return functional.conv2d(laid, weight, bias, stride=geometry.stride, padding=geometry.padding)


def transposed(output: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """The cells of images, to be `spread`, from outputs (M, out, H', W') and `cell_weights`: the transpose of `convolved`."""
    padded = functional.pad(output, geometry.margins)
    return functional.conv2d(padded.contiguous(memory_format=torch.channels_last), cells)


def weight_gradient(x: Tensor, output: Tensor, problems: int, geometry: Geometry) -> Tensor:
    """(P, out, in, *kernel) from images (P * N, in, H, W) and output gradients (P * N, out, H', W'); differentiable once."""
    found: Tensor = _WeightGradient.apply(x, output, problems, geometry)
    return found.permute(0, 1, 4, 2, 3)


class _WeightGradient(torch.autograd.Function):
    """The patches of the images serve both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, problems: int, geometry: Geometry) -> Tensor:
        columns = patches(x, problems, geometry)
        ctx.save_for_backward(columns, output)
        ctx.geometry = geometry
        return correlated(columns, output, geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        columns, output = ctx.saved_tensors
        x = outputs = None
        if ctx.needs_input_grad[1]:
            outputs = convolved_by_own(columns, gradients[0], ctx.geometry)
        if ctx.needs_input_grad[0]:
            x = spread(transposed_by_own(output, gradients[0], ctx.geometry), ctx.geometry)
        return x, outputs, None, None


def patches(x: Tensor, problems: int, geometry: Geometry) -> Tensor:
    """(P, N * H' * W', kh * kw * in) from images (P * N, in, H, W): what the kernel sees at each position."""
    top, left = geometry.padding
    return _patches(x, problems, geometry.kernel, geometry.stride, (left, left, top, top))


def correlated(columns: Tensor, output: Tensor, geometry: Geometry) -> Tensor:
    """(P, out, *kernel, in), the gradient of each problem's weights, from `patches` and output gradients (P * N, out, H', W')."""
    rows = output.permute(0, 2, 3, 1).reshape(len(columns), -1, output.shape[1])
    return (rows.transpose(1, 2) @ columns).reshape(len(columns), output.shape[1], *geometry.kernel, -1)


def convolved_by_own(columns: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """(P * N, out, H', W') from `patches` and weights (P, out, *kernel, in) of each problem's own."""
    return _images(weight.flatten(2) @ columns.transpose(1, 2), geometry.out)


def transposed_by_own(output: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The cells of images, from outputs (P * N, out, H', W') and weights (P, out, *kernel, in): the transpose of the last one."""
    columns = _patches(output, len(weight), geometry.cells, 1, geometry.margins)
    return _images(_turned(weight, geometry).transpose(1, 2) @ columns.transpose(1, 2), geometry.grid)


def _patches(x: Tensor, problems: int, kernel: Pair, stride: int, margins: tuple[int, int, int, int]) -> Tensor:
    """The same with the zeros around an image as they are asked for."""
    padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, *margins)).contiguous()
    count, height, width, depth = padded.shape
    (kh, kw), (image, row, column, _) = kernel, padded.stride()
    shape = count, (height - kh) // stride + 1, (width - kw) // stride + 1, kh, kw * depth
    return padded.as_strided(shape, (image, row * stride, column * stride, row, 1)).reshape(problems, -1, kh * kw * depth)


def _images(rows: Tensor, sides: Pair) -> Tensor:
    """(P * N, C, *sides) from (P, C, N * H * W)."""
    problems, channels, _ = rows.shape
    return rows.reshape(problems, channels, -1, *sides).transpose(1, 2).reshape(-1, channels, *sides)


def _turned(weight: Tensor, geometry: Geometry) -> Tensor:
    """(P, cells * out, stride * stride * in) from weights (P, out, *kernel, in): of the transposed convolution, cell by cell."""
    problems, out, kh, kw, depth = weight.shape
    s, (top, left), (rows, columns) = geometry.stride, geometry.lead, geometry.cells
    padded = functional.pad(weight, (0, 0, left, columns * s - kw - left, top, rows * s - kh - top))
    cells = padded.reshape(problems, out, rows, s, columns, s, depth).flip(2, 4)
    return cells.permute(0, 2, 4, 1, 3, 5, 6).reshape(problems, rows * columns * out, s * s * depth)


def spread(cells: Tensor, geometry: Geometry) -> Tensor:
    """(M, C, H, W) from (M, stride * stride * C, H / stride, W / stride), rounded up: the pixels of each cell."""
    s, (height, width) = geometry.stride, geometry.sides
    if s == 1:
        return cells
    count, channels, rows, columns = cells.shape
    pixels = cells.reshape(count, s, s, channels // s**2, rows, columns).permute(0, 4, 1, 5, 2, 3)
    return pixels.reshape(count, rows * s, columns * s, -1)[:, :height, :width].permute(0, 3, 1, 2)
