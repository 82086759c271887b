"""Convolutions that can be differentiated twice by their input, and weight gradients of many problems.

The weights of these convolutions get no gradient. Images are stored channels last.
`convolve_by_library` calls PyTorch's convolution, and spares its double backward the weight gradient.
`convolve` is faster for few channels on a CPU, where PyTorch's input gradient takes several times as long as the convolution,
in particular with strides. It computes the input gradient as a convolution of stride 1. For that, the image is divided into cells
of stride x stride pixels, and the pixels of a cell become channels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Pair = tuple[int, int]
ConvolutionSetting = tuple[Pair, Pair, Pair, int]
"""Stride, padding, dilation, groups."""


def to_channels_last(t: Tensor) -> Tensor:
    """Return t (..., in, H, W) with a pixel's channels adjacent in memory; unchanged with fewer than four axes."""
    return t.movedim(-3, -1).contiguous().movedim(-1, -3) if t.ndim >= 4 else t


def convolve_by_library(x: Tensor, weight: Tensor, setting: ConvolutionSetting) -> Tensor:
    """Return PyTorch's convolution (M, out, H', W') without bias. The weights (out, in / groups, *kernel) get no gradient."""
    result: Tensor = _Library.apply(x, weight, setting)
    return result


class _Library(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, setting: ConvolutionSetting) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.setting = x.shape, setting
        return functional.conv2d(x, weight, None, *setting)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return _LibraryTransposed.apply(outputs[0], *ctx.saved_tensors, ctx.shape, ctx.setting), None, None


class _LibraryTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor, shape: torch.Size, setting: ConvolutionSetting) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.setting = setting
        images = torch.empty(shape, dtype=output.dtype, device=output.device, memory_format=torch.channels_last)
        found: Tensor = compute_derivatives(output, images, weight, setting, (True, False, False))[0]
        return found

    @staticmethod
    def backward(ctx: Any, *images: Any) -> Any:
        return _Library.apply(images[0], *ctx.saved_tensors, ctx.setting), None, None, None


def compute_derivatives(
    output: Tensor, x: Tensor, weight: Tensor, setting: ConvolutionSetting, needed: tuple[bool, bool, bool]
) -> Any:
    """Return the derivatives (by input, by weight, by bias) of a loss behind a convolution; None for those that are not `needed`.

    output: derivative of the loss by the convolution's output. needed: in the same order as the result. The values of x are used
    only for the derivative by the weight.
    """
    stride, padding, dilation, groups = setting
    return torch.ops.aten.convolution_backward(output, x, weight, None, stride, padding, dilation, False, (0, 0), groups, needed)


@dataclass(frozen=True)
class Geometry:
    """The sizes of a convolution; pairs are (rows, columns).

    kernel, padding: of the convolution. stride: the same for rows and columns. sides: height and width of the input images.
    A cell is a block of stride x stride pixels of the input.
    """

    kernel: Pair
    stride: int
    padding: Pair
    sides: Pair

    @property
    def out(self) -> Pair:
        """Height and width of the output."""
        return self._map_sides(lambda k, p, side: (side + 2 * p - k) // self.stride + 1)

    @property
    def grid(self) -> Pair:
        """Number of cells in the image, rounded up, as (rows, columns)."""
        return self._map_sides(lambda k, p, side: -(-side // self.stride))

    @property
    def lead(self) -> Pair:
        """Number of zeros (rows, columns) to prepend to the kernel, so that it starts at the boundary of a cell."""
        return self._map_sides(lambda k, p, side: -p % self.stride)

    @property
    def cells(self) -> Pair:
        """Number of cells (rows, columns) that the kernel covers after `lead` zeros were prepended."""
        return self._map_sides(lambda k, p, side: -(-(-p % self.stride + k) // self.stride))

    @property
    def margins(self) -> tuple[int, int, int, int]:
        """Zero padding (left, right, top, bottom) of the output's derivative; a negative number crops.

        The convolution of the padded derivative with the flipped kernel, at stride 1, has one output position per cell of the
        input.
        """
        before = self._map_sides(lambda k, p, side: -(-p // self.stride))
        (top, bottom), (left, right) = (
            (cells - 1 - first, grid + first - out)
            for cells, first, grid, out in zip(self.cells, before, self.grid, self.out, strict=True)
        )
        return left, right, top, bottom

    def _map_sides(self, of: Callable[[int, int, int], int]) -> Pair:
        rows, columns = (of(*each) for each in zip(self.kernel, self.padding, self.sides, strict=True))
        return rows, columns


MAX_SMALL_PRODUCTS = 8e6
"""Multiplications per image, at stride 1, up to which a convolution counts as small. LeNets are below, residual networks above;
sizes in between have not been measured."""


def is_small(weight: Sequence[int], image: Sequence[int]) -> bool:
    """Return whether `convolve` should beat PyTorch on a CPU (MAX_SMALL_PRODUCTS). weight, image: shapes; image is (in, H, W)."""
    return prod(weight) * prod(image[1:]) < MAX_SMALL_PRODUCTS


def convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the convolution (M, out, H', W') of x (M, in, H, W) without bias. The weights (out, in, *kernel) get no gradient."""
    result: Tensor = _Convolution.apply(x, to_channels_last(weight), arrange_cells(weight, geometry), geometry)
    return result


def arrange_cells(weight: Tensor, geometry: Geometry) -> Tensor:
    """Return weights (out, in, *kernel) rearranged for `convolve_transposed`, (stride * stride * in, out, *cells)."""
    turned = _flip_weights(weight.permute(0, 2, 3, 1)[None], geometry)[0]
    return to_channels_last(turned.reshape(*geometry.cells, len(weight), -1).permute(3, 2, 0, 1))


class _Convolution(torch.autograd.Function):
    """Autograd function of `convolve`, whose backward pass is `_Transposed`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(weight, cells)
        ctx.geometry = geometry
        return convolve_without_autograd(x, weight, geometry)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        return _Transposed.apply(outputs[0], *ctx.saved_tensors, ctx.geometry), None, None, None


class _Transposed(torch.autograd.Function):
    """Autograd function of the transposed convolution, whose backward pass is `_Convolution`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(weight, cells)
        ctx.geometry = geometry
        return spread(convolve_transposed(output, cells, geometry), geometry)

    @staticmethod
    def backward(ctx: Any, *images: Any) -> Any:
        return _Convolution.apply(images[0], *ctx.saved_tensors, ctx.geometry), None, None, None


def convolve_without_autograd(x: Tensor, weight: Tensor, geometry: Geometry, bias: Tensor | None = None) -> Tensor:
    """Return the values of `convolve`, plus a bias (out,) if given, without its faster input gradient."""
    laid = x.contiguous(memory_format=torch.channels_last)
    return functional.conv2d(laid, weight, bias, stride=geometry.stride, padding=geometry.padding)


def convolve_transposed(output: Tensor, cells: Tensor, geometry: Geometry) -> Tensor:
    """Return the transposed convolution of outputs (M, out, H', W') as cells, which `spread` turns into images.

    cells: weights as `arrange_cells` returns them. The result is (M, stride * stride * in, *geometry.grid).
    """
    padded = functional.pad(output, geometry.margins)
    return functional.conv2d(padded.contiguous(memory_format=torch.channels_last), cells)


def compute_weight_gradients(x: Tensor, output: Tensor, problems: int, geometry: Geometry) -> Tensor:
    """Return the weight gradients (P, out, in, *kernel) of P problems; differentiable once, by x and output.

    x: images (P * N, in, H, W). output: derivatives by the convolution's output, (P * N, out, H', W').
    """
    result: Tensor = _WeightGradient.apply(x, output, problems, geometry)
    return result.permute(0, 1, 4, 2, 3)


class _WeightGradient(torch.autograd.Function):
    """Autograd function of `compute_weight_gradients`; the image patches of the forward pass are reused in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output: Tensor, problems: int, geometry: Geometry) -> Tensor:
        columns = extract_patches(x, problems, geometry)
        ctx.save_for_backward(columns, output)
        ctx.geometry = geometry
        return correlate(columns, output, geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        columns, output = ctx.saved_tensors
        x = outputs = None
        if ctx.needs_input_grad[1]:
            outputs = convolve_per_problem(columns, gradients[0], ctx.geometry)
        if ctx.needs_input_grad[0]:
            x = spread(convolve_transposed_per_problem(output, gradients[0], ctx.geometry), ctx.geometry)
        return x, outputs, None, None


def extract_patches(x: Tensor, problems: int, geometry: Geometry) -> Tensor:
    """Return the image patches under the kernel at each position, (P, N * H' * W', kh * kw * in), of images (P * N, in, H, W)."""
    top, left = geometry.padding
    return _extract_patches(x, problems, geometry.kernel, geometry.stride, (left, left, top, top))


def correlate(columns: Tensor, output: Tensor, geometry: Geometry) -> Tensor:
    """Return the weight gradients (P, out, *kernel, in) of P problems from image patches and output gradients.

    columns: as `extract_patches` returns them. output: derivatives by the convolution's output, (P * N, out, H', W').
    """
    rows = output.permute(0, 2, 3, 1).reshape(len(columns), -1, output.shape[1])
    return (rows.transpose(1, 2) @ columns).reshape(len(columns), output.shape[1], *geometry.kernel, -1)


def convolve_per_problem(columns: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the convolutions (P * N, out, H', W') of image patches with separate weights (P, out, *kernel, in) per problem."""
    return _reshape_to_images(weight.flatten(2) @ columns.transpose(1, 2), geometry.out)


def convolve_transposed_per_problem(output: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the transposed convolutions of outputs with separate weights per problem, as cells that `spread` turns into images.

    A cell is a block of stride x stride pixels of an image. The result has the shape (P * N, stride * stride * in,
    *geometry.grid).
    output: (P * N, out, H', W'). weight: (P, out, *kernel, in).
    """
    columns = _extract_patches(output, len(weight), geometry.cells, 1, geometry.margins)
    return _reshape_to_images(_flip_weights(weight, geometry).transpose(1, 2) @ columns.transpose(1, 2), geometry.grid)


def _extract_patches(x: Tensor, problems: int, kernel: Pair, stride: int, margins: tuple[int, int, int, int]) -> Tensor:
    """Return the patches of x (P * N, C, H, W) under a kernel at each of its positions, (P, N * positions, kh * kw * C).

    margins: zero padding of x (left, right, top, bottom); a negative number crops.
    """
    padded = functional.pad(x.permute(0, 2, 3, 1), (0, 0, *margins)).contiguous()
    count, height, width, depth = padded.shape
    (kh, kw), (image, row, column, _) = kernel, padded.stride()
    shape = count, (height - kh) // stride + 1, (width - kw) // stride + 1, kh, kw * depth
    return padded.as_strided(shape, (image, row * stride, column * stride, row, 1)).reshape(problems, -1, kh * kw * depth)


def _reshape_to_images(rows: Tensor, sides: Pair) -> Tensor:
    """Reshape rows (P, C, N * H * W) to images (P * N, C, H, W). sides: (H, W)."""
    problems, channels, _ = rows.shape
    return rows.reshape(problems, channels, -1, *sides).transpose(1, 2).reshape(-1, channels, *sides)


def _flip_weights(weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the weights of the transposed convolution, (P, cells * out, stride * stride * in), of weights (P, out, *kernel, in).

    The kernel is divided into blocks of stride x stride pixels (cells). The order of the cells is reversed, and the pixels of a
    cell become channels.
    """
    problems, out, kh, kw, depth = weight.shape
    s, (top, left), (rows, columns) = geometry.stride, geometry.lead, geometry.cells
    padded = functional.pad(weight, (0, 0, left, columns * s - kw - left, top, rows * s - kh - top))
    cells = padded.reshape(problems, out, rows, s, columns, s, depth).flip(2, 4)
    return cells.permute(0, 2, 4, 1, 3, 5, 6).reshape(problems, rows * columns * out, s * s * depth)


def spread(cells: Tensor, geometry: Geometry) -> Tensor:
    """Return images (M, C, H, W) from their cells (M, stride * stride * C, ceil(H / stride), ceil(W / stride)).

    A cell is a block of stride x stride pixels, which are stored as channels. Pixels beyond the border are cut off. H and W are
    `geometry.sides`.
    """
    s, (height, width) = geometry.stride, geometry.sides
    if s == 1:
        return cells
    count, channels, rows, columns = cells.shape
    pixels = cells.reshape(count, s, s, channels // s**2, rows, columns).permute(0, 4, 1, 5, 2, 3)
    return pixels.reshape(count, rows * s, columns * s, -1)[:, :height, :width].permute(0, 3, 1, 2)
