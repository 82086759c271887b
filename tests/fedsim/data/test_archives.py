"""Tests of images from NumPy archives: the values that are read, and messages for files that cannot be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim import data as datasets

DRAWN = np.random.default_rng(0)
GREY = DRAWN.integers(0, 256, (10, 4, 6), dtype=np.uint8)
COLOUR = DRAWN.integers(0, 256, (10, 4, 6, 3), dtype=np.uint8)
LABELS = np.arange(10) % 3


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., str]:
    def make(name: str = "train.npz", /, **arrays: Any) -> str:
        np.savez(tmp_path / name, **arrays)
        return str(tmp_path / name)

    return make


@pytest.mark.parametrize("images", [GREY, COLOUR, COLOUR[..., :1]], ids=["grey", "colour", "one channel"])
@pytest.mark.parametrize("kind", [np.uint8, np.float32, np.float64])
def test_images_are_channels_first_with_values_from_0_to_1(images: np.ndarray, kind: type, archive: Callable[..., str]) -> None:
    stored = images if kind is np.uint8 else (images / 255).astype(kind)
    data = datasets.npz(archive(images=stored, labels=LABELS))
    channels = 3 if images.shape[-1] == 3 else 1
    assert data.spec.shape == (channels, 4, 6)
    assert (data.spec.num_classes, data.class_names) == (3, ("0", "1", "2"))
    x, y = data.train[:]
    kept = [0, 1, 2, 3, 5, 6, 7, 8]  # every fifth is held out
    expected = torch.from_numpy(images[kept].reshape(8, 4, 6, channels) / 255).permute(0, 3, 1, 2).float()
    assert torch.allclose(x, expected, atol=1e-7)
    assert y.tolist() == LABELS[kept].tolist()
    assert data.test[:][1].tolist() == LABELS[[4, 9]].tolist()


def test_held_out_examples_can_be_in_a_second_file(archive: Callable[..., str]) -> None:
    train, test = archive(images=GREY, labels=LABELS), archive("test.npz", images=GREY[:2], labels=LABELS[:2])
    for data in (datasets.npz(train, test), datasets.load(f"npz:{train},{test}"), datasets.load("npz", train=train, test=test)):
        assert (len(data.train), len(data.test)) == (10, 2)
        assert data.name == f"npz:{train}"
    assert len(datasets.load(f"npz:{train}").train) == 8


def test_class_names_are_read_and_set_the_number_of_classes(archive: Callable[..., str]) -> None:
    data = datasets.npz(archive(images=GREY, labels=LABELS, class_names=np.array(["a", "b", "c", "d"])))
    assert (data.class_names, data.spec.num_classes) == (("a", "b", "c", "d"), 4)


def test_a_normalisation_is_part_of_the_specification_and_not_of_the_values(archive: Callable[..., str]) -> None:
    path = archive(images=COLOUR, labels=LABELS)
    data = datasets.load("npz", train=path, mean=[0.5, 0.25, 0.0], std=[2.0, 1.0, 0.5])
    assert (data.spec.mean, data.spec.std) == ((0.5, 0.25, 0.0), (2.0, 1.0, 0.5))
    assert torch.equal(data.train[:][0], datasets.npz(path).train[:][0])
    assert data.compute_hash() == datasets.npz(path).compute_hash()
    with pytest.raises(ValueError, match="mean and std"):
        datasets.npz(path, mean=(0.5, 0.5), std=(1.0, 1.0))


def test_one_pixel_changes_the_hash(archive: Callable[..., str]) -> None:
    other = GREY.copy()
    other[0, 0, 0] ^= 1
    hashes = {
        datasets.npz(archive(f"{i}.npz", images=g, labels=LABELS)).compute_hash() for i, g in enumerate((GREY, other, GREY))
    }
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": GREY}, "no array 'labels'; it holds images"),
        ({"labels": LABELS, "pictures": GREY}, "no array 'images'; it holds labels, pictures"),
        ({"images": GREY[0], "labels": LABELS}, r"expected images .*\(4, 6\)"),
        ({"images": GREY, "labels": LABELS[:9]}, r"expected images .*\(9,\)"),
        ({"images": GREY, "labels": np.stack([LABELS, LABELS], 1)}, r"expected images .*\(10, 2\)"),
        ({"images": GREY, "labels": LABELS / 1.0}, "integer labels"),
        ({"images": GREY[:0], "labels": LABELS[:0]}, r"expected images .*\(0, 4, 6, 1\)"),
        ({"images": COLOUR[..., :2], "labels": LABELS}, "1 or 3 channels, got 2"),
        ({"images": GREY, "labels": LABELS - 1}, "must not be negative, got -1"),
        ({"images": GREY.astype(np.float32), "labels": LABELS}, r"float images must lie in \[0, 1\]"),
        ({"images": GREY / 255 - 0.5, "labels": LABELS}, r"float images must lie in \[0, 1\]"),
        ({"images": GREY / np.nan, "labels": LABELS}, r"float images must lie in \[0, 1\]"),
        ({"images": GREY, "labels": LABELS, "class_names": np.array(["a", "b"])}, "label 2 is not one of the 2 class_names"),
    ],
)
def test_a_bad_archive_is_named_with_what_is_wrong(arrays: dict[str, Any], words: str, archive: Callable[..., str]) -> None:
    path = archive(**arrays)
    with pytest.raises(ValueError, match=words) as refused:
        datasets.npz(path)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": COLOUR, "labels": LABELS}, r"shape \(3, 4, 6\), but the training examples of .* have \(1, 4, 6\)"),
        ({"images": GREY, "labels": LABELS + 1}, "label 3 of a held-out example is not one of the 3 classes"),
    ],
)
def test_a_held_out_file_must_match_the_training_file(arrays: dict[str, Any], words: str, archive: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=words):
        datasets.npz(archive(images=GREY, labels=LABELS), archive("test.npz", **arrays))


def test_a_file_that_is_no_archive_is_named(tmp_path: Path, archive: Callable[..., str]) -> None:
    whole = Path(archive(images=GREY, labels=LABELS)).read_bytes()
    np.save(tmp_path / "array.npy", GREY)
    contents = {
        "empty": b"",
        "junk": b"junk" * 100,
        "half": whole[: len(whole) // 2],
        "array": (tmp_path / "array.npy").read_bytes(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{tmp_path / name}: not a NumPy archive"):
            datasets.npz(str(tmp_path / name))
    with pytest.raises(ValueError, match="is not a regular file"):
        datasets.npz(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npz does not exist"):
        datasets.npz(str(tmp_path / "nowhere.npz"))


# --- training and held-out examples in one file ---

NAMES = [("train_images", "train_labels", "test_images", "test_labels"), ("x_train", "y_train", "x_test", "y_test")]


@pytest.mark.parametrize("names", NAMES)
def test_one_file_may_hold_training_and_held_out_examples(names: tuple[str, ...], archive: Callable[..., str]) -> None:
    path = archive(**dict(zip(names, (GREY, LABELS, GREY[:3], LABELS[:3]), strict=True)))
    data = datasets.npz(path)
    assert np.array_equal(data.train.values[:, 0], GREY)
    assert np.array_equal(data.test.values[:, 0], GREY[:3])
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == (LABELS.tolist(), LABELS[:3].tolist())
    assert data.train.values.dtype == np.uint8


@pytest.mark.parametrize("names", NAMES)
def test_without_held_out_arrays_every_fifth_example_is_held_out(names: tuple[str, ...], archive: Callable[..., str]) -> None:
    data = datasets.npz(archive(**{names[0]: GREY, names[1]: LABELS}))
    assert (len(data.train), len(data.test)) == (8, 2)


def test_a_second_file_with_both_parts_provides_its_held_out_arrays(archive: Callable[..., str]) -> None:
    one = archive(images=GREY, labels=LABELS)
    both = archive("both.npz", train_images=GREY, train_labels=LABELS, test_images=GREY[5:7], test_labels=LABELS[5:7])
    assert np.array_equal(datasets.npz(one, both).test.values[:, 0], GREY[5:7])
    assert len(datasets.npz(both, one).test) == 10


def test_labels_in_a_column_are_read(archive: Callable[..., str]) -> None:
    assert datasets.npz(archive(images=GREY, labels=LABELS[:, None])).train.labels.tolist() == [0, 1, 2, 0, 2, 0, 1, 2]


def test_wrong_held_out_arrays_are_refused_with_the_reason(archive: Callable[..., str]) -> None:
    path = archive(train_images=GREY, train_labels=LABELS, test_images=COLOUR, test_labels=LABELS)
    with pytest.raises(ValueError, match=r"shape \(3, 4, 6\), but the training examples of"):
        datasets.npz(path)
    with pytest.raises(ValueError, match="no array 'train_labels'; it holds train_images"):
        datasets.npz(archive("half.npz", train_images=GREY))
    with pytest.raises(ValueError, match="no array 'y_test'; it holds x_train, y_train, x_test"):
        datasets.npz(archive("half.npz", x_train=GREY, y_train=LABELS, x_test=GREY))
    with pytest.raises(ValueError, match=r"every fifth example is held out, but there are only 4"):
        datasets.npz(archive("few.npz", images=GREY[:4], labels=LABELS[:4]))


@pytest.mark.parametrize(
    ("file", "shape", "sizes"),
    [
        ("cifar100/cifar100_4k.npz", (3, 32, 32), (3000, 1000)),
        ("mnist/mnist10k.npz", (1, 28, 28), (8000, 1000)),
        ("lfw/lfw64.npz", (3, 64, 64), (340, 84)),
    ],
)
def test_public_archives_are_read(shared_data: Path, file: str, shape: tuple[int, ...], sizes: tuple[int, int]) -> None:
    data = datasets.npz(str(shared_data / file))
    assert (data.spec.shape, (len(data.train), len(data.test))) == (shape, sizes)
    assert data.train.values.dtype == np.uint8
