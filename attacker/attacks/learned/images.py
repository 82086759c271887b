"""Reading of public images for training: folders of image files, and NumPy archives."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.recording.array_archives import read_arrays, read_names

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
"""Suffixes of image files, in lower case."""
ARCHIVE_NAMES = ("images", "train_images")
"""Names under which an archive may hold its images; the first that it has is read."""
LABEL_NAMES = {"images": "labels", "train_images": "train_labels"}
"""For each name in ARCHIVE_NAMES, the name under which the archive may hold the labels of these images."""
FOLDER_FACTOR = 2
"""Side to which the images of a folder are shrunk, relative to the size in training, so that crops can be drawn."""


def read_images(path: Path, size: int) -> Tensor:
    """Return the images (N, 3, H, W), uint8, of a folder or a NumPy archive.

    path: a folder that is searched for image files at any depth, or an archive with an array `images`, or else `train_images`, of
    shape (N, H, W, 3), uint8. An archive's images keep their size. The images of a folder, in the order of their paths, are
    cropped to their central squares, which are then resized to one common side: the side of the smallest square, but at most
    twice `size`.
    Raises ValueError, naming the path, if there are no images, one cannot be read, or the side of one is below `size`;
    FileNotFoundError if there is no such path.
    """
    images = _read_folder(path, size) if path.is_dir() else _read_archive(path)
    if min(images.shape[-2:]) < size:
        raise ValueError(
            f"{path}: images of {images.shape[-2]}x{images.shape[-1]} pixels are smaller than --size {size}; lower --size"
        )
    return images


def read_labels(path: Path, count: int) -> Tensor | None:
    """Return the labels (N,), int64, of the images that `read_images` reads; None for a folder, or an archive without labels.

    count: number N of images. Raises ValueError, naming the path, unless the labels are N whole numbers of at least 0.
    """
    if path.is_dir() or LABEL_NAMES[_find_name(path)] not in read_names(path):
        return None
    name = LABEL_NAMES[_find_name(path)]
    values = read_arrays(path, (name,))[name]
    if not np.issubdtype(values.dtype, np.integer) or values.shape != (count,) or values.min() < 0:
        got = f"{values.dtype} of shape {values.shape}"
        raise ValueError(f"{path}: {name} must be {count} whole numbers of at least 0, one for each image, got {got}")
    return torch.from_numpy(values.astype(np.int64))


def _find_name(path: Path) -> str:
    return next((name for name in ARCHIVE_NAMES if name in read_names(path)), ARCHIVE_NAMES[0])


def _read_archive(path: Path) -> Tensor:
    name = _find_name(path)
    values = read_arrays(path, (name,))[name]
    if values.dtype != np.uint8 or values.ndim != 4 or values.shape[3] != 3 or not len(values):
        got = f"{values.dtype} of shape {values.shape}"
        raise ValueError(f"{path}: {name} must be uint8 of shape (N, H, W, 3), N at least 1, got {got}")
    return torch.from_numpy(values).permute(0, 3, 1, 2).contiguous()


def _read_folder(path: Path, size: int) -> Tensor:
    from PIL import Image, ImageOps, UnidentifiedImageError

    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
    if not files:
        raise ValueError(f"{path} holds no images ({', '.join(ENDINGS)})")
    squares = []
    for file in files:
        try:
            with Image.open(file) as opened:
                side = min(*opened.size, FOLDER_FACTOR * size)
                square = ImageOps.fit(opened.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise ValueError(f"{file} cannot be read as an image: {error}; convert or remove it") from None
        if side < size:
            raise ValueError(f"{file}: its shorter side, {side} pixels, is smaller than --size {size}; remove it or lower --size")
        squares.append(square)
    minimum = min(square.size[0] for square in squares)
    values = [np.asarray(square.resize((minimum, minimum), Image.Resampling.BICUBIC)) for square in squares]
    return torch.from_numpy(np.stack(values)).permute(0, 3, 1, 2).contiguous()
