"""The linear layer of a network whose input is the flattened example itself, normalised by clients or by the network's code."""

from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attacker.attacks.networks.forward import record_calls, run_forward_pass
from fedsim import models
from fedsim.models.built_in import BUILT_IN
from fedsim.recording.observation import DataSpec, ModelSpec

MAX_WEIGHTS = 2**26
"""Largest number of parameters of a network that is built to find its input layer."""
MAX_AFFINE_ERROR = 1e-4
"""Largest error, relative to the largest scale, at which a layer's input counts as a scaled and shifted example, and at which the
scales and shifts of a channel count as equal."""


@dataclass(frozen=True)
class InputLayer:
    """A linear layer with bias whose input is the flattened normalised example, scaled and shifted by the network's code or not.

    weight, bias: names of its parameters.
    scaled:       if the code scales and shifts its input, as in x / 255, the specification of the data whose normalisation also
                  does this; else None.
    """

    weight: str
    bias: str
    scaled: DataSpec | None = None

    def specify_input(self, data: DataSpec) -> DataSpec:
        """Return the specification of the data whose normalised examples are the layer's input, given that of the network."""
        return self.scaled or data


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
    inputs: list[Tensor] = []
    model.get_submodule(layer).register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
    x = data.normalise(torch.rand(2, *data.shape, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for _ in range(2):
            try:
                model(x)
            except (RuntimeError, ValueError, TypeError):  # a layer after this one may fail on random examples
                continue
    return len(inputs) == 2 and not torch.equal(*inputs)


def find_input_layer(spec: ModelSpec, data: DataSpec) -> InputLayer | None:
    """Return the first linear layer with bias whose input is the flattened normalised example; None if the model has none.

    The model's code may scale and shift the values of the example first, by constants that are equal within a channel. The rest
    of the model may have any form, but it may not call the layer twice. The layer is found by a forward pass of four examples; an
    error of the model in this pass is raised. None also if the model has more than MAX_WEIGHTS parameters, for which no forward
    pass is made.
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
        if isinstance(module, nn.Linear) and module.in_features == data.size
        # a weight may also be a buffer that is not trained, or be computed from other parameters
        if isinstance(module.weight, nn.Parameter) and isinstance(module.bias, nn.Parameter)
    ]
    if not candidates or sum(p.numel() for p in layout.parameters()) > MAX_WEIGHTS:
        return None
    model = models.build(spec, data).eval()
    examples = _draw_probes(data)
    x = data.normalise(examples)
    with torch.no_grad(), record_calls({name: model.get_submodule(name) for name in candidates}) as seen:
        run_forward_pass(model, {**dict(model.named_parameters()), **dict(model.named_buffers())}, x)
    for name in candidates:
        inputs = [layer_inputs for layer_inputs, _ in seen.get(name, [])]
        if len(inputs) != 1 or inputs[0].numel() != x.numel():
            continue
        if torch.equal(inputs[0].reshape(len(x), -1), x.reshape(len(x), -1)):
            return InputLayer(f"{name}.weight", f"{name}.bias")
        scaled = _fold_scaling(inputs[0].reshape(examples.shape), examples, data)
        if scaled is not None and not _follows_from_state(spec, data, name, inputs[0]):
            return InputLayer(f"{name}.weight", f"{name}.bias", scaled)
    return None


def _draw_probes(data: DataSpec) -> Tensor:
    """Return four examples (4, *shape) in [0, 1]: all zeros, all ones, and two random ones."""
    drawn = torch.rand(2, *data.shape, generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.zeros(1, *data.shape), torch.ones(1, *data.shape), drawn])


def _fold_scaling(inputs: Tensor, x: Tensor, data: DataSpec) -> DataSpec | None:
    """Return the specification of the data whose normalisation maps the probes x to the layer's inputs, both (4, *shape).

    None if the inputs are not the examples with one positive scale and one shift per channel or, for table rows, in all.
    """
    shift, scale = inputs[0], inputs[1] - inputs[0]
    allowed = MAX_AFFINE_ERROR * float(scale.abs().max())
    if not bool(((x * scale + shift - inputs).abs() <= allowed).all()):  # also if a value is NaN
        return None
    rows = (data.shape[0], -1) if data.is_image else (1, -1)
    scales, shifts = scale.double().reshape(rows), shift.double().reshape(rows)
    s, t = scales.mean(dim=1), shifts.mean(dim=1)
    uneven = max(float((values - mean[:, None]).abs().max()) for values, mean in ((scales, s), (shifts, t)))
    if uneven > allowed or float(s.min()) <= allowed:
        return None
    return replace(data, mean=tuple((-t / s).tolist()), std=tuple((1 / s).tolist()))


def _follows_from_state(spec: ModelSpec, data: DataSpec, layer: str, inputs: Tensor) -> bool:
    """Return whether a layer's inputs for the probes change with the model's weights or in training mode.

    This is so behind a normalisation layer, whose scaling depends on weights and statistics that the federation changes.
    """
    model = models.build(spec, data).train()
    seen: list[Tensor] = []
    model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for parameter in model.parameters():
            parameter.add_(torch.rand(parameter.shape, generator=rng) + 0.1)
        with suppress(RuntimeError, ValueError, TypeError):  # a layer after this one may fail on such weights
            model(data.normalise(_draw_probes(data)))
    return len(seen) != 1 or not torch.equal(seen[0], inputs)
