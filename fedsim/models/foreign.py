"""Adaptation of foreign networks to attacks: initialised lazy layers, and logits as output."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def adapted(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Initialise lazy layers by a forward pass of zeros, and make the network return logits (`with_logits`)."""
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        training = model.training
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
        model.train(training)
    return with_logits(model)


def with_logits(model: nn.Module) -> nn.Module:
    """Make a network that returns an object or a dictionary return its `logits` instead, by a forward hook."""
    model.register_forward_hook(take_logits)
    return model


def take_logits(model: nn.Module, given: tuple[Any, ...], output: Any) -> Tensor | None:
    """Return the `logits` of an output object or dictionary; None, which leaves the output unchanged, for anything else."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None
