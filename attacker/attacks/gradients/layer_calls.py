"""Records of a forward pass's calls of linear layers, 2D convolutions and batch norm, which yield weight gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from attacker.attacks.gradients import layer_gradients as layers
from attacker.attacks.gradients.convolutions import (
    Geometry,
    Pair,
    compute_weight_gradients,
    convolve,
    convolve_by_library,
    is_small,
)

WeightGradientRule = Callable[[Tensor], layers.Stack]
"""Maps the gradient of a layer's output, (P * N, ...), to the gradients of one of its weights for each of the P problems."""


@dataclass(frozen=True)
class LayerCall:
    """The record of one layer call.

    edge:  autograd's edge of the layer's output, before any in-place operation on this output; `torch.autograd.grad` computes the
           derivative of the loss by this output.
    rules: dict from the name of each recorded weight to a function that maps that derivative to the weight's gradients for the P
           problems (batches that share the weights): a tensor (P, *shape) or a tuple of P tensors.
    """

    edge: GradientEdge
    rules: Mapping[str, WeightGradientRule]


class LayerCallRecorder(TorchFunctionMode):
    """A context manager that records in `calls` the calls of linear layers, 2D convolutions and batch norm that use `weights`.

    Their outputs are computed by this module's own functions. Other uses of a weight are not recorded. A weight is recognised by
    the identity of its tensor.
    problems:  number P of problems (batches that share the weights) whose examples are in the forward pass.
    precision: data type of convolutions, except of small ones (`_is_small`); None for the data type of their inputs.
    """

    def __init__(self, weights: Mapping[str, Tensor], problems: int, precision: torch.dtype | None = None) -> None:
        super().__init__()
        self.precision = precision
        self.names = {id(weight): name for name, weight in weights.items()}
        self.problems = problems
        self.calls: list[LayerCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        layer = LAYERS.get(func)
        return func(*args, **kwargs or {}) if layer is None else layer(self, *args, **kwargs or {})

    def record(self, output: Tensor, *rules: tuple[Tensor | None, WeightGradientRule]) -> Tensor:
        """Record a layer call with one (weight, rule) pair for each of its weights, and return its output unchanged.

        Pairs are ignored if the weight is None, as without a bias, or is not one of `weights`. If none is left, nothing is
        recorded.
        """
        named = {self.names[id(weight)]: rule for weight, rule in rules if id(weight) in self.names}
        if named:
            self.calls.append(LayerCall(get_gradient_edge(output), named))
        return output


def _linear(recorder: LayerCallRecorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    problems = recorder.problems  # a rule that refers to `recorder` would keep all activations until garbage is collected
    return recorder.record(
        functional.linear(input, weight, bias),
        (weight, lambda g: layers.compute_linear_weight_gradients(input, g, problems)),
        (bias, lambda g: layers.compute_linear_bias_gradients(g, problems)),
    )


def _convolution(
    recorder: LayerCallRecorder,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    problems = recorder.problems
    kernel, settings = (
        (weight.shape[2], weight.shape[3]),
        (_to_pair(stride), _get_padding(padding, weight, dilation), _to_pair(dilation)),
    )
    input = input.contiguous(memory_format=torch.channels_last)
    if groups == 1 and settings[2] == (1, 1) and settings[0][0] == settings[0][1] and _is_small(recorder, input, weight):
        geometry = Geometry(kernel, settings[0][0], settings[1], (input.shape[2], input.shape[3]))
        output = convolve(input, weight, geometry)
        of_weight: WeightGradientRule = lambda g: compute_weight_gradients(input, g, problems, geometry)  # noqa: E731
    else:
        dtype, input_dtype = recorder.precision or input.dtype, input.dtype
        converted = input.to(dtype)
        output = convolve_by_library(converted, weight.detach().to(dtype), (*settings, groups)).to(input_dtype)

        def of_weight(g: Tensor) -> layers.Stack:
            stack = layers.compute_convolution_weight_gradients(converted, g.to(dtype), problems, kernel, *settings, groups)
            return tuple(t.to(input_dtype) for t in stack) if isinstance(stack, tuple) else stack.to(input_dtype)

    output = output if bias is None else output + bias[:, None, None]
    return recorder.record(output, (weight, of_weight), (bias, lambda g: layers.compute_channel_bias_gradients(g, problems)))


def _is_small(recorder: LayerCallRecorder, input: Tensor, weight: Tensor) -> bool:
    """Return whether `convolve` is faster than PyTorch, which it is on a CPU for small convolutions of several problems."""
    return recorder.problems > 1 and input.device.type == "cpu" and is_small(weight.shape, input.shape[1:])


def _batch_norm(
    recorder: LayerCallRecorder,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return the output of batch norm with running statistics, computed as a scale and an offset, and record the call.

    PyTorch's own function has a slow second derivative. Raises ValueError if the layer uses the statistics of the batch
    (`training`, or no running statistics).
    """
    if training or running_mean is None or running_var is None:
        raise ValueError(
            "batch norm uses the mean and variance of the batch, so that cases in one forward pass would affect each other; "
            "compute the gradient of each case separately"
        )
    problems = recorder.problems
    shape = (1, -1, *(1,) * (input.ndim - 2))
    root = (running_var + eps).rsqrt()
    scale = root if weight is None else root * weight
    offset = -running_mean * scale if bias is None else bias - running_mean * scale
    return recorder.record(
        torch.addcmul(offset.reshape(shape), input, scale.reshape(shape)),
        (weight, lambda g: root * layers.compute_channel_bias_gradients((input - running_mean.reshape(shape)) * g, problems)),
        (bias, lambda g: layers.compute_channel_bias_gradients(g, problems)),
    )


LAYERS: Mapping[Any, Callable[..., Tensor]] = {
    functional.linear: _linear,
    functional.conv2d: _convolution,
    functional.batch_norm: _batch_norm,
}
"""The layer functions of PyTorch whose weight gradients can be recorded, and their replacements."""


def _to_pair(setting: int | Sequence[int]) -> Pair:
    if isinstance(setting, int):
        return setting, setting
    return setting[0], setting[-1]


def _get_padding(padding: int | Sequence[int] | str, weight: Tensor, dilation: int | Sequence[int]) -> Pair:
    if not isinstance(padding, str):
        return _to_pair(padding)
    spread = [d * (k - 1) for d, k in zip(_to_pair(dilation), weight.shape[2:], strict=True)]
    if padding == "same" and any(total % 2 for total in spread):
        raise ValueError(f"padding='same' of a {tuple(weight.shape[2:])} kernel is uneven; use a kernel with odd sides")
    return (0, 0) if padding == "valid" else (spread[0] // 2, spread[1] // 2)
