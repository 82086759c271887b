"""Tests of certainty: mixtures of examples must not be certain, and examples must stay so."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_rounds
from torch import Tensor

from attacker.attacks import Case, spans
from attacker.attacks.multi_round.spans.certainty import find_eight_bit, judge_clearance, measure_union, shows_example
from attacker.attacks.multi_round.spans.intersections import RecoveredExamples
from attacker.attacks.multi_round.spans.layer_updates import LayerUpdates, join_parameters, read_rows
from attacker.attacks.multi_round.spans.row_space import RowSpace, compute_row_space, intersect
from attacker.attacks.networks.input_layer import InputLayer
from fedsim.recording import DataSpec, ModelSpec

IMAGES = DataSpec(shape=(1, 8, 8), num_classes=4)
LAYER = InputLayer("1.weight", "1.bias")


def record(x: Tensor, order: list[list[int]], data: DataSpec, *, hidden: int, seed: int = 0) -> Case:
    """Return the rounds of a client that takes one step on each batch of `order`; labels are random."""
    y = torch.randint(data.num_classes, (len(x),), generator=seeded(seed + 1))
    model = ModelSpec(name="mlp", arguments={"hidden": [hidden]})
    rounds = [[(x[rows], y[rows])] for rows in order]
    return observe_rounds(rounds, model=model, data=data, seed=seed, learning_rate=0.05)


def shuffle(examples: int, batch: int, epochs: int = 2) -> list[list[int]]:
    rng = seeded(4)
    return [rows.tolist() for _ in range(epochs) for rows in torch.randperm(examples, generator=rng).split(batch)]


def count_certain(case: Case, x: Tensor) -> tuple[int, int]:
    """Return the number of certain answers, and how many of them are no example."""
    try:
        (found,) = spans()([case], rng=seeded())
    except ValueError:
        return 0, 0
    sure = found.x[found.confidence > 0.9]
    errors = (sure.flatten(1)[:, None] - x.flatten(1)[None]).abs().amax(dim=2).amin(dim=1) if len(sure) else torch.zeros(0)
    return len(sure), int((errors > 5e-3).sum())


@pytest.fixture(scope="module")
def batch() -> tuple[RowSpace, Tensor, Tensor]:
    """Return the row space of a batch of six images, the [W, b] that was sent, and the vectors [x, 1]."""
    x = torch.rand(6, *IMAGES.shape, generator=seeded(2))
    (observation,) = record(x, [list(range(6))], IMAGES, hidden=96).observations
    space = compute_row_space(*read_rows(observation, LAYER), 6, seeded())
    vectors = torch.cat([x.flatten(1), torch.ones(6, 1)], dim=1).double()
    return space, join_parameters(observation.weights, LAYER), vectors


def test_rows_of_neurons_that_an_example_turns_off_lack_it_and_a_mixture_does_not(batch: tuple[RowSpace, Tensor, Tensor]) -> None:
    space, forward, vectors = batch
    assert space.complete
    assert not space.saturated
    assert all(shows_example(space, forward, vector) is True for vector in vectors)
    mixtures = [(vectors[i] + share * vectors[j]) for i in range(6) for j in range(i) for share in (0.3, 1.0, -0.4)]
    assert all(shows_example(space, forward, mixture) is False for mixture in mixtures)
    assert all(shows_example(space, -forward, vector) is False for vector in vectors)


def test_few_rows_and_spaces_that_lack_examples_tell_nothing(batch: tuple[RowSpace, Tensor, Tensor]) -> None:
    space, forward, vectors = batch
    few = replace(space, coordinates=space.coordinates[:12], noise=space.noise[:12])
    assert shows_example(few, forward[:12], vectors[0]) is None
    assert shows_example(replace(space, complete=False), forward, vectors[0]) is None


def test_two_spaces_larger_than_their_surroundings_intersect_in_the_rest() -> None:
    rng = seeded()
    first, second = (1e6 * torch.randn(rank, 7, generator=rng, dtype=torch.float64) for rank in (4, 6))
    common = intersect(first, second).y
    assert len(common) == 3
    for space in (first, second):
        basis = torch.linalg.qr(space.T).Q
        assert float((common - common @ basis @ basis.T).norm(dim=1).max()) < 1e-6 * float(common.norm(dim=1).min())


def test_room_is_the_dimension_of_all_spaces_together() -> None:
    y = 1e6 * torch.eye(9, dtype=torch.float64)
    spaces = [RowSpace(y[rows], torch.zeros(4, len(rows)), torch.ones(4), 1.0, saturated=False) for rows in ([0, 1], [1, 2, 3])]
    assert measure_union(spaces) == 4
    assert measure_union([replace(space, saturated=True) for space in spaces]) == 0


@pytest.mark.parametrize(("batch_size", "hidden"), [(4, 128), (8, 128), (8, 32)])
def test_tables_with_fewer_dimensions_than_two_batches_have_no_certain_mixture(batch_size: int, hidden: int) -> None:
    """Four one-hot groups and a number have seven dimensions; two batches of four or more rows intersect by chance."""
    rng = seeded(6)
    groups = [torch.nn.functional.one_hot(torch.randint(size, (64,), generator=rng), size).float() for size in (2, 2, 2, 3)]
    x = torch.cat([*groups, torch.randint(101, (64, 1), generator=rng) / 100], dim=1)
    case = record(x, shuffle(64, batch_size), DataSpec(shape=(10,), num_classes=4), hidden=hidden)
    assert count_certain(case, x)[1] == 0


def test_tables_with_enough_dimensions_stay_certain() -> None:
    x = torch.randint(5, (32, 30), generator=seeded(6)) / 4
    case = record(x, shuffle(32, 4), DataSpec(shape=(30,), num_classes=4), hidden=128)
    assert count_certain(case, x) == (32, 0)


@pytest.mark.parametrize("hidden", [16, 24])
@pytest.mark.parametrize("stored", [True, False])
def test_layers_with_few_neurons_have_no_certain_mixture(hidden: int, stored: bool) -> None:
    """A layer with few neurons that are on has fewer rows than examples; such row spaces intersect in mixtures."""
    x = torch.rand(32, 3, 8, 8, generator=seeded(7))
    x = (x * 255).round() / 255 if stored else x
    case = record(x, shuffle(32, 8, 3), DataSpec(shape=(3, 8, 8), num_classes=10), hidden=hidden)
    assert count_certain(case, x)[1] == 0


def test_answer_off_the_grid_of_other_images_is_undecided() -> None:
    stored = torch.randint(256, (2, 64), generator=seeded(8)).double() / 255
    x = torch.cat([stored, (stored[:1] + stored[1:]) / 2 + 1e-3])
    vectors = 1e7 * torch.cat([x, torch.ones(3, 1)], dim=1)
    found = RecoveredExamples(vectors, torch.full((3,), 1e5, dtype=torch.float64), ((), (), ()))
    assert find_eight_bit(found, IMAGES).tolist() == [True, True, False]
    assert judge_clearance(found, LayerUpdates([], {}, IMAGES)).clearance.tolist() == [torch.inf, torch.inf, 0.0]


def test_equal_sums_of_near_duplicates_are_undecided() -> None:
    """For images and copies that are brighter by a constant, x + copy of z = copy of x + z: batches intersect in a mixture."""
    x = 0.9 * torch.rand(12, *IMAGES.shape, generator=seeded(9))
    x = torch.cat([x, x + 0.05])
    case = record(x, [[0, 13, 2, 3], [12, 1, 4, 5], [2, 6, 7, 8], [4, 9, 10, 11]], IMAGES, hidden=96)
    (alone,) = spans(relu=False)([case], rng=seeded())
    mixture = (x[0] + x[13]) / 2
    errors = (alone.x - mixture).abs().flatten(1).amax(dim=1)
    assert float(errors.min()) < 1e-3  # the attack does find it
    assert not float(alone.confidence[errors.argmin()]) > 0.9
    assert count_certain(case, x)[1] == 0
