"""Weight and bias gradients of one layer for each of P problems (batches of N examples) that share the layer's weights.

The examples of all problems are in one batch, (P * N, ...), with those of a problem next to each other. x is the layer's input,
and `output` the derivative of the loss by the layer's output. Autograd can differentiate the results by both.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attacker.attacks.gradients.convolutions import Pair, compute_derivatives, to_channels_last

Stack = Tensor | tuple[Tensor, ...]
"""Gradients of all problems: one tensor with a row per problem, or a tuple with a tensor per problem."""


def compute_linear_weight_gradients(x: Tensor, output: Tensor, problems: int) -> Tensor:
    """Return the weight gradients (P, out, in) of a linear layer. x: (P * N, ..., in). output: slopes, (P * N, ..., out)."""
    rows, columns = (t.reshape(problems, -1, t.shape[-1]) for t in (output, x))
    return rows.transpose(1, 2) @ columns


def compute_linear_bias_gradients(output: Tensor, problems: int) -> Tensor:
    """Return the bias gradients (P, out) of a linear layer. output: derivatives by its output, (P * N, ..., out)."""
    return output.reshape(problems, -1, output.shape[-1]).sum(dim=1)


def compute_channel_bias_gradients(output: Tensor, problems: int) -> Tensor:
    """Return the gradients (P, C) of a bias per channel. output: derivatives by the layer's output, (P * N, C, ...)."""
    return output.reshape(problems, -1, *output.shape[1:]).transpose(1, 2).flatten(2).sum(dim=2)


def compute_convolution_weight_gradients(
    x: Tensor, output: Tensor, problems: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Stack:
    """Return the weight gradients of a convolution for P problems: a tuple of P tensors on a CPU, otherwise one tensor (P, ...).

    Each gradient has the shape (out, in / groups, *kernel).
    x: images (P * N, in, H, W). output: derivative of the loss by the convolution's output, (P * N, out, H', W').
    """
    if x.device.type == "cpu":
        gradients: tuple[Tensor, ...] = _OneByOne.apply(x, output, problems, kernel, stride, padding, dilation, groups)
        return gradients
    patches = functional.unfold(x, kernel, dilation=dilation, padding=padding, stride=stride)
    left, right = (t.reshape(problems, -1, groups, t.shape[1] // groups, t[0, 0].numel()) for t in (output, patches))
    if left.shape[1] == 1:
        left, right = left[:, 0], right[:, 0]
    else:
        left, right = (t.permute(0, 2, 3, 1, 4).flatten(3) for t in (left, right))
    return (left @ right.transpose(2, 3)).reshape(problems, output.shape[1], x.shape[1] // groups, *kernel)


class _OneByOne(torch.autograd.Function):
    """Autograd function that computes a convolution's weight gradient for one problem after the other, by PyTorch's own kernel.

    On a CPU this is twice as fast as matrix products of image patches.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output: Tensor, problems: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, output)
        ctx.setting = stride, padding, dilation, groups
        like = to_channels_last(
            x.new_empty(output.shape[1], x.shape[1] // groups, *kernel)
        )  # 3 times faster than contiguous weights
        pairs = zip(x.chunk(problems), output.chunk(problems), strict=True)
        return tuple(compute_derivatives(o, i, like, ctx.setting, (False, True, False))[1] for i, o in pairs)

    @staticmethod
    def backward(ctx: Any, *weights: Any) -> Any:
        (x, output), setting = ctx.saved_tensors, ctx.setting
        each = list(zip(x.chunk(len(weights)), output.chunk(len(weights)), weights, strict=True))
        of_x = of_output = None
        if ctx.needs_input_grad[0]:
            of_x = torch.cat([compute_derivatives(o, i, w, setting, (True, False, False))[0] for i, o, w in each])
        if ctx.needs_input_grad[1]:
            of_output = torch.cat([functional.conv2d(i, w, None, *setting) for i, _, w in each])
        return of_x, of_output, *(None,) * 6
