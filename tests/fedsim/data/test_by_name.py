"""Tests of data sets that are loaded by name: caching, wrong arguments, and the hash of all values."""

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from defenses.registry import read_summary
from fedsim import data as datasets
from fedsim.data import DATASETS, Dataset, Examples
from fedsim.recording.observation import DataSpec

# --- the hash ---


def changed(data: Dataset, *, pixel: bool = False, label: bool = False, order: bool = False) -> Dataset:
    values, labels = data.train.values.copy(), data.train.labels.copy()
    if pixel:
        values[-1, 0, -1, -1] += np.asarray(1 / 16, values.dtype)
    if label:
        labels[0] = (labels[0] + 1) % 10
    if order:
        values, labels = values[::-1], labels[::-1]
    return replace(data, train=replace(data.train, values=values, labels=labels))


def test_the_hash_depends_on_content_and_order_of_training_examples_only() -> None:
    data = datasets.load("digits")
    original = data.compute_hash()
    assert changed(data).compute_hash() == original
    assert replace(data, name="other", test=data.train).compute_hash() == original
    others = {changed(data, **{what: True}).compute_hash() for what in ("pixel", "label", "order")}
    reshaped = replace(data.train, values=data.train.values.reshape(-1, 1, 4, 16))
    others.add(
        Dataset(
            name="digits", spec=replace(data.spec, shape=(1, 4, 16)), class_names=data.class_names, train=reshaped, test=reshaped
        ).compute_hash()
    )
    assert len(others | {original}) == 5


def test_the_hash_is_the_same_in_another_process_and_layout() -> None:
    data = datasets.load("digits")
    turned = replace(data.train, values=np.asfortranarray(data.train.values), labels=data.train.labels.astype(np.int32))
    assert replace(data, train=turned).compute_hash() == data.compute_hash()
    assert data.compute_hash() == datasets.digits().compute_hash()


def test_a_large_set_is_hashed_without_a_second_copy() -> None:
    values = np.zeros((20_000, 1, 28, 28), dtype=np.uint8)
    values[::7, 0, 3] = 9
    spec = DataSpec(shape=(1, 28, 28), num_classes=2)
    hashes = set()
    for layout in (values, np.asfortranarray(values)):
        train = Examples(values=layout, labels=np.arange(len(values)) % 2)
        data = Dataset(name="large", spec=spec, class_names=("a", "b"), train=train, test=train)
        tracemalloc.start()
        hashes.add(data.compute_hash())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < values.nbytes / 3
    assert len(hashes) == 1


# --- examples ---


def test_a_subset_selects_values_labels_and_groups() -> None:
    examples = Examples(values=np.eye(4, dtype=np.float32), labels=np.arange(4), groups={"ward": np.array(list("abab"))})
    for chosen in (np.array([3, 1]), np.array([False, True, False, True])):
        part = examples.select(chosen)
        assert len(part) == 2
        assert sorted(part.labels.tolist()) == [1, 3]
        assert part.groups["ward"].tolist() == ["b", "b"]
        assert np.array_equal(part.values.argmax(axis=1), part.labels)


def test_parts_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equal lengths, got 4 values, 4 labels, 3 groups\['ward'\]"):
        Examples(values=np.eye(4), labels=np.arange(4), groups={"ward": np.zeros(3)})


def test_pixels_stay_bytes_until_they_are_used() -> None:
    examples = Examples(values=np.array([[[[0, 51, 255]]]], dtype=np.uint8), labels=np.array([1], dtype=np.uint8))
    x, y = examples[:]
    assert x.flatten().tolist() == pytest.approx([0, 0.2, 1])
    assert (examples.values.dtype, y.dtype.itemsize) == (np.uint8, 8)


# --- by name ---


def test_the_module_exports_exactly_these_names() -> None:
    others = {"DATASETS", "Dataset", "Examples", "describe", "load"}
    others |= {"is_code", "load_text", "parse_text", "split_name"}
    assert set(datasets.__all__) == {*DATASETS, *others}
    assert all(hasattr(datasets, name) for name in datasets.__all__)


def test_every_data_set_has_a_one_line_summary() -> None:
    for name in DATASETS:
        assert 30 < len(read_summary(DATASETS[name])) < 130, name
        assert read_summary(DATASETS[name]).endswith(".")


def test_data_sets_are_cached_by_their_arguments() -> None:
    assert datasets.load("photos", size=64) is datasets.load("photos", size=64)
    assert datasets.load("photos", size=64) is not datasets.load("photos", size=128)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("fotos", {}, "Did you mean 'photos'"),
        ("photos", {"sise": 32}, "photos: .*'sise'.*size"),
        ("npz", {}, "npz: .*'train'"),
        ("csv", {"path": "a.csv", "lable": "y"}, r"csv: .*'lable'.*label: "),
        ("imagefolder", {}, r"imagefolder: .*'path'.*size: int = 64"),
        ("mnist", {"normalize": True}, r"mnist: .*'normalize'.*normalise: bool"),
    ],
)
def test_unknown_names_and_arguments_say_what_exists(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        datasets.load(name, **arguments)


def test_the_description_of_a_data_set_has_its_hash_and_size() -> None:
    data = datasets.load("digits")
    assert datasets.describe(data, data.name, {"a": 1}) == {
        "name": "digits",
        "arguments": {"a": 1},
        "content_hash": data.compute_hash(),
        "size": len(data.train),
    }


# --- agreement with the specification ---


def make_data_set(**changed: Any) -> Dataset:
    values, labels = changed.pop("values", np.zeros((4, 1, 8, 8), np.float32)), changed.pop("labels", np.arange(4) % 2)
    examples = Examples(values=values, labels=labels)
    own = {
        "name": "mine",
        "spec": DataSpec(shape=(1, 8, 8), num_classes=2),
        "class_names": ("a", "b"),
        "test": examples.select([]),
    }
    return Dataset(**{**own, "train": examples, **changed})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"values": np.zeros((4, 8, 8), np.float32)},
            r"mine: train.values have shape \(4, 8, 8\); .*must have shape \(N, 1, 8, 8\)",
        ),
        ({"values": np.zeros((4, 1, 8, 8))}, "mine: train.values must be uint8 pixels or float32 .* got float64; use astype"),
        ({"values": np.full((4, 1, 8, 8), 7, np.float32)}, r"must lie in \[0, 1\], got values from 7.0 to 7.0; rescale"),
        ({"values": np.full((4, 1, 8, 8), np.nan, np.float32)}, r"must lie in \[0, 1\], got values from nan"),
        ({"labels": np.array([0.0, 1, 0, 1])}, "mine: train.labels must be integers .* got float64"),
        ({"labels": np.eye(4, dtype=np.int64)}, r"labels must be integers of shape \(N,\), got int64 of shape \(4, 4\)"),
        ({"labels": np.array([0, 1, 2, 1])}, "labels must be from 0 to spec.num_classes - 1 = 1, got 2"),
        ({"labels": np.array([0, 1, -1, 1])}, "labels must be from 0 to spec.num_classes - 1 = 1, got -1"),
        ({"class_names": ("a", "b", "c")}, "3 class_names exceed spec.num_classes = 2"),
        ({"train": np.zeros(3)}, "mine: train must be Examples, got ndarray"),
    ],
)
def test_a_data_set_that_contradicts_its_specification_is_refused_when_it_is_made(changed: dict[str, Any], words: str) -> None:
    assert len(make_data_set().train) == 4
    with pytest.raises(ValueError, match=words):
        make_data_set(**changed)


def test_a_function_that_returns_no_data_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS._builtin, "nothing", lambda: None)
    with pytest.raises(ValueError, match=r"the data set nothing must return a fedsim\.data\.Dataset, got NoneType"):
        datasets.load("nothing")
