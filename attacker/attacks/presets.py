"""Presets: the settings `published` and `tuned` of attacks, read from `presets.toml`; `tuned` differs by family of networks.

`presets.toml` states which values were chosen by measurements, on the tuning images of benchmarks/support/splits.py.
A preset is replaced by its arguments before an attack is built, so that the rows of the scores and attack.json hold the
arguments themselves.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from torch import nn

from defenses.registry import suggest_name
from fedsim import models
from fedsim.recording.observation import DataSpec, ModelSpec

NetworkFamily = Literal["sigmoid", "relu", "residual", "batch_norm", "dense"]
PRESETS = ("published", "tuned")
"""published: the settings of the attack's paper. tuned: settings for each family, chosen by measurements where these exist."""

_SMOOTH = (nn.Sigmoid, nn.Tanh, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.CELU, nn.LogSigmoid, nn.Mish)
_NORM = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_PLAIN_CONVOLUTIONS = 7
"""Largest number of convolutions of the family `relu`; a deeper network with ReLUs belongs to the family `residual`."""


def find_family(model: nn.Module) -> NetworkFamily:
    """Return the family of a network, which selects its settings in the preset `tuned`.

    Only the types of its modules are inspected, so every PyTorch network has a family; activations that are called as functions
    are not seen. The first that applies of:
    dense: no Conv1d, Conv2d or Conv3d. batch_norm: any batch, group or layer normalisation. sigmoid: a module with a smooth
    activation (sigmoid, tanh, GELU, ...). residual: more than MAX_PLAIN_CONVOLUTIONS convolutions. relu: all others.
    """
    modules = list(model.modules())
    convolutions = sum(isinstance(module, _CONVOLUTIONS) for module in modules)
    if not convolutions:
        return "dense"
    if any(isinstance(module, _NORM) for module in modules):
        return "batch_norm"
    if any(isinstance(module, _SMOOTH) for module in modules):
        return "sigmoid"
    return "residual" if convolutions > MAX_PLAIN_CONVOLUTIONS else "relu"


def get_arguments(attack: str, preset: str, model: ModelSpec, data: DataSpec) -> dict[str, Any]:
    """Return the arguments, by name, that a preset sets for an attack on a model.

    preset: "published" or "tuned". The result is empty if the preset sets none for this attack, or for this model's family, so
    that the attack's defaults apply. If the preset sets `tv`, the weight of the total variation, `tv` is 0 for data that are not
    images, and for images it is converted to pixels in [0, 1] (`_compute_tv`). Raises ValueError for an unknown preset.
    """
    settings = get_settings(attack)
    if preset not in settings:
        raise ValueError(f"unknown preset {preset!r} of {attack}.{suggest_name(preset, settings)} Known: {', '.join(settings)}")
    arguments = settings[preset]
    if preset == "tuned":
        arguments = arguments.get(find_family(models.build_layout(model, data)), {})
    of_inputs = _read_presets().get(attack, {}).get("tv_of") == "inputs"
    return {key: _compute_tv(value, data, of_inputs) if key == "tv" else value for key, value in arguments.items()}


def _compute_tv(weight: float, data: DataSpec, of_inputs: bool) -> float:
    """Return a total-variation weight for pixels in [0, 1]; 0 for data that are not images.

    of_inputs: `weight` applies to normalised inputs, (pixel - mean) / std, and is converted. The conversion is exact if all
    channels have the same standard deviation; otherwise it assumes that all channels have the same total variation.
    Twelve digits are kept, without the rounding errors, since the weight is part of the attack's name.
    """
    if not data.is_image:
        return 0.0
    return float(f"{weight * sum(1 / std for std in data.std) / len(data.std):.12g}") if of_inputs else weight


def get_settings(attack: str) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each preset, {} for none: arguments, which `tuned` has by family of networks."""
    presets = _read_presets().get(attack, {})
    return {preset: presets.get(preset, {}) for preset in PRESETS}


@cache
def _read_presets() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
