"""Loaders of data sets that torchvision downloads: MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedsim.data.base import Array, Dataset, Examples
from fedsim.data.cache import fetch_once
from fedsim.recording.observation import DataSpec

PUBLISHED_MOMENTS = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.49147, 0.48226, 0.44677), (0.24703, 0.24349, 0.26159)),
    "cifar100": ((0.50716, 0.48669, 0.44120), (0.26733, 0.25644, 0.27615)),
}
"""Mean and standard deviation of each channel of the training images, as published in papers."""

ChannelValues = Sequence[float]
ZERO_MEAN, UNIT_STD = (0.0,), (1.0,)


def mnist(
    root: str | None = None, normalise: bool = False, mean: ChannelValues = ZERO_MEAN, std: ChannelValues = UNIT_STD
) -> Dataset:
    """Load MNIST: handwritten digits, 28x28 grey, 60,000 for training, 10,000 held out (LeCun et al. 1998); downloaded once.

    root:      folder to which the data are downloaded; by default the environment variable FEDLEAK_CACHE, or
               ~/.cache/fedleak/datasets.
    normalise: whether the model's input is normalised by the published mean and standard deviation of the training images.
    mean, std: your own normalisation, (value - mean) / std with values in [0, 1]: one number for all channels or one per channel.
               ValueError is raised if `normalise` is set too.
    """
    return _load("mnist", "MNIST", "MNIST", root, normalise, mean, std)


def fashion_mnist(
    root: str | None = None, normalise: bool = False, mean: ChannelValues = ZERO_MEAN, std: ChannelValues = UNIT_STD
) -> Dataset:
    """Load Fashion-MNIST: clothes, 28x28 grey, 60,000 for training, 10,000 held out (Xiao et al. 2017); downloaded once.

    root, normalise, mean, std: as in `mnist`.
    """
    return _load("fashion_mnist", "FashionMNIST", "FashionMNIST", root, normalise, mean, std)


def cifar10(
    root: str | None = None, normalise: bool = False, mean: ChannelValues = ZERO_MEAN, std: ChannelValues = UNIT_STD
) -> Dataset:
    """Load CIFAR-10: animals and vehicles, 32x32 colour, 50,000 for training, 10,000 held out (Krizhevsky 2009); downloaded once.

    root, normalise, mean, std: as in `mnist`.
    """
    return _load("cifar10", "CIFAR10", "cifar-10-batches-py", root, normalise, mean, std)


def cifar100(
    root: str | None = None, normalise: bool = False, mean: ChannelValues = ZERO_MEAN, std: ChannelValues = UNIT_STD
) -> Dataset:
    """Load CIFAR-100: a hundred classes, 32x32 colour, 50,000 for training, 10,000 held out (Krizhevsky 2009); downloaded once.

    root, normalise, mean, std: as in `mnist`.
    """
    return _load("cifar100", "CIFAR100", "cifar-100-python", root, normalise, mean, std)


def _load(name: str, kind: str, part: str, root: str | None, normalise: bool, mean: ChannelValues, std: ChannelValues) -> Dataset:
    if normalise and (tuple(mean), tuple(std)) != (ZERO_MEAN, UNIT_STD):
        raise ValueError(f"{name}: give either normalise or mean and std, got both ({mean}, {std})")
    if normalise:
        mean, std = PUBLISHED_MOMENTS[name]
    from torchvision import datasets as published

    source: Callable[..., Any] = getattr(published, kind)
    folder = fetch_once(name, root, part, lambda folder: source(folder, train=True, download=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CIFAR's files use type names of numpy from 2009
            sides = [source(str(folder), train=train, download=False) for train in (True, False)]
        train, test = (Examples(values=_to_channels_first(side.data), labels=np.asarray(side.targets)) for side in sides)
    except (OSError, RuntimeError, ValueError, TypeError, AssertionError, LookupError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name}: {folder / part} is damaged ({reason}); delete it to download it again") from None
    spec = DataSpec(shape=train.values.shape[1:], num_classes=len(sides[0].classes), mean=tuple(mean), std=tuple(std))
    return Dataset(name=name, spec=spec, class_names=tuple(sides[0].classes), train=train, test=test)


def _to_channels_first(images: Any) -> Array:
    """Convert images (N, H, W) or (N, H, W, C) to an array (N, C, H, W); C is 1 for images (N, H, W)."""
    pixels = np.asarray(images)
    return pixels[:, None] if pixels.ndim == 3 else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
