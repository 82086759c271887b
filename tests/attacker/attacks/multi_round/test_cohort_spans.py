"""Tests of the attack `cohort_spans`: subspaces of single clients from secure sums, and their examples with the owner named."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_sums
from torch import Tensor

from attacker.attacks import Case, Need, cohort_spans, find_unmet
from attacker.attacks.multi_round.spans.cohort_attack import count_most_examples, list_groups, list_owners
from attacker.attacks.multi_round.spans.cohorts import isolate_clients, name_owner
from attacker.attacks.multi_round.spans.row_space import RowSpace
from attacker.reconstruction import Reconstruction
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(1, 8, 8), num_classes=4)
COHORTS = (("a", "b"), ("a", "c"), ("b", "c"), ("a", "b"))
FIXED = (("a", "b"), ("c", "d"), ("a", "b"), ("c", "d"))
EXAMPLES = 3


def hold(*names: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return three random examples for each client."""
    rng = seeded(3)
    return {name: (torch.rand(EXAMPLES, *DATA.shape, generator=rng), torch.arange(EXAMPLES)) for name in names}


def make_sums(
    cohorts: Sequence[tuple[str, ...]],
    holdings: Mapping[str, tuple[Tensor, Tensor]],
    hidden: int = 96,
    data: DataSpec = DATA,
    rate: float = 0.05,
) -> Case:
    """Return secure sums of clients that take one local step on each of their examples; weights change with the rounds."""
    model = ModelSpec(name="mlp", arguments={"hidden": [hidden]})
    rounds = [{name: [(x[None], y[None]) for x, y in zip(*holdings[name], strict=True)] for name in cohort} for cohort in cohorts]
    return observe_sums(rounds, model=model, data=data, seed=2, learning_rate=rate)


def make_plane(*axes: int) -> RowSpace:
    """Return the subspace spanned by some axes of 12 dimensions, almost without noise."""
    y = 1e6 * torch.eye(12, dtype=torch.float64)[list(axes)]
    return RowSpace(y, torch.eye(12, dtype=torch.float64)[:, : len(axes)], torch.ones(12), 1e6, saturated=False)


def test_client_is_isolated_once_no_other_is_in_all_of_its_cohorts() -> None:
    """Client a has the axes 0 and 1, b has 2, c has 3 and 4; each sum spans the axes of its clients."""
    spaces = [make_plane(0, 1, 2), make_plane(0, 1, 3, 4), make_plane(2, 3, 4), make_plane(0, 1, 2)]
    found = isolate_clients(spaces, COHORTS, [1, 2, 3, 4])
    assert {name: (len(one.y), one.round) for name, one in found.items()} == {"a": (2, 2), "b": (1, 3), "c": (2, 3)}
    assert float(found["a"].y[:, 2:].abs().max()) < 1e-3


def test_clients_that_always_come_together_are_not_isolated() -> None:
    spaces = [make_plane(0, 1), make_plane(2, 3), make_plane(0, 1), make_plane(2, 3)]
    assert isolate_clients(spaces, FIXED, [1, 2, 3, 4]) == {}


def test_the_owner_is_the_only_client_of_all_its_sums() -> None:
    assert name_owner([0, 1], COHORTS) == "a"
    assert name_owner([0, 3], COHORTS) == ""
    assert name_owner([], COHORTS) == ""


def test_examples_of_secure_sums_are_exact_with_their_owners() -> None:
    holdings = hold("a", "b", "c")
    case = make_sums(COHORTS, holdings)
    (found,) = cohort_spans()([case], rng=seeded())
    owners, names = list_owners(found), [name for name in holdings for _ in range(EXAMPLES)]
    x = torch.cat([own for own, _ in holdings.values()])
    errors = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2)
    assert float(errors.amin(dim=0).max()) < 1e-3
    assert [names[i] for i in errors.argmin(dim=1).tolist()] == owners
    assert any("3 of 3 clients are isolated" in note for note in found.notes)


def test_fixed_cohorts_name_no_owner() -> None:
    case = make_sums(FIXED, hold("a", "b", "c", "d"))
    (found,) = cohort_spans()([case], rng=seeded())  # finds examples that alone turn on a neuron
    assert set(list_owners(found)) == {""}
    assert any("0 of 4 clients are isolated" in note for note in found.notes)


def test_with_two_classes_only_true_examples_are_certain() -> None:
    """All neurons that are on for the same examples have parallel rows then, so that a parallel row may be a mixture."""
    holdings = {name: (x, y % 2) for name, (x, y) in hold("a", "b", "c").items()}
    case = make_sums(COHORTS, holdings, data=replace(DATA, num_classes=2))
    (found,) = cohort_spans()([case], rng=seeded())
    x = torch.cat([own for own, _ in holdings.values()])
    errors = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2)
    assert float(errors.amin(dim=0).max()) < 1e-3
    certain = found.confidence >= 0.9
    assert float(errors[certain].amin(dim=1).max() if certain.any() else 0.0) < 1e-3


def test_layer_narrower_than_a_sum_is_refused() -> None:
    case = make_sums(COHORTS, hold("a", "b", "c"), hidden=6)
    with pytest.raises(ValueError, match="too narrow"):
        cohort_spans()([case], rng=seeded())


def test_a_single_client_is_refused() -> None:
    sums = make_sums(COHORTS, hold("a", "b", "c"))
    case = Case(tuple(replace(observation, client="a") for observation in sums.observations))
    assert find_unmet(cohort_spans(), case) == [Need.SECURE_SUM.value]
    for attack in (cohort_spans(), cohort_spans(repeated=True)):
        with pytest.raises(ValueError, match="it splits secure sums, and this is the update of a single client"):
            attack([case], rng=seeded(0))


def test_most_examples_of_a_sum_are_those_reported() -> None:
    (first, *_), holdings = make_sums(COHORTS, hold("a", "b", "c")).observations, 2 * EXAMPLES
    assert count_most_examples(first) == holdings


def measure_answers(found: Reconstruction, x: Tensor) -> tuple[Tensor, list[int]]:
    """Return the largest difference of each answer to the nearest example, and the index of the latter."""
    nearest = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2).min(dim=1)
    return nearest.values, nearest.indices.tolist()


def test_examples_of_one_client_are_grouped_although_the_cohort_never_changes() -> None:
    holdings = hold("a", "b")
    (found,) = cohort_spans()([make_sums((("a", "b"),) * 3, holdings, hidden=384, rate=0.3)], rng=seeded())
    names = [name for name in holdings for _ in range(EXAMPLES)]
    _, nearest = measure_answers(found, torch.cat([own for own, _ in holdings.values()]))
    groups = list_groups(found)
    assert set(list_owners(found)) == {""}
    assert sum(number > 0 for number in groups) >= 5
    assert all(len({names[nearest[i]] for i, own in enumerate(groups) if own == number}) == 1 for number in set(groups) - {0})


def test_mixture_of_examples_with_parallel_errors_is_not_certain() -> None:
    """After a large step, two examples are taken for each other's class: several neurons have the same mixture of both."""
    holdings = hold("a", "b")
    (found,) = cohort_spans()([make_sums((("a", "b"),) * 3, holdings, hidden=384, rate=1.0)], rng=seeded())
    errors, _ = measure_answers(found, torch.cat([own for own, _ in holdings.values()]))
    assert float(errors.max()) > 0.1
    assert float(errors[found.confidence >= 0.9].max()) < 1e-3
    assert int((found.confidence >= 0.9).sum()) >= 3


def test_examples_of_two_clients_are_not_joined_by_one_that_both_hold() -> None:
    holdings = hold("a", "b", "c", "d")
    both = {name: (torch.cat([holdings["a"][0][:1], x[1:]]), y) for name, (x, y) in holdings.items() if name in "ab"}
    holdings |= both
    cohorts = (("a", "c"), ("b", "d"), ("a", "d"), ("b", "c")) * 2
    (found,) = cohort_spans()([make_sums(cohorts, holdings, hidden=384, rate=0.3)], rng=seeded())
    names = [name for name in holdings for _ in range(EXAMPLES)]
    errors, _ = measure_answers(found, torch.cat([own for own, _ in holdings.values()]))
    x = torch.cat([own for own, _ in holdings.values()])
    near = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2) < 1e-3
    holders = [{names[j] for j in row.nonzero()[:, 0].tolist()} for row in near]
    groups = list_groups(found)
    assert float(errors[found.confidence >= 0.9].max()) < 1e-3
    assert {"a", "b"} in holders
    assert sum(number > 0 for number in groups) >= 4
    assert all(set.intersection(*(holders[i] for i, own in enumerate(groups) if own == number)) for number in set(groups) - {0})
