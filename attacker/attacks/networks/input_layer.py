"""The linear layer of a network whose input is the flattened normalised example itself."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attacker.attacks.networks.forward import run_forward_pass
from fedsim import models
from fedsim.models.building import BUILT_IN
from fedsim.recording.observation import DataSpec, ModelSpec

MAX_WEIGHTS = 2**26
"""Largest number of parameters of a network that is built to find its input layer."""


@dataclass(frozen=True)
class InputLayer:
    """A linear layer with bias whose input is the flattened normalised example. weight, bias: names of its parameters."""

    weight: str
    bias: str


def is_input_random(spec: ModelSpec, data: DataSpec, layer: str) -> bool:
    """Return whether a layer's input differs between two passes of the same examples in training mode, as behind dropout.

    layer: name of the module. False also for a network that fails in training mode before it reaches this layer, or that calls
    the layer several times per pass.
    """
    key = repr((spec, data, layer))
    if key not in _RANDOM or spec.name not in BUILT_IN:
        _RANDOM[key] = _compare_inputs(spec, data, layer)
    return _RANDOM[key]


_RANDOM: dict[str, bool] = {}
"""Cache of `is_input_random`, by the text of its arguments."""


def _compare_inputs(spec: ModelSpec, data: DataSpec, layer: str) -> bool:
    model = models.build(spec, data).train()
    seen: list[Tensor] = []
    model.get_submodule(layer).register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
    x = data.normalise(torch.rand(2, *data.shape, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for _ in range(2):
            try:
                model(x)
            except (RuntimeError, ValueError, TypeError):  # a layer after this one may fail on random examples
                continue
    return len(seen) == 2 and not torch.equal(*seen)


def find_input_layer(spec: ModelSpec, data: DataSpec) -> InputLayer | None:
    """Return the first linear layer with bias whose input is the flattened normalised example; None if the model has none.

    The rest of the model may have any form, but it may not call the layer twice. The layer is found by a forward pass of two
    random examples; an error of the model in this pass is raised. None also if the model has more than MAX_WEIGHTS parameters,
    for which no forward pass is made.
    """
    key = repr((spec, data))
    if key not in _FOUND or spec.name not in BUILT_IN:
        _FOUND[key] = _search_input_layer(spec, data)
    return _FOUND[key]


_FOUND: dict[str, InputLayer | None] = {}
"""Cache of `find_input_layer`, by the text of its arguments, since it is called for every update of a recording."""


def _search_input_layer(spec: ModelSpec, data: DataSpec) -> InputLayer | None:
    layout = models.build_layout(spec, data)
    candidates = [
        name
        for name, module in layout.named_modules()
        if isinstance(module, nn.Linear) and module.bias is not None and module.in_features == data.size
    ]
    if not candidates or sum(p.numel() for p in layout.parameters()) > MAX_WEIGHTS:
        return None
    model = models.build(spec, data).eval()
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, given, name=name: seen.setdefault(name, []).append(given[0]))
        for name, module in model.named_modules()
        if name in candidates
    ]
    x = data.normalise(torch.rand(2, *data.shape, generator=torch.Generator().manual_seed(0)))
    try:
        with torch.no_grad():
            run_forward_pass(model, {**dict(model.named_parameters()), **dict(model.named_buffers())}, x)
    finally:
        for handle in handles:
            handle.remove()
    for name in candidates:
        inputs = seen.get(name, [])
        if len(inputs) == 1 and inputs[0].numel() == x.numel() and torch.equal(inputs[0].reshape(2, -1), x.reshape(2, -1)):
            return InputLayer(f"{name}.weight", f"{name}.bias")
    return None
