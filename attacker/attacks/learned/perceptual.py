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
"""Number of pixels per forward pass; their features take about a gigabyte (VGG-16)."""


@dataclass(frozen=True)
class Backbone:
    """A backbone network of LPIPS.

    title:       its name in messages.
    checkpoint:  name of torchvision's weight file in torch's hub cache. Names of older files with equal weights have another hash
                 after the last dash.
    smallest:    smallest height and width in pixels for which the last layer's output is not empty.
    first, last: first five values of the flattened weights of the first and of the last convolution, to recognise the right file.
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
        "VGG-16", "vgg16-397923af.pth", 16, (-0.5537, 0.1427, 0.5290, -0.5831, 0.3566), (0.0278, 0.0153, 0.0219, 0.0252, 0.0232)
    ),
}


def explain_missing(net: str, shape: tuple[int, ...]) -> str | None:
    """Return why LPIPS with the backbone `net` is undefined for images of `shape` (C, H, W), or None if it is defined.

    Images that are too small are not enlarged, since the result would be another metric.
    Raises ValueError for an unknown backbone.
    """
    _check_known(net)
    backbone, minimum = BACKBONES[net], BACKBONES[net].smallest
    if shape[0] not in (1, 3):
        return f"LPIPS needs images of 1 or 3 channels, got {shape[0]}"
    if min(shape[1:]) < minimum:
        other = BACKBONES["vgg"].smallest
        hint = f"; --lpips-net vgg takes {other}x{other}" if net != "vgg" and min(shape[1:]) >= other else ""
        return f"{backbone.title} needs images of at least {minimum}x{minimum} pixels, got {shape[1]}x{shape[2]}{hint}"
    return None


class Lpips:
    """The metric LPIPS (version 0.1) of pairs of images: 0 for equal images, about 1 for very different ones."""

    def __init__(self, net: str, model: nn.Module) -> None:
        self.net = net
        self._model = model

    @torch.no_grad()
    def __call__(self, x: Tensor, truth: Tensor) -> Tensor:
        """Return LPIPS of each pair, (N,). Grey images are converted to three equal channels.

        x, truth: (N, C, H, W) in [0, 1]. Raises ValueError for images that are too small, or have not 1 or 3 channels.
        """
        if reason := explain_missing(self.net, tuple(truth.shape[1:])):
            raise ValueError(reason)
        count = max(1, CHUNK_PIXELS // (truth.shape[2] * truth.shape[3]))
        chunks = [slice(start, start + count) for start in range(0, len(x), count)]
        return torch.cat([torch.zeros(0), *(self.compare(x[chunk], truth[chunk]) for chunk in chunks)])

    def compare(self, x: Tensor, truth: Tensor) -> Tensor:
        """Return LPIPS of each pair, (N,), as calling the metric does, but in one pass, and with gradients."""
        result: Tensor = self._model(_scale_input(x), _scale_input(truth)).flatten()
        return result


def _scale_input(x: Tensor) -> Tensor:
    """Return the network's input: three channels in [-1, 1], from images of one or three channels in [0, 1]."""
    return 2 * x.float().expand(-1, 3, -1, -1) - 1


@lru_cache(maxsize=2)
def load(net: str = "alex", weights: Path | None = None) -> Lpips:
    """Load LPIPS with the backbone `net`, alex or vgg. Weights are never downloaded, and the last two models are kept in memory.

    weights: file of the convolution layers under torchvision's names, features.N.weight and features.N.bias, as safetensors or
             .pth; half precision is converted to float32. By default torchvision's own file in torch's hub cache.
    Raises ValueError for an unknown backbone and, naming the file, if it does not hold the expected weights, and
    FileNotFoundError if there is no file.
    """
    _check_known(net)
    path = weights or _find_cached(net)
    model = _build_without_weights(net)
    features = _check_weights(path, net, _read(path), model)
    linear = _read(_find_linear_layers(net))
    # the model is on the meta device, so that a weight missing from the files has no values instead of random ones
    model.load_state_dict({**features, **linear}, strict=False, assign=True)
    return Lpips(net, model.requires_grad_(False).eval())


def load_lpips(spec: DataSpec, net: str = "alex", weights: Path | None = None) -> Lpips | str:
    """Return the LPIPS model that `load` returns, or as text the reason why there is none.

    Reasons are an unknown backbone, images of an unsuitable shape, and a missing or wrong weight file. spec: specification of the
    data; the shape is checked for images only. net: alex or vgg.
    """
    try:
        if spec.is_image and (reason := explain_missing(net, spec.shape)):
            return reason
        return load(net, weights)
    except (ValueError, FileNotFoundError) as error:
        return str(error)


def _check_known(net: str) -> None:
    if net not in BACKBONES:
        raise ValueError(f"unknown LPIPS net {net!r}. Known: {', '.join(BACKBONES)}")


def _find_cached(net: str) -> Path:
    """Return the path of torchvision's weight file of the backbone in torch's hub cache; if there are several, the last by name.

    Raises FileNotFoundError, with advice, if there is none.
    """
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    name = BACKBONES[net].checkpoint
    paths = sorted(folder.glob(f"{name.rpartition('-')[0]}-*.pth"))
    if not paths:
        raise FileNotFoundError(
            f"not computed: no weights of {BACKBONES[net].title}; give --lpips-weights FILE.safetensors, or put {name} into "
            f"{folder}"
        )
    return paths[-1]


def _build_without_weights(net: str) -> nn.Module:
    """Return the LPIPS module on the meta device, so that no weights are drawn or downloaded."""
    import lpips

    with warnings.catch_warnings(), torch.device("meta"):
        warnings.filterwarnings("ignore", message="(The parameter 'pretrained'|Arguments other than a weight enum)")
        model: nn.Module = lpips.LPIPS(net=net, pnet_rand=True, pretrained=False, verbose=False)
    return model


def _find_linear_layers(net: str) -> Path:
    """Return the file of LPIPS's own linear layers, which the package lpips brings."""
    import lpips

    return Path(lpips.__file__).parent / "weights" / "v0.1" / f"{net}.pth"


def _read(path: Path) -> dict[str, Tensor]:
    """Return a dict of the tensors in a file by name, without executing code from the file.

    Raises ValueError if it is not a file of weights, and FileNotFoundError if it does not exist.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"LPIPS weights {path} do not exist; give another file, or omit --lpips-weights to use torchvision's cached file"
        )
    try:
        if path.suffix in (".pth", ".pt"):
            with warnings.catch_warnings(action="ignore"):  # torch warns about the old file format; the content is checked below
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


def _check_weights(path: Path, net: str, tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from the names of the backbone's parameters in `model` to the weights in `tensors`, as float32.

    Raises ValueError if names or shapes differ from torchvision's, if a value is NaN or infinite, or if the first values of the
    first or last convolution are not those of torchvision's weights.
    """
    parameters = {name: p for name, p in model.named_parameters() if name.startswith("net.")}
    names = {f"features.{name.split('.', 2)[2]}": name for name in parameters}
    title = BACKBONES[net].title
    if wrong := sorted(set(names) ^ {name for name in tensors if name.startswith("features.")}):
        raise ValueError(
            f"{path} {'has the unknown' if wrong[0] in tensors else 'lacks the'} tensor {wrong[0]}; give a file of torchvision's "
            f"weights of {title}, or another --lpips-net than {net}"
        )
    for name, inner in names.items():
        expected, got = tuple(parameters[inner].shape), tuple(tensors[name].shape)
        if got != expected:
            raise ValueError(
                f"{path}: tensor {name} has shape {got} instead of {expected}; give a file of torchvision's weights of {title}, "
                f"or another --lpips-net than {net}"
            )
        if not bool(tensors[name].isfinite().all()):
            raise ValueError(f"{path}: tensor {name} holds NaN or infinity; give a file of torchvision's weights of {title}")
    kernels = sorted((name for name in names if name.endswith("weight")), key=lambda name: int(name.split(".")[1]))
    for name, begins in ((kernels[0], BACKBONES[net].first), (kernels[-1], BACKBONES[net].last)):
        if not torch.allclose(tensors[name].flatten()[: len(begins)].float(), torch.tensor(begins), rtol=0, atol=1e-3):
            raise ValueError(
                f"{path}: tensor {name} differs from torchvision's ImageNet weights of {title}, which --lpips-net {net} needs; "
                "give a file of those"
            )
    return {inner: tensors[name].float() for name, inner in names.items()}
