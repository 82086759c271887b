"""Named settings of attacks, by kind of network: `presets.toml`, which the tuning part of benchmarks/splits.py has chosen.

A preset is resolved to arguments before anything else is done, so that rows and attack.json hold the settings themselves.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from defenses._registry import suggest
from fedsim import models
from fedsim.recording.observation import DataSpec, ModelSpec

Family = Literal["sigmoid", "relu", "residual", "batch_norm", "dense"]
FAMILIES: tuple[Family, ...] = get_args(Family)
PRESETS = ("published", "tuned")
"""published: as in the attack's paper. tuned: what recovered most of the tuning images, by family."""

_SMOOTH = (nn.Sigmoid, nn.Tanh, nn.Softplus, nn.SiLU, nn.GELU, nn.ELU, nn.CELU, nn.LogSigmoid, nn.Mish)
_NORM = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
DEEP = 7
"""Convolutions up to which a network of ReLUs counts as a plain chain; deeper ones go by the settings of residual networks."""


def family_of(model: nn.Module) -> Family:
    """The family of a network, by its modules alone, so that one by somebody else has one, too.

    dense: no convolutions. batch_norm: any normalisation. sigmoid: activations with a derivative everywhere. residual: more than
    DEEP convolutions. relu: all others, also where activations are no modules.
    """
    modules = list(model.modules())
    convolutions = sum(isinstance(module, _CONVOLUTIONS) for module in modules)
    if not convolutions:
        return "dense"
    if any(isinstance(module, _NORM) for module in modules):
        return "batch_norm"
    if any(isinstance(module, _SMOOTH) for module in modules):
        return "sigmoid"
    return "residual" if convolutions > DEEP else "relu"


def arguments_of(attack: str, preset: str, model: ModelSpec, data: DataSpec) -> dict[str, Any]:
    """The arguments of a preset of an attack on a model: none where the attack's defaults are what the preset says.

    Total variation is left out for data that are no images. Raises ValueError for an unknown preset.
    """
    settings = settings_of(attack)
    if preset not in settings:
        raise ValueError(f"unknown preset {preset!r} of {attack}.{suggest(preset, settings)} Known: {', '.join(settings)}")
    found = settings[preset]
    if preset == "tuned":
        found = found.get(family_of(models.layout(model, data)), {})
    of_inputs = _read().get(attack, {}).get("tv_of") == "inputs"
    return {key: _tv(value, data, of_inputs) if key == "tv" else value for key, value in found.items()}


def _tv(weight: float, data: DataSpec, of_inputs: bool) -> float:
    """Return the weight of the total variation of pixels in [0, 1]; of_inputs: that of normalised inputs is given.

    Exact where all channels have the same standard deviation; otherwise channels are taken to vary alike.
    """
    if not data.is_image:
        return 0.0
    return weight * sum(1 / std for std in data.std) / len(data.std) if of_inputs else weight


def settings_of(attack: str) -> dict[str, Mapping[str, Any]]:
    """What each preset of an attack sets: `published` its arguments, `tuned` those of each family."""
    own = _read().get(attack, {})
    return {preset: own.get(preset, {}) for preset in PRESETS}


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text())
