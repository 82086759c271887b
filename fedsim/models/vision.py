"""Image classifiers of torchvision, chosen by name."""

from difflib import get_close_matches
from typing import Any

from torch import nn

from fedsim.models.shapes import check_image


def torchvision(shape: tuple[int, ...], num_classes: int, architecture: str) -> nn.Module:
    """Return an untrained image classifier of torchvision; nothing is downloaded.

    architecture: torchvision's name of the network, such as "resnet50". Auxiliary classifiers are left out.
    Raises ValueError if the name is unknown, the data are not images of three channels, or a vision transformer (`vit_...`) gets
    images that are not square.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if architecture not in known:
        close = get_close_matches(str(architecture), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}"
        raise ValueError(f"torchvision has no classifier {architecture!r}. {hint}")
    channels, height, width = check_image(shape, f"torchvision's {architecture}")
    if channels != 3:
        raise ValueError(f"torchvision's {architecture} takes images of 3 channels, and these have {channels}; use another model")
    model: nn.Module = models.get_model(
        architecture, weights=None, num_classes=num_classes, **_choose_arguments(architecture, height, width)
    )
    return model


def _choose_arguments(architecture: str, height: int, width: int) -> dict[str, Any]:
    if architecture in ("googlenet", "inception_v3"):
        return {"aux_logits": False, "init_weights": True}
    if architecture.startswith("vit_"):
        if height != width:
            raise ValueError(
                f"torchvision's {architecture} takes square images, and these have {height}x{width} pixels; use another model"
            )
        return {"image_size": height}
    return {"input_size": (height, width)} if architecture.startswith("maxvit") else {}
