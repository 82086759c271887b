"""Tests of images from one folder for each class: values, order, and messages for images that cannot be read."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize

from fedsim import data as datasets

DRAWN = np.random.default_rng(0)


def make_picture(width: int = 20, height: int = 20) -> Image.Image:
    return Image.fromarray(DRAWN.integers(0, 256, (height, width, 3), dtype=np.uint8))


def save(folder: Path, classes: dict[str, int], ending: str = "png") -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            make_picture().save(folder / name / f"{i:03d}.{ending}")


def read_pixels(file: Path, mode: str = "RGB") -> np.ndarray:
    pixels = np.asarray(Image.open(file).convert(mode))
    return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]


def test_every_fifth_image_of_each_class_is_held_out(tmp_path: Path) -> None:
    save(tmp_path, {"dog": 6, "cat": 11, "eel": 3})
    for data in (datasets.imagefolder(str(tmp_path), size=20), datasets.load(f"imagefolder:{tmp_path}", size=20)):
        assert (data.class_names, data.spec.num_classes, data.spec.shape) == (("cat", "dog", "eel"), 3, (3, 20, 20))
        assert data.train.labels.tolist() == [0] * 9 + [1] * 5 + [2] * 3
        assert data.test.labels.tolist() == [0] * 2 + [1]
        held_out = [tmp_path / "cat" / "004.png", tmp_path / "cat" / "009.png", tmp_path / "dog" / "004.png"]
        assert np.array_equal(data.test.values, np.stack([read_pixels(file) for file in held_out]))
        kept = sorted(set(tmp_path.glob("*/*.png")) - set(held_out))
        assert np.array_equal(data.train.values, np.stack([read_pixels(file) for file in kept]))
        assert data.train.values.dtype == np.uint8


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_the_folders_test_and_val_are_held_out(held_out: str, tmp_path: Path) -> None:
    save(tmp_path / "train", {"a": 2, "b": 5})
    save(tmp_path / held_out, {"b": 1})
    data = datasets.imagefolder(str(tmp_path))
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0, 0, 1, 1, 1, 1, 1], [1])
    if held_out == "val":
        save(tmp_path / "test", {"a": 3})
        assert datasets.imagefolder(str(tmp_path)).test.labels.tolist() == [0, 0, 0]


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    save(tmp_path, {"bus": 5, "train": 5})
    assert datasets.imagefolder(str(tmp_path)).class_names == ("bus", "train")


@pytest.mark.parametrize(("width", "height"), [(64, 64), (90, 31), (31, 90), (200, 151), (10, 7), (32, 35), (35, 32)])
@pytest.mark.parametrize("size", [32, 17])
@pytest.mark.parametrize("channels", [3, 1])
def test_the_short_side_is_resized_and_the_middle_taken(
    width: int, height: int, size: int, channels: int, tmp_path: Path
) -> None:
    """The result equals that of torchvision, bit for bit."""
    save(tmp_path, {"a": 5, "b": 1})
    make_picture(width, height).save(tmp_path / "b" / "000.png")
    mode = "RGB" if channels == 3 else "L"
    resized = Resize(size, InterpolationMode.BICUBIC)(Image.open(tmp_path / "b" / "000.png").convert(mode))
    expected = np.asarray(CenterCrop(size)(resized)).reshape(size, size, channels).transpose(2, 0, 1)
    data = datasets.imagefolder(str(tmp_path), size=size, channels=channels)
    assert data.spec.shape == (channels, size, size)
    assert np.array_equal(data.train.values[-1], expected)


def test_formats_modes_and_subfolders_are_read_and_other_files_ignored(tmp_path: Path) -> None:
    save(tmp_path, {"b": 5})
    inner = tmp_path / "a" / "inner"
    inner.mkdir(parents=True)
    one = make_picture()
    for i, (mode, ending) in enumerate(
        [("L", "png"), ("RGBA", "webp"), ("P", "png"), ("CMYK", "JPEG"), ("1", "bmp"), ("LA", "tif")]
    ):
        one.convert(mode).save((inner if i % 2 else tmp_path / "a") / f"{i}.{ending}")
    for stray in (tmp_path / "README.txt", tmp_path / "a" / "notes.txt", tmp_path / "a" / ".hidden.png"):
        stray.write_text("no picture")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "empty").mkdir()
    data = datasets.imagefolder(str(tmp_path), size=20)
    assert data.class_names == ("a", "b")
    assert np.bincount(np.concatenate([data.train.labels, data.test.labels])).tolist() == [6, 5]
    grey = next(values for values, label in zip(data.train.values, data.train.labels, strict=True) if label == 0)
    assert np.array_equal(grey, np.repeat(read_pixels(tmp_path / "a" / "0.png", "L"), 3, axis=0))


def test_an_image_is_rotated_by_its_exif_orientation(tmp_path: Path) -> None:
    save(tmp_path, {"a": 5, "b": 4}, "jpg")
    turned, exif = make_picture(), Image.Exif()
    exif[0x0112] = 6  # to be rotated clockwise
    turned.save(tmp_path / "b" / "004.jpg", exif=exif, quality=100, subsampling=0)
    plain = read_pixels(tmp_path / "b" / "004.jpg")
    assert np.array_equal(datasets.imagefolder(str(tmp_path), size=20).test.values[-1], np.rot90(plain, -1, axes=(1, 2)))


@pytest.mark.parametrize("content", [b"", b"no picture", "half"])
def test_a_broken_picture_is_named(content: bytes | str, tmp_path: Path) -> None:
    save(tmp_path, {"a": 5, "b": 5}, "jpg")
    broken = tmp_path / "b" / "002.jpg"
    broken.write_bytes(broken.read_bytes()[:400] if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=r"cannot be read .*; (repair|convert) or remove it") as failed:
        datasets.imagefolder(str(tmp_path))
    assert str(broken) in str(failed.value)


@pytest.mark.parametrize(
    ("classes", "arguments", "words"),
    [
        ({"a": 5}, {}, "at least two classes, got 1"),
        ({}, {}, "at least two classes, got 0"),
        ({"a": 4, "b": 4}, {}, "no class has five"),
        ({"train/a": 1, "train/b": 1, "test/c": 1}, {}, "class 'c' has held-out images but no training images"),
        ({"train/a": 1, "train/b": 1, "test/a": 0}, {}, "test holds no folders of images"),
        ({"a": 5, "b": 5}, {"size": 0}, "size must be 1 to 4096 pixels, got 0"),
        ({"a": 5, "b": 5}, {"channels": 4}, "channels must be 1 or 3, got 4"),
        ({"a": 5, "b": 5}, {"mean": [0.5] * 3, "std": [1.0]}, "mean and std"),
    ],
)
def test_folders_and_arguments_that_give_no_data_set_are_refused(
    classes: dict[str, int], arguments: dict[str, int], words: str, tmp_path: Path
) -> None:
    save(tmp_path, classes)
    with pytest.raises(ValueError, match=words):
        datasets.imagefolder(str(tmp_path), **arguments)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder .*nowhere"):
        datasets.imagefolder(str(tmp_path / "nowhere"))
