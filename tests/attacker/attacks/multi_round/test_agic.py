"""Tests of AGIC on all rounds of a client: links, joint reconstruction, and defective recordings."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_rounds
from torch import Tensor

from attacker.attacks import AttackSpec, Case, find_unmet
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.linking import Links
from attacker.attacks.matching.names import OPTIMISERS
from attacker.attacks.multi_round.descriptions import Describer
from attacker.attacks.papers.agic import agic
from fedsim.recording import DataSpec, ModelSpec, Observation
from fedsim.recording.codec import encode

LENET = ModelSpec(name="lenet_dlg")
DATA = DataSpec(shape=(1, 8, 8), num_classes=6)
ORDER = ((0, 3), (1, 4), (2, 5), (4, 2), (0, 1), (5, 3))
"""Two epochs of six examples, one label each."""


def make_client(name: str = "c", order: tuple[tuple[int, ...], ...] = ORDER) -> tuple[Case, Tensor]:
    """Return the observations of a client that makes one step in each round, with changing weights.

    By default there are six rounds of two examples.
    """
    x = torch.rand(6, 1, 8, 8, generator=seeded(5))
    rounds = [[(x[list(rows)], torch.tensor(rows))] for rows in order]
    return observe_rounds(rounds, model=LENET, data=DATA, learning_rate=0.01, client=name), x


def list_uses(found, order: tuple[tuple[int, ...], ...] = ORDER) -> list[tuple[int, int]]:
    """Return (round, label) of each slot."""
    return [(slot.round, int(found.y[slot.example])) for slot in found.slots]


def fill_update(observation: Observation, value: float) -> Observation:
    update = {name: torch.full_like(u, value) for name, u in observation.update.items()}
    return replace(observation, payload=encode(update))


@pytest.mark.parametrize("compare", ["features", "images"])
def test_every_example_of_two_epochs_is_linked(compare: str) -> None:
    case, _ = make_client()
    (found,) = agic(steps=3, pre_steps=60, compare=compare)([case], rng=seeded())
    assert len(found.x) == 6
    assert sorted(list_uses(found)) == sorted((number, label) for number, rows in enumerate(ORDER, start=1) for label in rows)
    assert any("pass 2: rounds 4 to 6" in note for note in found.notes)
    assert found.case == case.key


def test_exact_features_need_no_search_for_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels of the bias's gradient are kept if the features explain the gradient; a gradient with an error is searched."""
    searches: list[int] = []

    def search(self: Describer, seen: ObservedGradients, rng: torch.Generator) -> Tensor:
        searches.append(seen.count)
        return torch.zeros(2, dtype=torch.int64)

    monkeypatch.setattr(Describer, "_infer_labels", search)
    case, _ = make_client()
    describer = Describer(agic().matching, "features", 1, "cpu")
    described = describer(case, seeded(), None, None)
    assert [sorted(one.labels.tolist()) for one in described] == [sorted(rows) for rows in ORDER]
    assert not searches
    last = case.observations[-1]
    wrong, head = dict(last.update), list(last.update)[-2]
    wrong[head] = wrong[head] + 0.1 * torch.randn(last.update[head].shape, generator=seeded()) * last.update[head].std()
    describer(Case((replace(last, payload=encode(wrong)),)), seeded(), None, None)
    assert searches == [2]


def test_without_links_every_place_has_its_own_example() -> None:
    case, _ = make_client()
    (found,) = agic(steps=1, compare="none")([case], rng=seeded())
    assert len(found.x) == 12
    assert [slot.example for slot in found.slots] == list(range(12))


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "NaN"), (float("inf"), "infinite"), (0.0, "all zeros")])
def test_unusable_round_is_left_out_with_a_note(value: float, words: str) -> None:
    case, _ = make_client()
    rounds = list(case.observations)
    rounds[1] = fill_update(rounds[1], value)
    (found,) = agic(steps=2)([Case(tuple(rounds))], rng=seeded())
    assert any(note.startswith("round 2: ") and words in note and "left out" in note for note in found.notes)
    assert {slot.round for slot in found.slots} == {1, 3, 4, 5, 6}
    assert bool(found.x.isfinite().all())
    assert found.case == Case(tuple(rounds)).key


def test_client_without_a_usable_round_is_refused() -> None:
    case, _ = make_client()
    nothing = Case(tuple(fill_update(o, float("nan")) for o in case.observations))
    with pytest.raises(ValueError, match="no round can be used: its update contains NaN or infinite values"):
        agic(steps=1)([nothing], rng=seeded())


def test_missing_rounds_and_other_batch_sizes_are_noted() -> None:
    order = ((0, 3), (1, 4), (2, 5), (4, 2, 0), (1,), (5, 3))
    case, _ = make_client(order=order)
    (found,) = agic(steps=2)([Case(case.observations[:1] + case.observations[2:])], rng=seeded())
    all_notes = " ".join(found.notes)
    assert "no usable round of this client between rounds 1 and 3" in all_notes
    assert "3 in round 4" in all_notes
    assert sorted({slot.round for slot in found.slots}) == [1, 3, 4, 5, 6]


def test_clients_with_different_numbers_of_rounds_are_attacked_in_one_call() -> None:
    one, _ = make_client()
    short = Case(make_client("d")[0].observations[:2])
    first, second = agic(steps=1)([one, short], rng=seeded())
    assert (first.case, second.case) == (one.key, short.key)
    assert (len(first.x), len(second.x)) == (6, 4)


def interrupt_at(call: int) -> tuple[Callable[[int, int, str], None], list[int]]:
    """Return a progress callback that raises KeyboardInterrupt once, and the list of iterations that it received."""
    received: list[int] = []

    def progress(done: int, most: int, words: str) -> None:
        received.append(done)
        if len(received) == call:
            raise KeyboardInterrupt

    return progress, received


def test_interrupt_during_the_first_reconstructions_ends_the_attack() -> None:
    progress, received = interrupt_at(23)  # in the third of six rounds
    with pytest.raises(KeyboardInterrupt):
        agic(steps=3, pre_steps=10, compare="images")([make_client()[0]], rng=seeded(), progress=progress)
    assert len(received) == 23


def test_interrupted_joint_search_returns_the_finished_clients() -> None:
    cases = [Case(make_client(name)[0].observations[:rounds]) for name, rounds in (("c", 3), ("d", 2), ("e", 1))]
    progress, received = interrupt_at(15)  # in the second of three groups, of which the one round comes first
    found = agic(steps=10, closed_forms=False)(cases, rng=seeded(), progress=progress)
    assert [(one.case, one.interrupted) for one in found] == [(cases[1].key, True), (cases[2].key, False)]
    assert len(received) == 15


class MemoryStorage:
    """A checkpoint storage that keeps every state."""

    every, look = 0.0, None

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Tensor]] = {}

    def recall(self, key: str) -> dict[str, Tensor] | None:
        return self.kept.get(key)

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        self.kept.pop(drop, None)
        self.kept[key] = {name: tensor.clone() for name, tensor in state.items()}


def test_checkpoints_of_two_clients_do_not_mix() -> None:
    other = tuple(reversed(ORDER))
    cases = [make_client()[0], make_client("d", other)[0]]
    attack = agic(steps=2, pre_steps=5, compare="images")
    for one, alone in zip(attack(cases, rng=seeded(), memory=MemoryStorage()), cases, strict=True):
        (own,) = attack([alone], rng=seeded())
        assert [(s.round, s.example) for s in one.slots] == [(s.round, s.example) for s in own.slots]


def test_attack_interrupted_while_linking_resumes_to_the_same_result() -> None:
    cases, attack, memory = (
        [make_client()[0], make_client("d")[0]],
        agic(steps=3, pre_steps=10, compare="images"),
        MemoryStorage(),
    )
    with pytest.raises(KeyboardInterrupt):
        attack(cases, rng=seeded(), memory=memory, progress=interrupt_at(87)[0])  # in the third round of the second client
    progress, received = interrupt_at(0)
    went_on = attack(cases, rng=seeded(), memory=memory, progress=progress)
    assert len(received) < 50
    for one, whole in zip(went_on, attack(cases, rng=seeded()), strict=True):
        assert torch.equal(one.x, whole.x)
        assert one.slots == whole.slots


def test_known_labels_are_listed_as_an_oracle() -> None:
    case, _ = make_client()
    received = replace(case, known_labels=torch.tensor([label for rows in ORDER for label in rows]))
    (found,) = agic(steps=1)([received], rng=seeded())
    assert found.oracles == ("labels",)
    assert sorted(list_uses(found)) == sorted((number, label) for number, rows in enumerate(ORDER, start=1) for label in rows)


def test_rounds_of_several_clients_are_refused() -> None:
    case, other = make_client()[0], make_client("d")[0]
    mixed = Case((case.observations[0], other.observations[1]))
    assert find_unmet(agic(), mixed) == ["it attacks rounds of one client together"]
    assert find_unmet(agic(), case) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"compare": "guess"}, "argument compare must be one of .*, got 'guess'"),
        ({"local_steps": "many"}, "unknown local_steps 'many'"),
        ({"shape": "cubic"}, "argument shape, .* got 'cubic'"),
        ({"label_rule": "joint"}, "label_rule cannot be 'joint'"),
        ({"order_invariant": 1.0}, "set local_steps=simulated"),
        ({"surrogate": True, "local_steps": "simulated"}, "set local_steps=one_batch"),
        ({"beta": 0.0}, "beta must be positive"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AttackSpec(name="agic", arguments=arguments)


@pytest.mark.parametrize("name", [name for name in OPTIMISERS if name != "adam"])
def test_search_without_adam_stops_after_200_evaluations_without_progress(name: str) -> None:
    search = agic(optimiser=name).matching.search
    assert search.stop.patience * search.optimiser.period == 200


def test_linked_rounds_of_several_local_epochs_keep_their_places() -> None:
    """Each local epoch has separate examples during the search, and the links apply to all of them."""
    case, _ = make_client()
    several = tuple(replace(o, training=replace(o.training, steps=None, epochs=2, batch_size=2)) for o in case.observations)
    links = Links((torch.tensor([0, 1]), torch.tensor([1, 2])), torch.tensor([1.0, 0.5, 1.0]), torch.tensor([0, 3, 4]), (1, 2))
    attack = agic(steps=1, local_steps="simulated", order_invariant=0.1)
    (found,) = attack([Case(several[:2], links=links)], rng=seeded())
    assert found.x.shape == (3, 1, 8, 8)
    assert found.y.tolist() == [0, 3, 4]
    assert [(s.round, s.batch, s.position, s.example) for s in found.slots] == [
        (number, batch, position, example)
        for number, examples in ((1, (0, 1)), (2, (1, 2)))
        for batch in (1, 2)
        for position, example in enumerate(examples)
    ]
