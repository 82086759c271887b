"""Loaders of data sets that scikit-image and scikit-learn ship, so that nothing is downloaded.

Files are read without importing these packages where possible, since every client process would spend seconds on the import.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from fedsim.data.base import Array, Dataset, Examples, hold_out_every_fifth
from fedsim.data.encoding import scale
from fedsim.recording.observation import Column, DataSpec

PHOTOGRAPHS = {
    "astronaut": ("skimage/data", "astronaut.png"),
    "cat": ("skimage/data", "chelsea.png"),
    "coffee": ("skimage/data", "coffee.png"),
    "motorcycle": ("skimage/data", "motorcycle_left.png"),
    "rocket": ("skimage/data", "rocket.jpg"),
    "tissue": ("skimage/data", "ihc.png"),
    "palace": ("sklearn/datasets/images", "china.jpg"),
    "flower": ("sklearn/datasets/images", "flower.jpg"),
}
MIN_CONTRAST = 0.04
"""Smallest standard deviation of a crop that is used. Flat crops, such as sky, are easy to guess and would flatter attacks."""


def photos(size: int = 32, scale: int | None = None) -> Dataset:
    """Load crops of eight colour photographs; the label is the photograph.

    size:  height and width of an example: 32, 64 or 128 pixels.
    scale: size x scale is the width of a crop in the photograph, at most 128 pixels; the crop is averaged down by the factor
           `scale`. By default 2 for 32 pixels, else 1.

    Crops do not overlap. Approximately the left three quarters of a photograph are for training, and the rest is held out. Flat
    crops, whose standard deviation is below `MIN_CONTRAST` on the scale [0, 1], are left out.
    """
    if size not in (32, 64, 128):
        raise ValueError(f"photos: size must be 32, 64 or 128, got {size}")
    scale = (2 if size == 32 else 1) if scale is None else scale
    if not 0 < size * scale <= 128:
        raise ValueError(
            f"photos: size x scale, the width of a crop, must be from 1 to 128 pixels, got {size} x {scale}; change scale"
        )
    train: list[tuple[Array, int]] = []
    test: list[tuple[Array, int]] = []
    for label, photograph in enumerate(PHOTOGRAPHS):
        windows = _cut_windows(_read_photograph(photograph), size * scale)
        border = max(column for column, _ in windows) * 3 // 4
        for column, window in windows:
            crop = window.reshape(size, scale, size, scale, 3).mean(axis=(1, 3)).round().astype(np.uint8)
            if crop.std() >= MIN_CONTRAST * 255:
                (train if column <= border else test).append((crop.transpose(2, 0, 1), label))
    spec = DataSpec(shape=(3, size, size), num_classes=len(PHOTOGRAPHS))
    return Dataset(name="photos", spec=spec, class_names=tuple(PHOTOGRAPHS), train=_stack(train), test=_stack(test))


def _cut_windows(image: Array, size: int) -> list[tuple[int, Array]]:
    rows, columns = image.shape[0] // size, image.shape[1] // size
    return [
        (column, image[row * size : (row + 1) * size, column * size : (column + 1) * size])
        for row in range(rows)
        for column in range(columns)
    ]


def _read_photograph(name: str) -> Array:
    with Image.open(_find_shipped("photos", *PHOTOGRAPHS[name])) as image:
        return np.asarray(image)[..., :3]


def _find_shipped(name: str, folder: str, file: str) -> Path:
    """Return the path of a file in a folder of an installed package, such as "skimage/data", without importing the package."""
    package = folder.partition("/")[0]
    spec = find_spec(package)
    path = Path(*(spec.submodule_search_locations or ()) if spec else ()).parent / folder / file
    if not path.exists():
        raise FileNotFoundError(f"{name}: {path} is missing; reinstall {package}, which ships it")
    return path


def _stack(pairs: list[tuple[Array, int]]) -> Examples:
    return Examples(values=np.stack([crop for crop, _ in pairs]), labels=np.array([label for _, label in pairs]))


def lfw_patches() -> Dataset:
    """Load 100 faces and 100 other patches of photographs, 25x25 grey (from LFW, through scikit-image).

    The label is 1 for a face and 0 for another patch; every fifth example is held out.
    """
    patches = np.load(_find_shipped("lfw_patches", "skimage/data", "lfw_subset.npy"), allow_pickle=False)
    values = patches.astype(np.float32)[:, None]
    labels = (np.arange(len(values)) < 100).astype(np.int64)
    spec = DataSpec(shape=(1, 25, 25), num_classes=2)
    return hold_out_every_fifth("lfw_patches", spec, ("other", "face"), Examples(values=values, labels=labels))


def digits() -> Dataset:
    """Load handwritten digits, 8x8 grey (UCI, through scikit-learn); every fifth example is held out."""
    rows = np.loadtxt(_find_shipped("digits", "sklearn/datasets/data", "digits.csv.gz"), delimiter=",")  # 64 pixels, label
    images = (rows[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    spec = DataSpec(shape=(1, 8, 8), num_classes=10)
    return hold_out_every_fifth("digits", spec, tuple("0123456789"), Examples(values=images, labels=rows[:, -1].astype(np.int64)))


def breast_cancer(ranges_from: str = "held_out") -> Dataset:
    """Load the Wisconsin breast cancer table: 30 measurements, benign or malignant (UCI, through scikit-learn).

    Every fifth row is held out. Each column is scaled to [0, 1] by its smallest and largest value, which are public.

    ranges_from: rows from which these two values are taken. "held_out": held-out rows; values outside are clamped. "clients": all
    rows, so that the exact extremes of the clients' data are public.
    """
    from sklearn.datasets import load_breast_cancer

    loaded = load_breast_cancer()
    if ranges_from not in ("held_out", "clients"):
        raise ValueError(f"breast_cancer: ranges_from must be held_out or clients, got {ranges_from!r}")
    shown = loaded.data[4::5] if ranges_from == "held_out" else loaded.data
    low, high = shown.min(axis=0), shown.max(axis=0)
    columns = tuple(
        Column(name=str(name), low=float(a), high=float(b)) for name, a, b in zip(loaded.feature_names, low, high, strict=True)
    )
    spec = DataSpec(shape=(30,), num_classes=2, columns=columns, ranges_from="clients" if shown is loaded.data else "held_out")
    names = tuple(map(str, loaded.target_names))
    examples = Examples(values=scale(loaded.data, low, high), labels=loaded.target)
    return hold_out_every_fifth("breast_cancer", spec, names, examples)
