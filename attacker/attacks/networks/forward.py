"""The forward pass of a network as attacks run it: with given weights, in any memory layout, differentiable twice."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode


def forward_pass(model: nn.Module, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits (N, K) of `model` with the weights and buffers `state` for inputs x (N, *shape), as it is fed.

    Attacks lay convolutions out channels last, batch their problems with `vmap`, and need the second derivative. What a network's
    own code does not stand of that is replaced by what computes the same values.
    """
    with differentiable_twice(model), _AnyLayout():
        logits: Tensor = functional_call(model, dict(state), (x,))
    return logits


@contextmanager
def differentiable_twice(model: nn.Module) -> Iterator[None]:
    """Let PyTorch choose kernels that have a second derivative: fused attention and cuDNN's recurrent layers have none."""
    with ExitStack() as chosen:
        chosen.enter_context(sdpa_kernel([SDPBackend.MATH]))
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            chosen.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


class _AnyLayout(TorchFunctionMode):
    """Let `view` take tensors of any memory layout, and hard sigmoids be differentiated twice."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = _REPLACED.get(func)
        return func(*args, **kwargs or {}) if replaced is None else replaced(*args, **kwargs or {})


def _view(x: Tensor, *shape: Any, **keywords: Any) -> Tensor:
    try:
        return x.view(*shape, **keywords)
    except RuntimeError:
        if keywords or (shape and isinstance(shape[0], torch.dtype)):
            raise
        return x.reshape(*shape)  # raises as well where the sizes do not fit


def _view_as(x: Tensor, other: Tensor) -> Tensor:
    return _view(x, other.shape)


def _hard_sigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """PyTorch's own has no second derivative."""
    found = (input + 3).clamp(0, 6) / 6
    return input.copy_(found) if inplace else found


_REPLACED: Mapping[Any, Any] = {
    Tensor.view: _view,
    Tensor.view_as: _view_as,
    functional.hardsigmoid: _hard_sigmoid,
}
