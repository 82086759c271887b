"""The pool of candidates: images with labels from which the attack chooses, read from a NumPy archive."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from fedsim.recording.array_archives import read_arrays, read_names
from fedsim.recording.observation import DataSpec

ARRAY_NAMES = (("images", "labels"), ("train_images", "train_labels"), ("x_train", "y_train"))
"""Names of the arrays of images and labels; the first pair that an archive has is read."""
MAX_CANDIDATES = 20_000
"""Largest pool. Time grows in proportion to its size: with 8,400 candidates, a round takes 25 CPU-seconds."""
MAX_JOINT = 2_000
"""Largest number of candidates of one regression. More are regressed in blocks, so that memory does not grow with the pool."""


@dataclass(frozen=True)
class Pool:
    """Candidates. x: images (P, *shape) in [0, 1]. y: their labels (P,), int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def of(self, rows: Tensor) -> "Pool":
        """Return the candidates with the indices `rows` (N,), in this order."""
        return Pool(self.x[rows], self.y[rows])

    def split(self, rng: Generator) -> list[Tensor]:
        """Return the indices of all candidates in as few blocks of nearly equal size as possible, at most MAX_JOINT in each.

        A single block has the candidates in their order. Several are drawn at random, since an archive may be sorted.
        """
        count = ceil(len(self) / MAX_JOINT)
        order = torch.arange(len(self)) if count <= 1 else torch.randperm(len(self), generator=rng)
        return list(order.tensor_split(max(1, count)))


def read_pool(path: Path, data: DataSpec, *, max_candidates: int = MAX_CANDIDATES) -> Pool:
    """Return the candidates in a NumPy archive (.npz) with `images` (P, H, W[, C]) and `labels` (P,).

    The images are uint8, or numbers in [0, 1]. The arrays may also be named `train_images` and `train_labels`, or `x_train` and
    `y_train`. data: shape and number of classes of the recorded federation's data. max_candidates: largest number of images.
    Raises ValueError, naming the file, if the archive is damaged, lacks these arrays, holds texts or objects in their
    place, images of another shape, labels that are no classes of the federation, numbers outside [0, 1], fewer than two or more
    than `max_candidates` images. Raises FileNotFoundError if the archive is missing.
    """
    present = read_names(path)
    names = next((pair for pair in ARRAY_NAMES if set(pair) <= set(present)), None)
    if names is None:
        raise ValueError(f"{path}: candidates need the arrays images and labels, and it holds {', '.join(present) or 'none'}")
    arrays = read_arrays(path, names, kinds="biuf")
    values, labels = arrays[names[0]], arrays[names[1]]
    values = values[..., None] if values.ndim == 3 else values
    shape = values.transpose(0, 3, 1, 2).shape if values.ndim == 4 else values.shape
    if shape[1:] != tuple(data.shape):
        raise ValueError(f"{path}: {names[0]} have the shape {tuple(shape[1:])}, and those of the federation {tuple(data.shape)}")
    if not 2 <= len(values) <= max_candidates:
        raise ValueError(f"{path}: {len(values)} candidates; give at least 2 and at most {max_candidates:,}")
    if (
        labels.shape != (len(values),)
        or labels.dtype.kind not in "iu"
        or not 0 <= labels.min() <= labels.max() < data.num_classes
    ):
        got = f"{labels.dtype} of shape {labels.shape}"
        if labels.size and labels.dtype.kind in "iuf":
            got += f" from {labels.min()} to {labels.max()}"
        raise ValueError(f"{path}: {names[1]} must be {len(values)} whole numbers from 0 to {data.num_classes - 1}, got {got}")
    scaled = values.astype(np.float32) / (255 if values.dtype == np.uint8 else 1)
    if not (scaled.min() >= 0 and scaled.max() <= 1):  # also refuses NaN
        raise ValueError(f"{path}: {names[0]} must be uint8, or numbers from 0 to 1, got {scaled.min():g} to {scaled.max():g}")
    return Pool(torch.from_numpy(scaled.transpose(0, 3, 1, 2).copy()), torch.from_numpy(labels.astype(np.int64)))
