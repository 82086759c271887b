"""Tests of partitions, which split the examples among clients: parts are disjoint, not empty, and contain all examples."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.data import Examples, partition
from fedsim.data.partition import PARTITIONS, split

# Partitions that can split any data among any number of clients.
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("iid", {}),
    ("dirichlet", {"alpha": 0.01}),
    ("dirichlet", {"alpha": 0.5}),
    ("dirichlet", {"alpha": 1e5}),
    ("by_label", {}),
]
RESTRICTED: list[tuple[str, dict[str, Any]]] = [("k_classes", {"k": 2}), ("by_group", {"column": "ward"})]
"""Partitions that cannot split some data sets, or not among some numbers of clients."""


def make_examples(labels: Any, **groups: Any) -> Examples:
    labels = np.asarray(labels)
    columns = {name: np.asarray(values) for name, values in groups.items()}
    return Examples(values=np.zeros((len(labels), 1), np.float32), labels=labels, groups=columns)


def test_the_settings_cover_every_registered_partition() -> None:
    assert set(PARTITIONS) == {name for name, _ in SETTINGS + RESTRICTED}


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    share=st.floats(0, 1),
    setting=st.sampled_from(SETTINGS),
    seed=st.integers(0, 2**32),
)
def test_parts_are_disjoint_none_is_empty_and_together_they_are_everything(
    labels: list[int], share: float, setting: tuple[str, dict[str, Any]], seed: int
) -> None:
    name, arguments = setting
    clients = max(1, round(share * len(labels)))
    parts = split(make_examples(labels), clients, seed=seed, name=name, **arguments)
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize(("count", "clients"), [(10, 3), (10, 10), (7, 1), (100, 7)])
def test_iid_parts_differ_by_one_at_most(count: int, clients: int) -> None:
    sizes = [len(part) for part in split(make_examples(np.zeros(count, int)), clients, seed=0, name="iid")]
    assert max(sizes) - min(sizes) <= 1


def test_iid_shuffles_the_examples() -> None:
    labels = np.repeat([0, 1], 500)
    first, _ = split(make_examples(labels), 2, seed=0, name="iid")
    assert 200 < labels[first].sum() < 300


@pytest.mark.parametrize(("name", "arguments"), SETTINGS + RESTRICTED)
def test_a_seed_repeats_and_another_differs(name: str, arguments: dict[str, Any]) -> None:
    data = make_examples(np.arange(200) % 4, ward=np.arange(200) % 17)

    def drawn(seed: int) -> list[list[int]]:
        return [part.tolist() for part in split(data, 5, seed=seed, name=name, **arguments)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def skew(alpha: float, seed: int) -> float:
    """Return the share of a client's most frequent class, averaged over clients: 1/4 is even, 1 is one class only."""
    labels = np.arange(4000) % 4
    parts = split(make_examples(labels), 8, seed=seed, name="dirichlet", alpha=alpha)
    return float(np.mean([np.bincount(labels[part], minlength=4).max() / len(part) for part in parts]))


@pytest.mark.parametrize("seed", range(5))
def test_a_small_alpha_gives_each_client_few_classes_and_a_large_one_all_of_them(seed: int) -> None:
    assert skew(0.01, seed) > 0.85
    assert skew(1e4, seed) < 0.3
    assert skew(0.01, seed) > skew(1, seed) > skew(1e4, seed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"name": "round_robin"},
            r"unknown name 'round_robin' in the registry fedsim\.partitions.*by_group, by_label, dirichlet, iid, k_classes",
        ),
        ({"name": "dirichlet"}, "partition dirichlet: .*'alpha'"),
        ({"name": "dirichlet", "alpha": 0}, "alpha must be positive.*, got 0"),
        ({"name": "dirichlet", "alhpa": 1}, r"'alpha'.*Its parameters: \(\*?,? ?alpha: float\)"),
        ({"name": "iid", "alpha": 1}, "partition iid: .*'alpha'"),
        ({"name": "k_classes", "k": 0}, "k must be a whole number from 1 to the 2 classes, got 0"),
        ({"name": "k_classes", "k": 3}, "k must be a whole number from 1 to the 2 classes, got 3"),
        ({"name": "k_classes", "k": 1.5}, "k must be a whole number.*, got 1.5"),
        ({"name": "by_group", "collumn": "ward"}, r"partition by_group: .*column: str"),
        ({"name": "by_group", "column": "word"}, "the data set has no group column 'word'; use one of ward"),
        ({"name": "by_group", "column": "ward"}, r"clients\.count is 2, but column 'ward' has only 1 groups"),
    ],
)
def test_unknown_names_and_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(make_examples(np.arange(10) % 2, ward=[1] * 10), 2, seed=0, **arguments)


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"clients\.count is 11, but there are only 10 training examples"):
        split(make_examples(np.zeros(10, int)), 11, seed=0, name="iid")


def test_a_data_set_without_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="no group column 'person'; it has no group columns; csv and lfw do"):
        split(make_examples(np.arange(10) % 2), 2, seed=0, name="by_group", column="person")


# --- by_label ---


def held(labels: np.ndarray, parts: list[np.ndarray]) -> list[set[int]]:
    return [set(labels[part].tolist()) for part in parts]


def test_a_client_for_each_class_holds_just_that_one() -> None:
    labels = np.array([3, 1, 2, 1, 3, 3])
    parts = split(make_examples(labels), 3, seed=0, name="by_label")
    assert [part.tolist() for part in parts] == [[1, 3], [2], [0, 4, 5]]


def test_with_fewer_clients_than_classes_the_classes_are_dealt_in_turn() -> None:
    labels = np.arange(70) % 7
    assert held(labels, split(make_examples(labels), 3, seed=0, name="by_label")) == [{0, 3, 6}, {1, 4}, {2, 5}]


def test_with_more_clients_than_classes_each_class_is_split_evenly() -> None:
    labels = np.repeat([0, 1, 2], [10, 30, 2])
    parts = split(make_examples(labels), 8, seed=0, name="by_label")
    assert all(len(classes) == 1 for classes in held(labels, parts))
    sizes = [[len(part) for part in parts if labels[part[0]] == label] for label in range(3)]
    assert [sorted(own) for own in sizes] == [[3, 3, 4], [10, 10, 10], [1, 1]]


def test_a_class_has_no_more_clients_than_examples() -> None:
    labels = np.array([0] * 9 + [1])
    parts = split(make_examples(labels), 10, seed=0, name="by_label")
    assert sorted(len(part) for part in parts) == [1] * 10


# --- k_classes ---


@settings(deadline=None, max_examples=80)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    clients=st.integers(1, 12),
    k=st.integers(1, 7),
    seed=st.integers(0, 2**32),
)
def test_each_client_holds_exactly_k_classes_if_that_is_possible(labels: list[int], clients: int, k: int, seed: int) -> None:
    """This is possible if sum(min(size of a class, clients)) is at least clients * k, by the theorem of Gale and Ryser."""
    data, sizes = make_examples(labels), Counter(labels)
    if clients > len(labels) or k > len(sizes) or sum(min(size, clients) for size in sizes.values()) < clients * k:
        with pytest.raises(ValueError, match=r"there are only|k must be|too few examples"):
            split(data, clients, seed=seed, name="k_classes", k=k)
        return
    parts = split(data, clients, seed=seed, name="k_classes", k=k)
    assert [len(classes) for classes in held(data.labels, parts)] == [k] * clients
    dealt = np.concatenate(parts).tolist()
    assert len(dealt) == len(set(dealt))
    kept = {labels[i] for i in dealt}
    assert len(dealt) == sum(sizes[label] for label in kept)  # either all examples of a class are used, or none
    assert len(kept) == min(len(sizes), clients * k)
    left = [sizes[label] for label in set(sizes) - kept]
    assert not left or max(left) <= min(sizes[label] for label in kept)


def test_k_classes_of_even_data_are_shards_of_one_size() -> None:
    """The setting of McMahan et al. 2017: a hundred clients with two classes and the same number of examples each."""
    labels = np.arange(6000) % 10
    parts = split(make_examples(labels), 100, seed=0, name="k_classes", k=2)
    assert {len(part) for part in parts} == {60}
    pairs = Counter(tuple(sorted(classes)) for classes in held(labels, parts))
    assert len(pairs) > 33  # of 45 pairs; a hundred random draws would miss about five


def test_a_large_class_has_more_clients() -> None:
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    parts = split(make_examples(labels), 10, seed=0, name="k_classes", k=1)
    assert Counter(int(labels[part[0]]) for part in parts) == {0: 6, 1: 3, 2: 1}
    assert {len(part) for part in parts} == {100}


# --- by_group ---


@settings(deadline=None, max_examples=60)
@given(
    wards=st.lists(st.sampled_from(["north", "south", "?", "9", "10", "west"]), min_size=1, max_size=60),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32),
)
def test_each_group_belongs_to_one_client_and_sizes_are_balanced(wards: list[str], share: float, seed: int) -> None:
    sizes = Counter(wards)
    clients = max(1, round(share * len(sizes)))
    column = np.array(wards, dtype=object)
    parts = split(make_examples(np.zeros(len(wards), int), ward=column), clients, seed=seed, name="by_group", column="ward")
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(wards)))
    assert sum(len(set(column[part])) for part in parts) == len(sizes)
    for part in parts:  # each group was given to the client with the fewest examples
        assert len(part) - min(Counter(column[part]).values()) <= min(map(len, parts))


def test_groups_are_dealt_the_largest_first() -> None:
    ward = np.repeat([1, 2, 3, 4, 5], [7, 6, 5, 4, 2])
    parts = split(make_examples(np.zeros(24, int), ward=ward), 2, seed=0, name="by_group", column="ward")
    assert sorted(sorted(set(ward[part].tolist())) for part in parts) == [[1, 4, 5], [2, 3]]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([[0, 1]], "got 1 for 2 clients"),
        ([[0, 1], [1, 2]], "some index occurs twice"),
        ([[0], []], "got float64 of shape \\(0,\\) for client 1"),
        ([[0], [7]], "from 0 to 5, got 7 to 7 for client 1"),
    ],
)
def test_wrong_parts_of_an_own_partition_are_refused(parts: list[list[int]], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "PARTITIONS", {"own": lambda examples, clients, rng: parts})
    examples = Examples(values=np.zeros((6, 1, 2, 2), np.uint8), labels=np.zeros(6, np.int64))
    with pytest.raises(ValueError, match=words):
        split(examples, 2, seed=0, name="own")
