"""Support for networks from outside this project.

Lazy layers get their sizes by one forward pass, output objects are replaced by their logits, embeddings take tokens as floats,
networks in half or double precision compute in float32, and modules whose code no other process can import are copied.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedsim.recording.observation import ModelSpec

_CLIENT_TYPES = "_client_types"
"""Attribute of a converted network with the types of its tensors before the conversion."""


def adapt(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Change a foreign network in place so that it takes floats and returns logits, and return it.

    Lazy layers are initialised by a forward pass of zeros (1, *shape), embeddings accept indices as floats, a network in half or
    double precision is converted to float32, and the output of the network, if it is an object or a dictionary, is replaced by
    its `logits`.
    """
    _compute_in_float32(_take_tokens_as_floats(model))
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        training = model.training
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
        model.train(training)
    return _return_logits(model)


def _compute_in_float32(model: nn.Module) -> nn.Module:
    """Convert a network whose parameters are all in half precision or float64 to float32 in place, and return it.

    Attacks compute in float32. The original types stay known, see `find_client_types`. A network of several types stays as it is,
    since its code converts between them.
    """
    found = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if len(found) == 1 and found != {torch.float32}:
        types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        vars(model)[_CLIENT_TYPES] = types
        model.float()
    return model


def find_client_types(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the types of a network's tensors by name, as the user's function made them, before `_compute_in_float32`."""
    known: dict[str, torch.dtype] | None = vars(model).get(_CLIENT_TYPES)
    return dict(known) if known is not None else {name: tensor.dtype for name, tensor in model.state_dict().items()}


def _take_tokens_as_floats(model: nn.Module) -> nn.Module:
    """Make the embeddings of a network accept indices as floats, which all examples are, and return the network."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.register_forward_pre_hook(convert_indices)
    return model


def convert_indices(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the arguments of an embedding with the first, its indices, converted from floats to int64.

    If the first argument is not a tensor of floats, None is returned, which leaves the arguments unchanged.
    """
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        return (args[0].long(), *args[1:])
    return None


def _return_logits(model: nn.Module) -> nn.Module:
    """Make a network that returns an object or a dictionary return its `logits` instead, by a hook; return the network."""
    model.register_forward_hook(take_logits)
    return model


def take_logits(model: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """Return the tensor `logits` of an output object or dictionary; None, which leaves the output unchanged, if it has none."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module.

    It also works for modules that store results of computations, such as those of `torch.nn.utils.weight_norm`.
    """
    values = [value for submodule in module.modules() for value in vars(submodule).values()]
    computed = {id(value): value.detach().clone() for value in values if isinstance(value, Tensor) and not value.is_leaf}
    return copy.deepcopy(module, computed)


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """A specification that holds the network itself. No other process can build it by its name, so it cannot be recorded.

    module: the network; `fedsim.models.build` returns copies of it, so that it stays unchanged.
    """

    module: nn.Module = field(repr=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleSpec":
        """Return a specification that holds a copy of `module` on the CPU. The `grad` of each parameter of the copy is None."""
        kept = copy_module(module).cpu()
        kept.zero_grad(set_to_none=True)
        return cls(name=f"{type(module).__qualname__} (in memory)", module=kept)

    def copy(self) -> nn.Module:
        """Return a copy of the network, on the meta device if that is PyTorch's default device, else on the CPU.

        It takes floats as indices of embeddings, computes in float32 and returns logits, see `adapt`.
        """
        module = _compute_in_float32(_take_tokens_as_floats(copy_module(self.module)))
        return _return_logits(module.to("meta") if torch.get_default_device().type == "meta" else module)
