"""What one call of a layer adds to the weight gradients of many problems that share its weights.

Each function takes what went into the layer and the gradient of its output, both (P * N, ...) with the N examples of a problem
next to each other, and gives the gradient of each problem's loss, (P, *shape of the weight), or a tuple with that of each problem
where they are large: what is as large as the weights of all problems together is mostly waited for. All are differentiable.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attacker.attacks.gradients.convolutions import channels_last, derivatives

Pair = tuple[int, int]
Stack = Tensor | tuple[Tensor, ...]
"""One row for each problem."""


def of_linear_weight(x: Tensor, output: Tensor, problems: int) -> Tensor:
    """(P, out, in) from inputs (P * N, ..., in) and output gradients (P * N, ..., out)."""
    rows, columns = (t.reshape(problems, -1, t.shape[-1]) for t in (output, x))
    return rows.transpose(1, 2) @ columns


def of_linear_bias(output: Tensor, problems: int) -> Tensor:
    """(P, out) from output gradients (P * N, ..., out)."""
    return output.reshape(problems, -1, output.shape[-1]).sum(dim=1)


def of_channel_bias(output: Tensor, problems: int) -> Tensor:
    """(P, C) from output gradients (P * N, C, ...)."""
    return output.reshape(problems, -1, *output.shape[1:]).transpose(1, 2).flatten(2).sum(dim=2)


def of_convolution_weight(
    x: Tensor, output: Tensor, problems: int, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int
) -> Stack:
    """P of (out, in / groups, *kernel) from images (P * N, in, H, W) and output gradients (P * N, out, H', W')."""
    if x.device.type == "cpu":
        found: tuple[Tensor, ...] = _OneByOne.apply(x, output, problems, kernel, stride, padding, dilation, groups)
        return found
    patches = functional.unfold(x, kernel, dilation=dilation, padding=padding, stride=stride)
    left, right = (t.reshape(problems, -1, groups, t.shape[1] // groups, t[0, 0].numel()) for t in (output, patches))
    if left.shape[1] == 1:
        left, right = left[:, 0], right[:, 0]
    else:
        left, right = (t.permute(0, 2, 3, 1, 4).flatten(3) for t in (left, right))
    return (left @ right.transpose(2, 3)).reshape(problems, output.shape[1], x.shape[1] // groups, *kernel)


class _OneByOne(torch.autograd.Function):
    """By torch's convolutions, a problem at a time: on processors these have twice the speed of products of matrices."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        output: Tensor,
        problems: int,
        kernel: Pair,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, output)
        ctx.setting = stride, padding, dilation, groups
        like = channels_last(x.new_empty(output.shape[1], x.shape[1] // groups, *kernel))  # else a third as fast
        pairs = zip(x.chunk(problems), output.chunk(problems), strict=True)
        return tuple(derivatives(o, i, like, ctx.setting, (False, True, False))[1] for i, o in pairs)

    @staticmethod
    def backward(ctx: Any, *weights: Any) -> Any:
        (x, output), setting = ctx.saved_tensors, ctx.setting
        each = list(zip(x.chunk(len(weights)), output.chunk(len(weights)), weights, strict=True))
        of_x = of_output = None
        if ctx.needs_input_grad[0]:
            of_x = torch.cat([derivatives(o, i, w, setting, (True, False, False))[0] for i, o, w in each])
        if ctx.needs_input_grad[1]:
            of_output = torch.cat([functional.conv2d(i, w, None, *setting) for i, _, w in each])
        return of_x, of_output, *(None,) * 6
