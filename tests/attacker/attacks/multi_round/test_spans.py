"""Tests of the attack `spans`: row spaces of updates, their intersections, and examples recovered from a client's rounds."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_rounds
from torch import Tensor, nn

from attacker.attacks import AttackSpec, Case, Need, find_unmet, spans
from attacker.attacks.cases import UNNAMED_CLIENT
from attacker.attacks.multi_round.spans import intersections
from attacker.attacks.multi_round.spans.client_groups import group_rounds, group_updates
from attacker.attacks.multi_round.spans.intersections import find_holders, merge_equal, recover
from attacker.attacks.multi_round.spans.layer_updates import (
    LayerUpdates,
    compute_decayed_share,
    convert_to_examples,
    explain_unlinear,
    read_rows,
)
from attacker.attacks.multi_round.spans.row_space import (
    Intersection,
    RowSpace,
    compute_row_space,
    compute_threshold,
    count_all_shared,
    intersect,
)
from attacker.attacks.networks.input_layer import InputLayer, find_input_layer
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training
from fedsim.recording.codec import encode

DATA = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.4,), std=(0.3,))
MLP = ModelSpec(name="mlp", arguments={"hidden": [64]})
LAYER = InputLayer("1.weight", "1.bias")
TWO_EPOCHS = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8))
"""Two epochs of nine examples; batches of different epochs share exactly one example."""


def make_client(
    order: tuple[tuple[int, ...], ...],
    examples: int = 9,
    model: ModelSpec = MLP,
    defense: str = "",
    data: DataSpec = DATA,
    **training: object,
) -> tuple[Case, Tensor, Tensor]:
    """Return the rounds of a client that trains on each batch of `order` in turn, and its examples and labels."""
    x = torch.rand(examples, *data.shape, generator=seeded(5))
    y = torch.arange(examples) % data.num_classes
    rounds = []
    for rows in map(list, order):
        parts = torch.arange(len(rows)).split(int(training.get("batch_size", len(rows))))
        rounds.append([(x[rows][part], y[rows][part]) for part in parts])
    case = observe_rounds(rounds, model=model, data=data, defense=defense, seed=1, **{"steps": 1, **training})
    return case, x, y


def find_spaces(case: Case) -> list[RowSpace]:
    found = []
    for observation in case.observations:
        rows, noise = read_rows(observation, LAYER)
        found.append(compute_row_space(rows, noise, observation.num_examples, seeded()))
    return found


def measure_errors(found: Tensor, x: Tensor) -> Tensor:
    """Return the largest difference of each true example to the nearest one that was found."""
    return (found[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2).amin(dim=0)


def test_shared_examples_of_all_pairs_of_rounds_are_counted() -> None:
    order = ((0, 1, 2), (3, 4, 5), (0, 1, 3), (2, 4, 6, 7), (8,))
    spaces = find_spaces(make_client(order)[0])
    expected = torch.tensor([[len(set(one) & set(other)) for other in order] for one in order])
    assert torch.equal(count_all_shared(spaces, seeded()), expected)


def test_intersection_of_two_planes_is_their_common_line() -> None:
    one = 1e3 * torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]], dtype=torch.float64)
    other = 1e3 * torch.tensor([[1.0, 1.0, 0, 0], [0, 0, 1.0, 0]], dtype=torch.float64)
    both = intersect(one, other)
    assert len(both.y) == 1
    direction = both.y[0] / both.y[0, 0]
    assert torch.allclose(direction, torch.tensor([1.0, 1.0, 0, 0], dtype=torch.float64), atol=1e-9)
    tilted = other + torch.tensor([[0, 0, 0, 100.0], [0, 0, 0, 0]], dtype=torch.float64)
    assert len(intersect(one, tilted).y) == 0  # 100 standard deviations off
    near = other + torch.tensor([[0, 0, 0, 2.0], [0, 0, 0, 0]], dtype=torch.float64)
    assert len(intersect(one, near).y) == 1  # within the noise


def test_every_example_is_exact_and_found_in_its_rounds() -> None:
    case, x, y = make_client(TWO_EPOCHS)
    (found,) = spans(relu=False)([case], rng=seeded())
    assert len(found.x) == 9
    assert float(measure_errors(found.x, x).max()) < 1e-4
    own = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2).argmin(dim=1).tolist()
    assert found.y.tolist() == y[own].tolist()
    for example, original in enumerate(own):
        rounds = {number for number, rows in enumerate(TWO_EPOCHS, start=1) if original in rows}
        assert {slot.round for slot in found.slots if slot.example == example} == rounds
    assert len({(slot.round, slot.batch, slot.position) for slot in found.slots}) == 18
    assert bool((found.confidence > 0.9).all())


def test_negated_bias_removes_overlaps_and_one_negated_row_does_not() -> None:
    """The rows of an update with a negated bias span [x, -1] instead of [x, 1]. A single negated row counts as noise."""
    case, *_ = make_client(TWO_EPOCHS[:4])
    last = case.observations[-1]

    def count_after(flip: Tensor) -> list[int]:
        update = {**last.update, "1.bias": last.update["1.bias"] * flip}
        changed = Case((*case.observations[:-1], replace(last, payload=encode(update))))
        shared: list[int] = count_all_shared(find_spaces(changed), seeded())[3, :3].tolist()
        return shared

    nothing, one = torch.ones(64), torch.ones(64)
    one[last.update["1.bias"].abs().argmax()] = -1
    assert count_after(nothing) == [1, 1, 1]
    assert count_after(one) == [1, 1, 1]
    assert count_after(-nothing) == [0, 0, 0]


def test_three_batches_separate_what_two_share() -> None:
    order = ((0, 1, 2), (0, 1, 3), (0, 4, 5), (1, 6, 7))
    case, *_ = make_client(order)
    spaces = find_spaces(case)
    shared = count_all_shared(spaces, seeded())
    assert shared[0, 1] == 2
    found = recover(LayerUpdates(spaces, {}, DATA), shared)
    assert sorted(found.holders) == [(0, 1, 2), (0, 1, 3)]
    two = recover(LayerUpdates(spaces[:2], {}, DATA), shared[:2, :2])
    assert len(two.vectors) == 0


def test_zeros_of_relu_give_the_other_examples_of_a_batch() -> None:
    order = ((0, 1, 2, 3), (0, 1, 4, 5), (2, 6, 7, 8))
    case, x, _ = make_client(order)
    (alone,) = spans(relu=False, components=False)([case], rng=seeded())
    (more,) = spans()([case], rng=seeded())
    assert len(alone.x) == 1
    assert len(more.x) == 9
    assert float(measure_errors(more.x, x).max()) < 1e-3


@pytest.mark.parametrize(("model", "classes"), [(MLP, 2), (ModelSpec(name="mlp", arguments={"hidden": [64, 2]}), 4)])
def test_no_mixture_is_recovered_where_the_errors_of_all_examples_are_multiples_of_each_other(
    model: ModelSpec, classes: int
) -> None:
    """Neurons that are on for the same examples have parallel rows behind two logits, or behind two neurons."""
    order = ((0, 1, 2, 3), (0, 1, 4, 5), (2, 6, 7, 8))
    case, x, _ = make_client(order, model=model, data=replace(DATA, num_classes=classes))
    (found,) = spans(components=False)([case], rng=seeded())
    errors = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2).amin(dim=1)
    assert float(errors.max()) < 1e-3


def test_several_local_steps_with_momentum_and_weight_decay_span_the_examples_used() -> None:
    settings = {"batch_size": 2, "steps": 2, "momentum": 0.9, "weight_decay": 0.05}
    order = ((0, 1, 2, 3), (4, 5, 6, 7), (0, 4, 8, 1), (2, 5, 3, 6))
    case, *_ = make_client(order, **settings)
    expected = torch.tensor([[len(set(one) & set(other)) for other in order] for one in order])
    assert torch.equal(count_all_shared(find_spaces(case), seeded()), expected)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"schedule": (1.0, 0.5)}])
def test_decayed_share_agrees_with_torchs_optimiser(settings: dict[str, object]) -> None:
    training = Training(learning_rate=0.1, batch_size=1, steps=3, weight_decay=0.2, **settings)
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    facts = {"momentum": training.momentum, "nesterov": training.nesterov}
    optimiser = torch.optim.SGD([weight], lr=0.1, weight_decay=0.2, **facts)
    for step in range(3):
        optimiser.param_groups[0]["lr"] = training.compute_rate(step)
        weight.grad = torch.zeros_like(weight)
        optimiser.step()
    assert compute_decayed_share(training, 3) == pytest.approx(1 - weight.item(), abs=1e-12)


def test_little_noise_keeps_the_count_and_its_error_is_estimated() -> None:
    """With little noise all nine examples are found, and the estimated error is within a factor of 10 of the true one."""
    case, x, _ = make_client(TWO_EPOCHS, defense="gaussian(snr_db=60)")
    (found,) = spans(relu=False, components=False)([case], rng=seeded())
    errors = measure_errors(found.x, x)
    assert len(found.x) == 9
    estimated = torch.tensor(found.evidence["error"]) * DATA.std[0]
    assert 0.1 < float(errors.mean() / estimated.mean()) < 10


def test_strong_noise_gives_no_answer() -> None:
    case, *_ = make_client(TWO_EPOCHS, defense="gaussian(snr_db=0)")
    with pytest.raises(ValueError, match="no example could be recovered from the updates"):
        spans()([case], rng=seeded())


def test_vectors_that_agree_within_noise_are_merged() -> None:
    vectors = 1e4 * torch.tensor([[1.0, 2.0, 1.0], [1.0, 2.0, 1.0001], [2.0, 1.0, 1.0]], dtype=torch.float64)
    kept, clearance = merge_equal(vectors, torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64))
    assert len(kept) == 2
    assert sorted(clearance.tolist()) == [2.0, 3.0]


def test_more_examples_than_neurons_are_refused() -> None:
    narrow = ModelSpec(name="mlp", arguments={"hidden": [4]})
    order = (tuple(range(6)), (0, 6, 7, 8, 1, 2))
    case, *_ = make_client(order, model=narrow)
    assert all(space.saturated for space in find_spaces(case))
    with pytest.raises(ValueError, match="too many examples for the layer to separate"):
        spans()([case], rng=seeded())


def test_input_layer_is_a_linear_first_layer() -> None:
    assert find_input_layer(MLP, DATA) == LAYER
    assert find_input_layer(ModelSpec(name="lenet_dlg"), DATA) is None
    case, *_ = make_client(((0, 1),))
    convolutional = replace(case.observations[0], model=ModelSpec(name="lenet_dlg"))
    assert Need.INPUT_LAYER.value in find_unmet(spans(), Case((convolutional,)))


def test_updates_that_are_no_sums_of_gradients_are_refused() -> None:
    training = Training(learning_rate=0.1, batch_size=1, steps=1, optimiser="adam")
    assert "adam" in explain_unlinear(training, LAYER)
    frozen = Training(learning_rate=0.1, batch_size=1, steps=1, frozen=("1.*",))
    assert "frozen" in explain_unlinear(frozen, LAYER)


def test_the_null_is_grey_and_has_one_example_per_place() -> None:
    case, *_ = make_client(TWO_EPOCHS)
    (null,) = AttackSpec(name="spans", null=True).build()([case], rng=seeded())
    assert null.x.shape == (18, *DATA.shape)
    assert float((null.x - 0.5).abs().max()) == 0
    assert null.route == "prior alone"


@pytest.mark.parametrize("shift", [0.0, 2e-5, 1e-4, 1e-3])
def test_row_space_contains_a_vector_if_it_adds_no_singular_value_above_the_noise(shift: float) -> None:
    """The closed form for the smallest singular value agrees with that of the stacked matrix."""
    rng = seeded(7)
    lengths = torch.tensor([1e6, 3e4, 2e3, 60.0], dtype=torch.float64)
    y = lengths[:, None] * torch.linalg.qr(torch.randn(30, 4, generator=rng, dtype=torch.float64)).Q.T
    space = RowSpace(y, torch.ones(9, 4, dtype=torch.float64), torch.ones(9, dtype=torch.float64), 2.0, saturated=False)
    vectors = torch.randn(20, 4, generator=rng, dtype=torch.float64) * torch.logspace(-3, 0, 20, dtype=torch.float64)[:, None] @ y
    vectors = vectors + shift * vectors.norm(dim=1, keepdim=True) * torch.randn(20, 30, generator=rng, dtype=torch.float64)
    expected = [float(torch.linalg.svdvals(torch.cat([y, v[None]]))[-1]) <= compute_threshold(30) for v in vectors]
    assert [bool(own) for own in find_holders(vectors, [space])] == expected


def test_vectors_well_above_the_noise_outside_of_a_row_space_are_not_in_it() -> None:
    y = 1e4 * torch.eye(2, 30, dtype=torch.float64)
    space = RowSpace(y, torch.ones(9, 2, dtype=torch.float64), torch.ones(9, dtype=torch.float64), 2.0, saturated=False)
    outside = y[:1] + 2 * compute_threshold(30) * torch.eye(30, dtype=torch.float64)[5]
    assert find_holders(torch.cat([y[:1], outside]), [space]) == ((0,), ())


def test_cost_of_recovery_grows_with_the_number_of_pairs_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row spaces are intersected once per pair of rounds that share examples, and further only where some are not known yet."""
    order = [rows for seed in range(12) for rows in torch.randperm(12, generator=seeded(seed)).split(3)]
    case, x, _ = make_client(tuple(tuple(rows.tolist()) for rows in order), examples=12)
    spaces, calls, intersect_once = find_spaces(case), [0], intersections.intersect

    def count_calls(first: Tensor, second: Tensor) -> Intersection:
        calls[0] += 1
        return intersect_once(first, second)

    shared = count_all_shared(spaces, seeded())
    monkeypatch.setattr(intersections, "intersect", count_calls)
    found = recover(LayerUpdates(spaces, {}, DATA), shared)
    assert measure_errors(convert_to_examples(found.vectors, DATA), x).max() < 1e-4
    assert calls[0] <= int((shared.triu(1) > 0).sum())


def make_unnamed() -> tuple[Case, list[int], Tensor]:
    """Return the updates of four clients without names in a random order, the client of each, and all examples.

    Three clients train for two epochs. The fourth uses every example once, so that nothing connects its two updates.
    """
    owned = []
    for client in range(3):
        case, x, _ = make_client(tuple(tuple(9 * client + i for i in rows) for rows in TWO_EPOCHS), examples=36)
        owned += [(client, one) for one in case.observations]
    case, _, _ = make_client(((27, 28, 29), (30, 31, 32)), examples=36)
    owned += [(3 + one.round, one) for one in case.observations]
    owned = [owned[i] for i in torch.randperm(len(owned), generator=seeded()).tolist()]
    owned.sort(key=lambda pair: pair[1].round)
    hidden = tuple(replace(one, client=UNNAMED_CLIENT, cohort=()) for _, one in owned)
    return Case(hidden), [client for client, _ in owned], x[:33]


def test_updates_without_names_are_grouped_by_their_examples() -> None:
    case, owner, _ = make_unnamed()
    spaces, rounds = find_spaces(case), [one.round for one in case.observations]
    groups = group_updates(spaces, count_all_shared(spaces, seeded()), rounds)
    assert [len(group) for group in groups] == [6, 6, 6, 1, 1]
    assert all(len({owner[i] for i in group}) == 1 for group in groups)
    assert all([rounds[i] for i in group] == [1, 2, 3, 4, 5, 6] for group in groups[:3])


def test_examples_of_updates_without_names_are_exact_and_in_groups_of_one_client() -> None:
    case, _, x = make_unnamed()
    attack = spans(relu=False, components=False, anonymous=True)
    assert not find_unmet(attack, case)
    (found,) = attack([case], rng=seeded())
    assert len(found.x) == 27
    assert float(measure_errors(found.x, x[:27]).max()) < 1e-4
    own = (found.x[:, None].flatten(2) - x[None].flatten(2)).abs().amax(dim=2).argmin(dim=1)
    pairs = set(zip((own // 9).tolist(), found.evidence["group"], strict=True))
    assert len(pairs) == 3
    assert {group for _, group in pairs} == {1.0, 2.0, 3.0}
    assert {slot.client for slot in found.slots} == {"group-1", "group-2", "group-3"}
    assert len({(slot.round, slot.client, slot.position) for slot in found.slots}) == len(found.slots) == 54


def test_names_are_refused_where_they_must_be_hidden_and_the_reverse() -> None:
    case, _, _ = make_unnamed()
    named, *_ = make_client(TWO_EPOCHS)
    assert find_unmet(spans(anonymous=True), named) == [Need.UNNAMED.value]
    assert find_unmet(spans(anonymous=True).null(), case) == []


def test_two_updates_of_one_round_are_not_of_one_client() -> None:
    shared = torch.tensor([[3, 2, 0], [2, 3, 1], [0, 1, 3]])
    assert group_rounds(shared, [1, 2, 1]) == [[0, 1], [2]]
    assert group_rounds(shared, [1, 2, 3]) == [[0, 1, 2]]


def test_random_inputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, _ = make_client(TWO_EPOCHS, mode="train")
    monkeypatch.setattr(
        "attacker.attacks.multi_round.spans.layer_updates.is_input_random", lambda spec, data, layer: layer == "1"
    )
    with pytest.raises(ValueError, match="random numbers before layer 1, such as dropout"):
        spans()([case], rng=seeded())


class Shared(nn.Module):
    """A residual network of which two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two, self.head = nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.flatten(1)))
        return self.head(h + torch.tanh(self.two(torch.tanh(self.one(h)))))


def test_networks_with_a_weight_that_layers_share_are_attacked() -> None:
    """Apps that record themselves send a shared weight under each of its names."""
    models.admit(f"{__name__}:Shared", "shared-for-spans")
    case, x, _ = make_client(TWO_EPOCHS, model=ModelSpec(name="shared-for-spans"))
    both = tuple(
        replace(seen, weights={**seen.weights, "two.weight": seen.weights["one.weight"].clone()}) for seen in case.observations
    )
    (found,) = spans(relu=False)([Case(both)], rng=seeded())
    assert float(measure_errors(found.x, x).max()) < 1e-4
