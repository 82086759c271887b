"""A network that exists only as a PyTorch module in this process."""

import copy
from dataclasses import dataclass, field

import torch
from torch import nn

from fedsim.models.foreign import with_logits
from fedsim.recording.observation import ModelSpec


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(ModelSpec):
    """A network by the module itself. It has no name that another process could build it by, so it is never recorded.

    module: is copied wherever a model is built, so that nothing changes it.
    """

    module: nn.Module = field(repr=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module) -> "ModuleSpec":
        """Keep a copy of a module, without gradients."""
        kept = copy.deepcopy(module).cpu()
        kept.zero_grad(set_to_none=True)
        return cls(name=f"{type(module).__qualname__} (in memory)", module=kept)

    def copied(self) -> nn.Module:
        """Return a copy, on the meta device where that is the default."""
        module = copy.deepcopy(self.module)
        return with_logits(module.to("meta") if torch.get_default_device().type == "meta" else module)
