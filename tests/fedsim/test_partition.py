"""Every way to split the examples is a partition: disjoint, none empty, all together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.partition import PARTITIONS, split

# One setting of each registered partition, and the same with everything else it can do.
SETTINGS = [("iid", {}), ("dirichlet", {"alpha": 0.01}), ("dirichlet", {"alpha": 0.5}), ("dirichlet", {"alpha": 1e5})]


def test_the_table_covers_every_registered_partition() -> None:
    assert set(PARTITIONS) == {name for name, _ in SETTINGS}


@settings(deadline=None, max_examples=60)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    share=st.floats(0, 1),
    setting=st.sampled_from(SETTINGS),
    seed=st.integers(0, 2**32),
)
def test_parts_are_disjoint_none_is_empty_and_together_they_are_everything(
    labels: list[int], share: float, setting: tuple[str, dict[str, float]], seed: int
) -> None:
    name, arguments = setting
    clients = max(1, round(share * len(labels)))
    parts = split(np.array(labels), clients, seed=seed, name=name, **arguments)
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize(("examples", "clients"), [(10, 3), (10, 10), (7, 1), (100, 7)])
def test_iid_parts_differ_by_one_at_most(examples: int, clients: int) -> None:
    sizes = [len(part) for part in split(np.zeros(examples, int), clients, seed=0, name="iid")]
    assert max(sizes) - min(sizes) <= 1


def test_iid_is_no_plain_cut() -> None:
    labels = np.repeat([0, 1], 500)
    first, _ = split(labels, 2, seed=0, name="iid")
    assert 200 < labels[first].sum() < 300


@pytest.mark.parametrize(("name", "arguments"), SETTINGS)
def test_a_seed_repeats_and_another_differs(name: str, arguments: dict[str, float]) -> None:
    labels = np.arange(200) % 4

    def drawn(seed: int) -> list[list[int]]:
        return [part.tolist() for part in split(labels, 5, seed=seed, name=name, **arguments)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def skew(alpha: float, seed: int) -> float:
    """How much of each client's data its commonest class makes up, on average: 1/4 is even, 1 is one class only."""
    labels = np.arange(4000) % 4
    parts = split(labels, 8, seed=seed, name="dirichlet", alpha=alpha)
    return float(np.mean([np.bincount(labels[part], minlength=4).max() / len(part) for part in parts]))


@pytest.mark.parametrize("seed", range(5))
def test_a_small_alpha_gives_each_client_few_classes_and_a_large_one_all_of_them(seed: int) -> None:
    assert skew(0.01, seed) > 0.85
    assert skew(1e4, seed) < 0.3
    assert skew(0.01, seed) > skew(1, seed) > skew(1e4, seed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "round_robin"}, r"unknown name 'round_robin' in fedsim\.partitions.*dirichlet, iid"),
        ({"name": "dirichlet"}, "partition dirichlet: .*'alpha'"),
        ({"name": "dirichlet", "alpha": 0}, "alpha must be positive.*, got 0"),
        ({"name": "dirichlet", "alpha": float("inf")}, "alpha must be positive and finite, got inf"),
        ({"name": "dirichlet", "alhpa": 1}, r"'alpha'.*Its parameters: \(\*?,? ?alpha: float\)"),
        ({"name": "iid", "alpha": 1}, "partition iid: .*'alpha'"),
    ],
)
def test_unknown_names_and_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(np.zeros(10, int), 2, seed=0, **arguments)  # type: ignore[arg-type]


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(ValueError, match=r"clients\.count is 11, and there are only 10 training examples"):
        split(np.zeros(10, int), 11, seed=0, name="iid")
