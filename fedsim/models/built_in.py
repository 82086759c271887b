"""Registry of the models of this project, and the two that add layers to another model: imprint and wide_head."""

import inspect
from collections.abc import Callable, Mapping
from math import isfinite, prod

from torch import nn

from defenses.registry import Registry
from fedsim.models.imprint import STATISTICS, Imprint
from fedsim.models.lenet import lenet_cpl, lenet_dlg
from fedsim.models.mlp import mlp
from fedsim.models.resnet import resnet18, resnet20_4
from fedsim.models.rgap import cnn6, cnn6_d, fcn3
from fedsim.models.rog import lenet_rog, resnet9_rog, resnet18_rog, vgg7
from fedsim.models.vision import torchvision
from fedsim.models.wide_head import WideHead

ModelFactory = Callable[..., nn.Module]


def imprint(
    shape: tuple[int, ...],
    num_classes: int,
    base: str = "lenet_cpl",
    bins: int = 1024,
    statistic: str = "average",
    centre: float = 0.0,
    spread: float = 1.0,
) -> nn.Sequential:
    """Return a built-in model behind the imprint module of a malicious server (Fowl et al. 2022, "Robbing the Fed").

    base:           name of the built-in model; not imprint, torchvision or wide_head.
    bins:           number of neurons of the imprint module, from 2 to 65536.
    statistic:      what the neurons measure: average (of all normalised values) or cosine (a wave over the flattened image).
    centre, spread: location and scale of this statistic on public data of the same kind.
    Raises ValueError for other values.
    """
    network = _find_base("imprint", base)
    if isinstance(bins, bool) or not isinstance(bins, int) or not 2 <= bins <= MAX_BINS:
        raise ValueError(f"model imprint: bins must be a whole number from 2 to {MAX_BINS:,}, got {bins!r}")
    if statistic not in STATISTICS:
        raise ValueError(f"model imprint: statistic must be one of {', '.join(STATISTICS)}, got {statistic!r}")
    if isinstance(centre, bool) or not isinstance(centre, int | float) or not isfinite(centre):
        raise ValueError(f"model imprint: centre must be a finite number, got {centre!r}")
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 < spread < float("inf"):
        raise ValueError(f"model imprint: spread must be a finite number above 0, got {spread!r}")
    module = Imprint(prod(shape), bins=bins, statistic=statistic, centre=centre, spread=spread)
    return nn.Sequential(module, network(shape, num_classes))


def wide_head(
    shape: tuple[int, ...],
    num_classes: int,
    base: str = "lenet_cpl",
    features: int = 128,
    neurons: int = 4096,
    activation: str = "",
) -> nn.Sequential:
    """Return a built-in model that ends with a wide layer of random Gaussian weights, as a server adds it (Liu et al. 2024).

    base:       name of the built-in model, which returns features instead of logits; not imprint, torchvision or wide_head.
    features:   number of features, from 1 to 65536.
    neurons:    number of neurons of the wide layer, from 1 to 1048576. The attack `feature_reconstruction` needs at least 4 per
                feature, which is not checked here.
    activation: argument of the base, if it has one; "" for its default.
    Raises ValueError for other values.
    """
    network = _find_base("wide_head", base)
    for name, count, limit in (("features", features, MAX_BINS), ("neurons", neurons, MAX_NEURONS)):
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= limit:
            raise ValueError(f"model wide_head: {name} must be a whole number from 1 to {limit:,}, got {count!r}")
    if activation and "activation" not in inspect.signature(network).parameters:
        raise ValueError(f"model wide_head: the base {base} has no argument activation; leave it out")
    own = {"activation": activation} if activation else {}
    return nn.Sequential(network(shape, features, **own), WideHead(features, num_classes, neurons=neurons))


MAX_BINS = 2**16
"""Largest number of neurons of an imprint module, and of features before a wide layer."""
MAX_NEURONS = 2**20
"""Largest number of neurons of a wide layer."""


def _find_base(name: str, base: str) -> ModelFactory:
    """Return the factory of the built-in model `base`, to which `name` adds layers. Raises ValueError for other models."""
    known = [other for other in BUILT_IN if other not in ("imprint", "torchvision", "wide_head")]
    if base not in known:
        raise ValueError(f"model {name}: base must be one of {', '.join(known)}, got {base!r}")
    return BUILT_IN[base]


BUILT_IN: Mapping[str, ModelFactory] = {
    "cnn6": cnn6,
    "cnn6_d": cnn6_d,
    "fcn3": fcn3,
    "imprint": imprint,
    "lenet_cpl": lenet_cpl,
    "lenet_dlg": lenet_dlg,
    "lenet_rog": lenet_rog,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet18_rog": resnet18_rog,
    "resnet20_4": resnet20_4,
    "resnet9_rog": resnet9_rog,
    "torchvision": torchvision,
    "vgg7": vgg7,
    "wide_head": wide_head,
}

MODELS: Registry[ModelFactory] = Registry("fedsim.models", BUILT_IN)
