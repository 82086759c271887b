"""Notes, while a network runs, which layers its weights go into and what went in with them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attacker.attacks.gradients import layer_gradients as layers
from attacker.attacks.gradients.convolutions import Geometry, convolution, is_small, library, weight_gradient

TapRule = Callable[[Tensor], layers.Stack]
"""From the gradient of a layer's output, (P * N, ...), that of a weight for each problem."""


@dataclass(frozen=True)
class Tap:
    """One call of a layer. edge: its output in the graph, as it was before anything was written over it. rules: by weight."""

    edge: GradientEdge
    rules: Mapping[str, TapRule]


class Taps(TorchFunctionMode):
    """While it is entered, `found` grows by every call of a layer that some of `weights` go into, by the tensors themselves.

    precision: of the convolutions that torch computes; all else is in the precision of the weights.
    """

    def __init__(self, weights: Mapping[str, Tensor], problems: int, precision: torch.dtype | None = None) -> None:
        super().__init__()
        self.precision = precision
        self.names = {id(weight): name for name, weight in weights.items()}
        self.problems = problems
        self.found: list[Tap] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = LAYERS.get(func)
        return func(*args, **kwargs or {}) if layer is None else layer(self, *args, **kwargs or {})

    def note(self, output: Tensor, *rules: tuple[Tensor | None, TapRule]) -> Tensor:
        """The output, once it is written down how the gradient of each weight comes from the output's."""
        named = {self.names[id(weight)]: rule for weight, rule in rules if id(weight) in self.names}
        if named:
            self.found.append(Tap(get_gradient_edge(output), named))
        return output


def _linear(taps: Taps, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    problems = taps.problems  # rules that held the taps would keep all activations until the next collection of cycles
    return taps.note(
        functional.linear(input, weight, bias),
        (weight, lambda g: layers.of_linear_weight(input, g, problems)),
        (bias, lambda g: layers.of_linear_bias(g, problems)),
    )


def _convolution(
    taps: Taps,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    problems = taps.problems
    kernel, each = (weight.shape[2], weight.shape[3]), (_pair(stride), _padding(padding, weight, dilation), _pair(dilation))
    input = input.contiguous(memory_format=torch.channels_last)
    if groups == 1 and each[2] == (1, 1) and each[0][0] == each[0][1] and _is_small(taps, input, weight):
        geometry = Geometry(kernel, each[0][0], each[1], (input.shape[2], input.shape[3]))
        output = convolution(input, weight, geometry)
        of_weight: TapRule = lambda g: weight_gradient(input, g, problems, geometry)  # noqa: E731
    else:
        taken, whole = taps.precision or input.dtype, input.dtype
        fed = input.to(taken)
        output = library(fed, weight.detach().to(taken), (*each, groups)).to(whole)
        of_weight = lambda g: _cast(  # noqa: E731
            layers.of_convolution_weight(fed, g.to(taken), problems, kernel, *each, groups), whole
        )
    output = output if bias is None else output + bias[:, None, None]
    return taps.note(output, (weight, of_weight), (bias, lambda g: layers.of_channel_bias(g, problems)))


def _cast(stack: layers.Stack, whole: torch.dtype) -> layers.Stack:
    return tuple(t.to(whole) for t in stack) if isinstance(stack, tuple) else stack.to(whole)


def _is_small(taps: Taps, input: Tensor, weight: Tensor) -> bool:
    """Whether calls of torch's convolutions, one a problem, would take longer than laying out what products of matrices need."""
    return taps.problems > 1 and input.device.type == "cpu" and is_small(weight.shape, input.shape[1:])


def _batch_norm(
    taps: Taps,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """By its buffers, as a scale and an offset: torch's own is slow to differentiate twice."""
    if training or running_mean is None or running_var is None:
        raise ValueError("batch norm that goes by the batch makes its examples act on each other")
    problems = taps.problems
    shape = (1, -1, *(1,) * (input.ndim - 2))
    root = (running_var + eps).rsqrt()
    scale = root if weight is None else root * weight
    offset = -running_mean * scale if bias is None else bias - running_mean * scale
    return taps.note(
        torch.addcmul(offset.reshape(shape), input, scale.reshape(shape)),
        (weight, lambda g: root * layers.of_channel_bias((input - running_mean.reshape(shape)) * g, problems)),
        (bias, lambda g: layers.of_channel_bias(g, problems)),
    )


LAYERS: Mapping[Any, Callable[..., Tensor]] = {
    functional.linear: _linear,
    functional.conv2d: _convolution,
    functional.batch_norm: _batch_norm,
}
"""What weights may go into, by torch's function."""


def _pair(setting: int | Sequence[int]) -> layers.Pair:
    if isinstance(setting, int):
        return setting, setting
    return setting[0], setting[-1]


def _padding(padding: int | Sequence[int] | str, weight: Tensor, dilation: int | Sequence[int]) -> layers.Pair:
    if not isinstance(padding, str):
        return _pair(padding)
    spread = [d * (k - 1) for d, k in zip(_pair(dilation), weight.shape[2:], strict=True)]
    if padding == "same" and any(total % 2 for total in spread):
        raise ValueError("a convolution that pads one side more than the other")
    return (0, 0) if padding == "valid" else (spread[0] // 2, spread[1] // 2)
