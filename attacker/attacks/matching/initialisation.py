"""Starts: functions that return the first examples (N, *shape) of a search, before normalisation (CPL, section 3.1)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from attacker.attacks.matching.smooth_images import build_smooth_spread
from fedsim.recording.array_archives import read_arrays
from fedsim.recording.observation import DataSpec

Init = Callable[[DataSpec, Tensor, Generator], Tensor]
"""Maps the specification of the data, labels (N,) and a random generator to the first batch of examples (N, *shape)."""

SMOOTH_CONTRAST = 0.3
"""Standard deviation of a smooth start, relative to the standard deviation of images."""


def normal(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
    """Return standard normal values (N, *shape), not limited to [0, 1], as in DLG. CPL names this start "random"."""
    return torch.randn(len(labels), *data.shape, generator=rng)


def normal_after_normalisation(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
    """Return examples that are standard normal once they are normalised as the network's input (Geiping et al. 2020)."""
    return data.denormalise(normal(data, labels, rng))


def uniform(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
    """Return uniform random values in [0, 1), (N, *shape)."""
    return torch.rand(len(labels), *data.shape, generator=rng)


def coarse(side: int) -> Init:
    """Return a start that fills each square of `side` x `side` pixels of each channel with one uniform random value in [0, 1).

    A start is a function that makes the first examples. For table rows, each value is drawn separately. With side 4 it is the
    start of the attack ROG (Yue et al. 2022).
    """

    def init(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
        if not data.is_image:
            return uniform(data, labels, rng)
        channels, height, width = data.shape
        small = torch.rand(len(labels), channels, -(-height // side), -(-width // side), generator=rng)
        return small.repeat_interleave(side, dim=2).repeat_interleave(side, dim=3)[..., :height, :width]

    return init


def smooth(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
    """Return examples near 0.5 with faint, smooth (for table rows: independent) differences, which separate equal labels."""
    return 0.5 + SMOOTH_CONTRAST * build_smooth_spread(data)(torch.randn(len(labels), *data.shape, generator=rng))


def patterned(divisions: int) -> Init:
    """Return a start that repeats a random block, uniform in [0, 1), `divisions` times vertically and horizontally.

    A start is a function that makes the first examples. Each channel of each example has its own block. In table rows the block
    is repeated `divisions` squared times.
    """

    def init(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
        if not data.is_image:
            width = data.shape[0]
            block = torch.rand(len(labels), -(-width // divisions**2), generator=rng)
            return block.repeat(1, divisions**2)[:, :width]
        channels, height, width = data.shape
        block = torch.rand(len(labels), channels, -(-height // divisions), -(-width // divisions), generator=rng)
        return block.repeat(1, 1, divisions, divisions)[..., :height, :width]

    return init


def solid(*colour: float) -> Init:
    """Return a start of examples of one colour: one value per channel, or one value for all channels or table columns.

    A start is a function that makes the first examples; this one raises ValueError if the values do not match the data's
    channels.
    """

    def init(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
        if len(colour) not in (1, data.shape[0]) or (len(colour) > 1 and not data.is_image):
            raise ValueError(f"a start of colour {colour} needs images with {len(colour)} channels, got shape {data.shape}")
        values = torch.tensor(colour).reshape(-1, *[1] * (len(data.shape) - 1))
        return values.expand(len(labels), *data.shape).clone()

    return init


def insider(path: str) -> Init:
    """Return a start of images that the attacker owns, each drawn at random from the class of an example's label (CPL-optimal).

    A start is a function that makes the first examples. This one is an oracle: information that no server has, and that the score
    file names in the row of each reconstruction.
    path: a NumPy archive with `images` (M, H, W[, C]), uint8, of the data's shape, and `labels` (M,). Raises ValueError if the
    archive does not exist. The start raises ValueError if the archive has no image of a needed class, or arrays of another shape
    or type.
    """
    if not Path(path).exists():
        raise ValueError(f"the file {path} of the argument auxiliary does not exist")

    def init(data: DataSpec, labels: Tensor, rng: Generator) -> Tensor:
        arrays = read_arrays(Path(path), ("images", "labels"))
        images, classes = arrays["images"], torch.from_numpy(arrays["labels"])
        if images.dtype != np.uint8 or images.ndim not in (3, 4) or classes.shape != images.shape[:1]:
            got = f"{images.dtype} of shape {images.shape} and labels of shape {tuple(classes.shape)}"
            raise ValueError(f"{path}: expected images (M, H, W[, C]) of uint8 and labels (M,), got {got}")
        chosen = []
        for label in labels.tolist():
            members = torch.nonzero(classes == label).flatten()
            if not len(members):
                raise ValueError(
                    f"{path}, the file of the argument auxiliary, holds no image of class {label}, which was inferred for an "
                    "example; add one, or choose another init"
                )
            chosen.append(int(members[torch.randint(len(members), (1,), generator=rng)]))
        x = torch.from_numpy(images[chosen]).float() / 255
        x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2)
        if tuple(x.shape[1:]) != data.shape:
            raise ValueError(f"{path} holds images of shape {tuple(x.shape[1:])}, and the data have {data.shape}")
        return x

    return init


STARTS: dict[str, Init] = {
    "random": normal,
    "uniform": uniform,
    "coarse4": coarse(4),
    "patterned": patterned(2),
    "patterned4": patterned(4),
    "dark": solid(0.0),
    "light": solid(1.0),
    "red": solid(1.0, 0.0, 0.0),
    "green": solid(0.0, 1.0, 0.0),
    "blue": solid(0.0, 0.0, 1.0),
    "smooth": smooth,
}


def get_start(name: str, auxiliary: str = "") -> Init:
    """Return the start with this name in `STARTS`, or `insider`: a function that makes the first examples.

    auxiliary: image archive, needed only for `insider`. Raises ValueError for an unknown name or a missing archive.
    """
    if name == "insider":
        if not auxiliary:
            raise ValueError("init 'insider' needs images that the attacker owns: set auxiliary=FILE.npz")
        return insider(auxiliary)
    if name not in STARTS:
        raise ValueError(f"unknown init {name!r}. Known: {', '.join([*STARTS, 'insider'])}")
    return STARTS[name]
