"""What networks of other people need before attacks call them: sizes of lazy layers, and logits as their output."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def adapted(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Return the network with the sizes of lazy layers, by a first call with zeros, and with logits as its output."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        training = model.training
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
        model.train(training)
    return with_logits(model)


def with_logits(model: nn.Module) -> nn.Module:
    """Return the network with the `logits` of what it gives as its output, where that is an object or a dictionary."""
    model.register_forward_hook(take_logits)
    return model


def take_logits(model: nn.Module, given: tuple[Any, ...], output: Any) -> Tensor | None:
    """Return the `logits` of an output object or a dictionary; None, which keeps the output, of anything else."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None
