"""A network that exists only as a PyTorch module in this process."""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedsim.models.foreign import with_logits
from fedsim.recording.observation import ModelSpec


def copy_module(module: nn.Module) -> nn.Module:
    """Return a deep copy of a module.

    It also works for modules that store results of computations, such as those of `torch.nn.utils.weight_norm`.
    """
    values = [value for one in module.modules() for value in vars(one).values()]
    computed = {id(value): value.detach().clone() for value in values if isinstance(value, Tensor) and not value.is_leaf}
    return copy.deepcopy(module, computed)


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """A specification that holds the network itself. No other process can build it by a name, so it cannot be recorded.

    module: the network; `build` returns copies of it, so that it stays unchanged.
    """

    module: nn.Module = field(repr=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleSpec":
        """Return the specification of a copy of `module`, without gradients."""
        kept = copy_module(module).cpu()
        kept.zero_grad(set_to_none=True)
        return cls(name=f"{type(module).__qualname__} (in memory)", module=kept)

    def copied(self) -> nn.Module:
        """Return a copy of the network, on the meta device if that is PyTorch's default device."""
        module = copy_module(self.module)
        return with_logits(module.to("meta") if torch.get_default_device().type == "meta" else module)
