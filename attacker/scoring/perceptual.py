"""LPIPS: perceptual distance (Zhang et al. 2018) on the features of an ImageNet network, if its weights are available."""

import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedsim.recording import DataSpec

CHUNK_PIXELS = 64 * 128 * 128
"""Number of pixels that pass through the network at once; their features take about a gigabyte (VGG-16)."""


@dataclass(frozen=True)
class Backbone:
    """A network that LPIPS was calibrated on.

    checkpoint:  torchvision's file of weights in torch's hub cache; earlier, equal ones differ in what follows the last dash.
    smallest:    least height and width in pixels that leave the last layer a pixel.
    first, last: where the kernels of the first and of the last layer begin, which tells the true weights from all others.
    """

    title: str
    checkpoint: str
    smallest: int
    first: tuple[float, ...]
    last: tuple[float, ...]


BACKBONES = {
    "alex": Backbone(
        "AlexNet",
        "alexnet-owt-7be5be79.pth",
        31,
        (0.11864, 0.09407, 0.09544, 0.10515, 0.10291),
        (0.00450, -0.00773, -0.01500, -0.03029, -0.04411),
    ),
    "vgg": Backbone(
        "VGG-16",
        "vgg16-397923af.pth",
        16,
        (-0.5537, 0.1427, 0.5290, -0.5831, 0.3566),
        (0.0278, 0.0153, 0.0219, 0.0252, 0.0232),
    ),
}


def unable(net: str, shape: tuple[int, ...]) -> str | None:
    """Return why images of `shape` (C, H, W) have no LPIPS on `net`, or None. Enlarging them would give another metric."""
    backbone, least = BACKBONES[net], BACKBONES[net].smallest
    if shape[0] not in (1, 3):
        return f"LPIPS needs images of 1 or 3 channels, got {shape[0]}"
    if min(shape[1:]) < least:
        other = BACKBONES["vgg"].smallest
        hint = f"; --lpips-net vgg takes {other}x{other}" if net != "vgg" and min(shape[1:]) >= other else ""
        return f"{backbone.title} needs images of {least}x{least} pixels at least, got {shape[1]}x{shape[2]}{hint}"
    return None


class Lpips:
    """LPIPS 0.1 of pairs of images: 0 for equal images, about 1 for very different ones."""

    def __init__(self, net: str, model: nn.Module) -> None:
        self.net = net
        self._model = model

    @torch.no_grad()
    def __call__(self, x: Tensor, truth: Tensor) -> Tensor:
        """x, truth: (N, C, H, W) in [0, 1]; a grey image counts as three equal channels. Returns (N,).

        Raises ValueError for images that are too small, or of other than 1 or 3 channels.
        """
        if reason := unable(self.net, tuple(truth.shape[1:])):
            raise ValueError(reason)
        count = max(1, CHUNK_PIXELS // (truth.shape[2] * truth.shape[3]))
        chunks = [slice(start, start + count) for start in range(0, len(x), count)]
        return torch.cat([torch.zeros(0), *(self._model(_fed(x[chunk]), _fed(truth[chunk])).flatten() for chunk in chunks)])


def _fed(x: Tensor) -> Tensor:
    """Return the network's input: three channels in [-1, 1]."""
    return 2 * x.float().expand(-1, 3, -1, -1) - 1


@lru_cache(maxsize=2)
def load(net: str = "alex", weights: Path | None = None) -> Lpips:
    """LPIPS on `net`, alex or vgg; loaded once a process, never downloaded.

    weights: the convolution layers as torchvision names them, features.N.weight and features.N.bias, in safetensors (or, as
             torch saves them, .pth); half precision is converted. By default torchvision's own file in torch's hub cache.
    Raises ValueError, naming the file, where it holds anything else than the true weights, and FileNotFoundError where there
    is none.
    """
    if net not in BACKBONES:
        raise ValueError(f"unknown LPIPS net {net!r}. Known: {', '.join(BACKBONES)}")
    path = weights or _cached(net)
    model = _without_weights(net)
    features = _checked(path, net, _read(path), model)
    linear = _read(_linear_layers(net))
    # on the meta device nothing random exists: what the files do not give has no values at all, and could not be computed with
    model.load_state_dict({**features, **linear}, strict=False, assign=True)
    return Lpips(net, model.requires_grad_(False).eval())


def lpips_or_reason(spec: DataSpec, net: str = "alex", weights: Path | None = None) -> Lpips | str:
    """Return LPIPS for such data, see `load`, or why there is none."""
    if spec.is_image and (reason := unable(net, spec.shape)):
        return reason
    try:
        return load(net, weights)
    except (ValueError, FileNotFoundError) as error:
        return str(error)


def _cached(net: str) -> Path:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    name = BACKBONES[net].checkpoint
    found = sorted(folder.glob(f"{name.rpartition('-')[0]}-*.pth"))
    if not found:
        raise FileNotFoundError(
            f"not computed: no {BACKBONES[net].title} weights; give --lpips-weights FILE.safetensors, or put {name} into {folder}"
        )
    return found[-1]


def _without_weights(net: str) -> nn.Module:
    import lpips

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.filterwarnings("ignore", message="(The parameter 'pretrained'|Arguments other than a weight enum)")
        model: nn.Module = lpips.LPIPS(net=net, pnet_rand=True, pretrained=False, verbose=False)
    return model


def _linear_layers(net: str) -> Path:
    import lpips

    return Path(lpips.__file__).parent / "weights" / "v0.1" / f"{net}.pth"


def _read(path: Path) -> dict[str, Tensor]:
    """Tensors by name; never executes anything from the file."""
    if not path.is_file():
        raise FileNotFoundError(f"LPIPS weights {path} do not exist")
    try:
        if path.suffix in (".pth", ".pt"):
            with warnings.catch_warnings(action="ignore"):  # of how it is written: what it holds is checked
                loaded = dict(torch.load(path, map_location="cpu", weights_only=True))
            return {name: value for name, value in loaded.items() if isinstance(value, Tensor)}
        return load_file(path)
    except (
        SafetensorError,
        UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
    ) as error:
        reason = str(error).split("\n", 1)[0]
        raise ValueError(f"{path}: not a file of weights (safetensors, or .pth as torch saves them): {reason}") from None


def _checked(path: Path, net: str, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The backbone's weights by the model's own names, each of the right shape, and the true ones."""
    parameters = {name: p for name, p in model.named_parameters() if name.startswith("net.")}
    own = {f"features.{name.split('.', 2)[2]}": name for name in parameters}
    not_these = f"{path}: not the features of {BACKBONES[net].title}, --lpips-net {net}"
    if wrong := sorted(set(own) ^ {name for name in tensors if name.startswith("features.")}):
        raise ValueError(f"{not_these}: {wrong[0]} is {'not one of them' if wrong[0] in tensors else 'missing'}")
    for name, inner in own.items():
        expected, got = tuple(parameters[inner].shape), tuple(tensors[name].shape)
        if got != expected:
            raise ValueError(f"{not_these}: {name} has shape {got}, expected {expected}")
        if not bool(tensors[name].isfinite().all()):
            raise ValueError(f"{not_these}: {name} holds what is no number")
    kernels = sorted((name for name in own if name.endswith("weight")), key=lambda name: int(name.split(".")[1]))
    for name, begins in ((kernels[0], BACKBONES[net].first), (kernels[-1], BACKBONES[net].last)):
        if not torch.allclose(tensors[name].flatten()[: len(begins)].float(), torch.tensor(begins), rtol=0, atol=1e-3):
            raise ValueError(f"{not_these}: {name} is not torchvision's, trained on ImageNet, which LPIPS is calibrated on")
    return {inner: tensors[name].float() for name, inner in own.items()}
