"""Tests of data sets that other packages contain: values in [0, 1], and held-out examples separate from training examples."""

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from skimage.io import imread

from fedsim import data as datasets
from fedsim.data.shipped import MIN_CONTRAST, PHOTOGRAPHS

SETTINGS = [(32, None, 2), (32, 1, 1), (32, 3, 3), (64, None, 1), (64, 2, 2), (128, None, 1)]


def read_photograph(name: str) -> np.ndarray:
    """Read a photograph with another library than the code under test uses."""
    folder, file = PHOTOGRAPHS[name]
    pixels: np.ndarray = imread(Path(str(files(folder.replace("/", ".")))) / file)[..., :3]
    return pixels


@pytest.mark.parametrize("name", ["photos", "digits", "breast_cancer", "lfw_patches"])
def test_every_data_set_keeps_its_own_specification(name: str) -> None:
    data = datasets.load(name)
    assert len(data.class_names) == data.spec.num_classes
    for examples in (data.train, data.test):
        x, y = examples[:]
        assert x.shape == (len(examples), *data.spec.shape)
        assert (x.dtype, y.dtype, y.shape) == (torch.float32, torch.int64, (len(examples),))
        assert x.min() >= 0
        assert x.max() <= 1
        assert set(y.tolist()) == set(range(data.spec.num_classes))
    x, y = data.train[np.array([3, 1])]
    assert torch.equal(x[0], data.train[:][0][3])
    assert y.tolist() == [data.train.labels[3], data.train.labels[1]]


@pytest.mark.parametrize("name", ["photos", "digits", "breast_cancer", "lfw_patches"])
def test_no_example_is_both_held_out_and_used_for_training(name: str) -> None:
    data = datasets.load(name)
    train = {row.tobytes() for row in data.train.values}
    assert not train & {row.tobytes() for row in data.test.values}
    if name == "photos":
        assert len(train) == len(data.train)


@pytest.mark.parametrize(("size", "scale", "resolved"), SETTINGS)
def test_photos_are_windows_of_a_grid_with_a_border_between_training_and_the_rest(
    size: int, scale: int | None, resolved: int
) -> None:
    """Compare the data set with a second implementation: grid, averages, minimal contrast, and separate regions."""
    data = datasets.photos(size, scale)
    step = size * resolved
    expected: dict[str, list[tuple[int, np.ndarray]]] = {"train": [], "test": []}
    for label, name in enumerate(PHOTOGRAPHS):
        pixels = torch.from_numpy(read_photograph(name).astype(np.float64)).permute(2, 0, 1)[None]
        rows, columns = pixels.shape[2] // step, pixels.shape[3] // step
        averaged = torch.nn.functional.avg_pool2d(pixels, resolved)[0].numpy().round()
        last = {"train": -1, "test": columns}
        for row in range(rows):
            for column in range(columns):
                crop = averaged[:, row * size : (row + 1) * size, column * size : (column + 1) * size]
                if crop.std() / 255 < MIN_CONTRAST:
                    continue
                side = "train" if column * 4 <= (columns - 1) * 3 else "test"
                last[side] = max(last[side], column) if side == "train" else min(last[side], column)
                expected[side].append((label, crop))
        assert last["train"] < last["test"]  # no column of windows on both sides
        assert last["train"] >= 0
    for side, examples in (("train", data.train), ("test", data.test)):
        assert examples.labels.tolist() == [label for label, _ in expected[side]]
        assert np.array_equal(examples.values, np.stack([crop for _, crop in expected[side]]).astype(np.uint8))


@pytest.mark.parametrize("size", [32, 64, 128])
def test_every_photo_has_the_minimal_contrast(size: int) -> None:
    data = datasets.photos(size)
    for examples in (data.train, data.test):
        assert (examples[:][0].flatten(1).std(dim=1) >= MIN_CONTRAST - 1e-3).all()


@pytest.mark.parametrize(("size", "scale"), [(31, None), (0, None), (256, None), (32, 8), (128, 2), (32, 0), (32, -1)])
def test_a_size_that_no_photograph_has_is_refused(size: int, scale: int | None) -> None:
    with pytest.raises(ValueError, match=f"photos: .*{size}"):
        datasets.photos(size, scale)


def test_digits_hold_out_every_fifth() -> None:
    from sklearn.datasets import load_digits

    loaded, data = load_digits(), datasets.load("digits")
    assert data.spec.shape == (1, 8, 8)
    assert np.array_equal(data.test.values[:, 0] * 16, loaded.images[4::5])
    kept = [i for i in range(len(loaded.target)) if i % 5 != 4]
    assert np.array_equal(data.train.values[:, 0] * 16, loaded.images[kept])
    assert data.train.labels.tolist() == loaded.target[kept].tolist()


def test_the_table_is_scaled_by_the_ranges_of_held_out_rows() -> None:
    from sklearn.datasets import load_breast_cancer

    loaded, data = load_breast_cancer(), datasets.load("breast_cancer")
    low, high = (np.array([getattr(c, side) for c in data.spec.columns]) for side in ("low", "high"))
    assert data.spec.ranges_from == "held_out"
    assert np.array_equal(low, loaded.data[4::5].min(axis=0))
    assert np.array_equal(high, loaded.data[4::5].max(axis=0))
    expected = ((loaded.data - low) / (high - low)).clip(0, 1)
    assert np.allclose(data.train.values, expected[np.arange(569) % 5 != 4], atol=1e-6)


def test_the_table_can_be_scaled_by_the_ranges_of_all_rows() -> None:
    from sklearn.datasets import load_breast_cancer

    loaded, data = load_breast_cancer(), datasets.load("breast_cancer", ranges_from="clients")
    assert data.spec.ranges_from == "clients"
    low, high = (np.array([getattr(c, side) for c in data.spec.columns]) for side in ("low", "high"))
    assert [c.name for c in data.spec.columns] == list(loaded.feature_names)
    assert {c.kind for c in data.spec.columns} == {"continuous"}
    everything = np.concatenate([data.train.values, data.test.values])
    assert np.allclose(everything.min(axis=0), 0)
    assert np.allclose(everything.max(axis=0), 1)
    assert np.allclose(data.test.values * (high - low) + low, loaded.data[4::5], rtol=1e-5, atol=1e-5 * high.max())
    assert np.array_equal(low, loaded.data.min(axis=0))


def test_patches_are_those_of_scikit_image() -> None:
    from skimage.data import lfw_subset

    pictures, data = lfw_subset(), datasets.load("lfw_patches")
    held_out = np.arange(200) % 5 == 4
    for examples, chosen in ((data.train, ~held_out), (data.test, held_out)):
        assert np.allclose(examples[:][0][:, 0], pictures[chosen], atol=1e-7)
        assert [data.class_names[label] == "face" for label in examples.labels] == (np.flatnonzero(chosen) < 100).tolist()


@pytest.mark.parametrize("name", ["photos", "digits"])
def test_examples_are_contiguous_for_networks_that_call_view(name: str) -> None:
    x, _ = datasets.load(name).train[[3, 1]]
    assert x.is_contiguous()
    convolved = torch.nn.functional.conv2d(x, torch.ones(2, x.shape[1], 3, 3))
    assert convolved.view(2, -1).shape[0] == 2
