"""Models by name; public knowledge."""

from collections.abc import Callable

import torch
from torch import nn

from defenses.registry import Registry, bind
from fedsim.models.lenet import lenet_cpl, lenet_dlg
from fedsim.models.mlp import mlp
from fedsim.wire.observation import DataSpec, ModelSpec

__all__ = ["MODELS", "build", "head"]

MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "fedsim.models",
    {
        "lenet_cpl": lenet_cpl,
        "lenet_dlg": lenet_dlg,
        "mlp": mlp,
    },
)


def build(spec: ModelSpec, data: DataSpec, *, seed: int = 0) -> nn.Module:
    """The model with its own initial weights, drawn from `seed`; the global generator is left as it was."""
    factory = MODELS[spec.name]
    arguments = bind(spec.name, factory, data.shape, data.num_classes, given=spec.arguments, hidden=2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = factory(**arguments)
    if unsupported := [name for name, _ in model.named_buffers()]:
        raise ValueError(f"model {spec.name!r} carries buffers ({', '.join(unsupported)}), which are not supported yet")
    return model


def head(model: nn.Module) -> tuple[str, str | None]:
    """Names of the weight and the bias of the last linear layer; the bias is None where it has none."""
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError(f"{type(model).__name__} has no linear layer")
    name, module = linear[-1]
    prefix = f"{name}." if name else ""
    return f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None
