"""Loader of data sets of images in one folder per class."""

from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

from fedsim.data.base import Array, Dataset, Examples
from fedsim.recording.array_archives import MAX_BYTES, open_regular
from fedsim.recording.observation import DataSpec

Classes = dict[str, list[Path]]
"""Dict from the name of a class's folder to its files. Folders and files are sorted by name."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
"""Image formats that are read. Pillow starts external programs for some other formats."""
MAX_SIZE = 4096
MAX_PIXELS = 10**8
MAX_ASPECT = 100


def imagefolder(
    path: str, size: int = 64, channels: int = 3, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Dataset:
    """Load your own pictures from a folder with one folder of images per class.

    path:      the folder. If it contains `train` and `test` (or `val`), these contain the folders of the classes, and `test` is
               held out; otherwise every fifth image of each class is held out.
    size:      height and width of an example: the picture is scaled so that its short side has this length (bicubic,
               antialiased), and its centre is cropped.
    channels:  3 for colour, 1 for grey.
    mean, std: the model's input is (value - mean) / std, with values in [0, 1]; one number for all channels or one per channel.

    Classes are numbered in the order of their folders' names. Images in folders within a class's folder belong to this class.
    Only PNG, JPEG, WebP, BMP and TIFF files are read, recognised by their suffix; files and folders of classes whose name begins
    with a dot are ignored.
    """
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"imagefolder: size must be 1 to {MAX_SIZE} pixels, got {size}")
    if channels not in (1, 3):
        raise ValueError(f"imagefolder: channels must be 1 or 3, got {channels}")
    train, test = _split_classes(Path(path))
    names = tuple(train)
    if unknown := sorted(set(test) - set(train)):
        raise ValueError(f"imagefolder: {path}: class {unknown[0]!r} has held-out images but no training images")
    spec = DataSpec(shape=(channels, size, size), num_classes=len(names), mean=tuple(mean), std=tuple(std))
    sides = [_read(side, names, spec.shape) for side in (train, test)]
    return Dataset(name=f"imagefolder:{path}", spec=spec, class_names=names, train=sides[0], test=sides[1])


def _split_classes(folder: Path) -> tuple[Classes, Classes]:
    """Return the training files and the held-out files, each as a dict from the name of a class to its files.

    Raises ValueError if there are training files of fewer than two classes, or no held-out files, and OSError if `folder` is not
    a folder.
    """
    if not folder.is_dir():
        if folder.exists():
            raise NotADirectoryError(f"imagefolder: {folder} is not a folder; give a folder with one folder of images per class")
        raise FileNotFoundError(f"imagefolder: the folder {folder} does not exist")
    held_out = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if held_out is not None and (folder / "train").is_dir():
        train, test = _find_classes(folder / "train"), _find_classes(held_out)
    else:
        found = _find_classes(folder)
        train = {name: [f for i, f in enumerate(files) if i % 5 != 4] for name, files in found.items()}
        test = {name: files[4::5] for name, files in found.items()}
        if found and not any(test.values()):
            raise ValueError(
                f"imagefolder: {folder}: every fifth image of a class is held out, but no class has five images; add images, or "
                "make folders `train` and `test` in it, each with one folder of images per class"
            )
    if len(train) < 2:
        raise ValueError(f"imagefolder: {folder}: there must be folders of images for at least two classes, got {len(train)}")
    if not any(test.values()):
        raise ValueError(f"imagefolder: {held_out} holds no folders of images; put one folder of images per class there")
    return train, test


def _find_classes(folder: Path) -> Classes:
    from PIL import Image

    endings = {ending for ending, kind in Image.registered_extensions().items() if kind in IMAGE_FORMATS}
    found: Classes = {}
    for inner in sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        files = (file for file in inner.rglob("*") if file.suffix.lower() in endings and not file.name.startswith("."))
        if images := sorted(file for file in files if file.is_file()):
            found[inner.name] = images
    return found


def _read(classes: Classes, names: tuple[str, ...], shape: tuple[int, ...]) -> Examples:
    files = [(file, names.index(name)) for name in names for file in classes.get(name, ())]
    if len(files) * prod(shape) > MAX_BYTES:
        raise ValueError(
            f"imagefolder: {len(files)} images of shape {shape} take more than the limit of {MAX_BYTES / 2**30:g} GiB of memory "
            "together; lower size"
        )
    values = np.empty((len(files), *shape), dtype=np.uint8)
    for i, (file, _) in enumerate(files):
        values[i] = _read_image(file, channels=shape[0], size=shape[1])
    return Examples(values=values, labels=np.array([label for _, label in files], dtype=np.int64))


class _UnsuitableSides(ValueError):
    """Error for a picture with too many pixels or with sides of too different lengths."""


def _check_sides(file: Path, width: int, height: int) -> None:
    """Raise an error if a picture has over `MAX_PIXELS` pixels, or one side over `MAX_ASPECT` times as long as the other."""
    if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
        raise _UnsuitableSides(
            f"imagefolder: {file} has {width} x {height} pixels, but a picture may have at most {MAX_PIXELS} pixels, and its "
            f"long side may be at most {MAX_ASPECT} times its short side; shrink, crop or remove it"
        )


def _read_image(file: Path, *, channels: int, size: int) -> Array:
    """Return a picture, its short side scaled to `size` and its centre cropped, as (channels, size, size), uint8.

    Raises ValueError, naming the file, if it is not a picture that can be read.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with open_regular(file) as content, Image.open(content, formats=IMAGE_FORMATS) as opened:
            _check_sides(file, *opened.size)
            picture = ImageOps.exif_transpose(opened).convert("RGB" if channels == 3 else "L")
    except _UnsuitableSides:
        raise
    except UnidentifiedImageError:
        known = ", ".join(IMAGE_FORMATS)
        raise ValueError(f"imagefolder: {file} cannot be read (its format is none of {known}); convert or remove it") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError(f"imagefolder: {file} cannot be read ({error}); repair or remove it") from None
    short = min(picture.size)
    width, height = (size * side // short for side in picture.size)
    left, upper = round((width - size) / 2), round((height - size) / 2)
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(resized.crop((left, upper, left + size, upper + size)))
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]
