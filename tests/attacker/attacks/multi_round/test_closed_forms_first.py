"""Tests of closed forms before a search over several rounds: rounds that they solve are not searched."""

from dataclasses import replace

import pytest
import torch
from failing_storage import FailingStorage
from generators import seeded
from observations import observe_rounds
from reconstructions import make_reconstruction
from torch import Tensor

from attacker.attacks import Case, accumulate, exact
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.linking import Links
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.warm_starts import HeldExamples
from attacker.attacks.multi_round.agic import Agic
from attacker.attacks.multi_round.certified_examples import MAX_FAILURES, certify_rounds
from attacker.attacks.multi_round.merging import merge
from attacker.attacks.papers.agic import agic
from attacker.reconstruction import Reconstruction, Slot
from fedsim.recording import DataSpec, ModelSpec

LENET = ModelSpec(name="lenet_dlg")
DATA = DataSpec(shape=(1, 8, 8), num_classes=6)
SINGLES = ((0,), (1,), (2,), (1,), (0,))
MIXED = ((0,), (1,), (1, 0), (2, 3), (4, 1))
"""Rounds 1 and 2 are solved by closed forms, round 3 has their examples, and 4 and 5 have unknown ones (and 5 a known one)."""


def make_images() -> Tensor:
    return torch.rand(6, 1, 8, 8, generator=seeded(5))


def make_client(order: tuple[tuple[int, ...], ...], defense: str = "", rate: float = 0.01) -> Case:
    """Return the rounds of a client: one step on the examples `order[t]` in each, with changing weights."""
    x = make_images()
    rounds = [[(x[list(rows)], torch.tensor(rows))] for rows in order]
    return observe_rounds(rounds, model=LENET, data=DATA, learning_rate=rate, defense=defense)


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """List with one entry for each evaluation of a search's loss: the rounds that the search uses."""
    rounds, evaluate = [], CaseBatch.evaluate

    def count(self: CaseBatch, *args, **named):
        rounds.append([observation.round for observation in self.cases[0].observations])
        return evaluate(self, *args, **named)

    monkeypatch.setattr(CaseBatch, "evaluate", count)
    return rounds


def list_uses(found: Reconstruction) -> list[tuple[int, int]]:
    """Return (round, label) of every slot."""
    return sorted((slot.round, int(found.y[slot.example])) for slot in found.slots)


@pytest.mark.parametrize("attack", [agic(), accumulate(compare="features"), agic(compare="none"), agic(compare="images")])
def test_client_of_single_images_is_solved_by_closed_forms_without_a_search(searched, attack: Agic) -> None:
    case = make_client(SINGLES)
    (found,) = attack([case], rng=seeded())
    assert (searched, found.iterations, found.case, found.attack) == ([], 0, case.key, attack.name)
    assert list_uses(found) == [(number, label) for number, (label,) in enumerate(SINGLES, start=1)]
    assert len(found.x) == 3  # examples of several rounds are merged
    best: dict[int, float] = {}
    for slot, observation in zip(found.slots, case.observations, strict=True):
        (own,) = exact(fallback="none")([Case((observation,))], rng=seeded())
        torch.testing.assert_close(found.x[slot.example], own.x[0], atol=1e-4, rtol=0)
        best[slot.example] = max(float(own.confidence[0]), best.get(slot.example, 0.0))
        assert found.route == own.route
    assert found.confidence.tolist() == pytest.approx([best[example] for example in range(3)])
    assert float((found.x - make_images()[found.y]).abs().max()) < 1e-4
    assert any("3 examples in 5 rounds" in note for note in found.notes)


def test_client_that_always_uses_one_image_gets_one_example(searched) -> None:
    (found,) = accumulate()([make_client(((3,),) * 4)], rng=seeded())
    assert (searched, len(found.x), found.y.tolist()) == ([], 1, [3])
    assert [(slot.round, slot.example) for slot in found.slots] == [(1, 0), (2, 0), (3, 0), (4, 0)]


def test_round_that_known_examples_explain_is_not_searched(searched, monkeypatch) -> None:
    """Closed forms are limited to round 1. `accumulate` assumes the same examples in all rounds, but round 3 has another."""
    certify = ClosedForm.certify
    monkeypatch.setattr(
        ClosedForm,
        "certify",
        lambda self, case, *, rng: certify(self, case, rng=rng) if case.observations[0].round == 1 else None,
    )
    (found,) = accumulate(steps=1)([make_client(((3,), (3,), (5,)))], rng=seeded())
    assert {tuple(rounds) for rounds in searched} == {(3,)}
    assert list_uses(found)[:2] == [(1, 3), (2, 3)]
    assert found.slots[0].example == found.slots[1].example != found.slots[2].example


def test_only_rounds_with_unknown_examples_are_searched(searched) -> None:
    case = make_client(MIXED)
    attack = agic(steps=5, optimiser="wolfe", distance="euclidean", beta=1.0, relu_modifier=False)
    (found,) = attack([case], rng=seeded())
    assert {tuple(rounds) for rounds in searched} == {(4, 5)}
    assert found.iterations > 0
    assert list_uses(found) == sorted((number, label) for number, rows in enumerate(MIXED, start=1) for label in rows)
    assert len(found.x) == 5
    known = {label: int((found.y == label).nonzero()) for label in (0, 1)}
    for label, row in known.items():
        assert float((found.x[row] - make_images()[label]).abs().max()) < 1e-4
        assert float(found.confidence[row]) > 0.9
    others = [row for row in range(5) if row not in known.values()]
    assert not bool((found.confidence[others] > 0.9).any())
    assert all(len(values) == 5 for values in found.evidence.values())
    assert found.route == "layers; optimisation"
    assert not any("no usable round" in note for note in found.notes)


def test_known_examples_of_a_round_lower_the_error_of_its_others() -> None:
    case = make_client(((1,), (4, 1)))
    settings = {"steps": 40, "optimiser": "wolfe", "distance": "euclidean", "beta": 1.0, "relu_modifier": False, "tv": 0.0}
    errors = []
    for first in (True, False):
        rounds = case if first else Case(case.observations[1:])
        (found,) = agic(**settings, closed_forms=first)([rounds], rng=seeded())
        errors.append(min(float((x - make_images()[4]).square().mean()) for x in found.x))
    assert errors[0] < 0.5 * errors[1]


def test_held_examples_enter_the_loss_and_have_no_slope() -> None:
    case, x, y = make_client(((2, 3),)), make_images()[[2, 3]], torch.tensor([2, 3])
    held = HeldExamples(x * torch.tensor([1.0, 0.0])[:, None, None, None], torch.tensor([True, False]))
    attack = replace(agic(tv=0.0, optimiser="wolfe", distance="euclidean").matching, held={case.key: held})
    batch = CaseBatch(attack, [case])
    wrong = torch.cat([torch.rand(1, 1, 8, 8, generator=seeded()), x[1:]]).flatten()[None]
    slope, loss = batch.evaluate(wrong, batch.build_problem([0], wrong, y[None]))
    _, free = (free_batch := CaseBatch(replace(attack, held={}), [case])).evaluate(
        wrong, free_batch.build_problem([0], wrong, y[None])
    )
    assert float(loss[0]) < 1e-6 * float(free[0])
    errors = torch.rand(2, 1, 8, 8, generator=seeded(1)).flatten()[None]
    slope, _ = batch.evaluate(errors, batch.build_problem([0], errors, y[None]))
    assert not bool(slope[0, :64].any())
    assert bool(slope[0, 64:].any())
    assert torch.equal(batch.decode_answer(0, errors[0], y)[0][0], x[0])


def test_with_noise_the_answer_is_that_without_closed_forms() -> None:
    case = make_client(SINGLES[:3], defense="gaussian(0.001)")
    settings = {"steps": 3, "optimiser": "wolfe", "distance": "euclidean"}
    (found,), (plain,) = (agic(**settings, closed_forms=first)([case], rng=seeded()) for first in (True, False))
    assert torch.equal(found.x, plain.x)
    assert (found.slots, found.notes, found.route) == (plain.slots, plain.notes, plain.route)
    assert not bool((found.confidence > 0.9).any())


@pytest.mark.parametrize("knows_defense", [True, False])
def test_no_round_is_certified_with_noise(knows_defense: bool) -> None:
    for defense in ("gaussian(0.001)", "gaussian(0.00001)"):
        assert certify_rounds(make_client(SINGLES, defense=defense), seeded(), knows_defense, "cpu") is None


def test_closed_forms_stop_after_failures_at_a_batch_size(monkeypatch) -> None:
    tried, certify = [], ClosedForm.certify

    def count(self, case, *, rng):
        tried.append(case.observations[0].round)
        return certify(self, case, rng=rng)

    monkeypatch.setattr(ClosedForm, "certify", count)
    order = ((0, 1),) * (MAX_FAILURES + 2) + ((2,),)
    known = certify_rounds(make_client(order), seeded(), True, "cpu")
    assert tried == [*range(1, MAX_FAILURES + 1), len(order)]
    assert list(known.routes) == [len(order)]


def test_null_and_given_links_use_no_closed_form(monkeypatch) -> None:
    def fail(self, case, *, rng):
        raise AssertionError("a closed form was tried")

    monkeypatch.setattr(ClosedForm, "certify", fail)
    case = make_client(SINGLES[:2])
    (null,) = agic(steps=1).null()([case], rng=seeded())
    assert null.route == "prior alone"
    given_links = Links((torch.tensor([0]), torch.tensor([1])), torch.ones(2), torch.tensor([0, 1]))
    agic(steps=1)([replace(case, links=given_links)], rng=seeded())
    agic(steps=1, closed_forms=False)([case], rng=seeded())
    with pytest.raises(AssertionError, match="closed form"):
        agic(steps=1)([case], rng=seeded())


def test_a_simulated_residual_keeps_all_rounds(searched) -> None:
    case = make_client(((1,),) * 3, defense="top_k(0.5, error_feedback=True)")
    accumulate(steps=1)([case], rng=seeded())
    assert {tuple(rounds) for rounds in searched} == {(1, 2, 3)}


def test_killed_attack_resumes_to_the_same_result() -> None:
    case, attack, storage = make_client(MIXED), agic(steps=6), FailingStorage(3)
    (whole,) = attack([case], rng=seeded())
    with pytest.raises(RuntimeError, match="killed"):
        attack([case], rng=seeded(), memory=storage)
    storage.calls = 10**6
    (resumed,) = attack([case], rng=seeded(), memory=storage)
    assert torch.equal(resumed.x, whole.x)
    assert torch.equal(resumed.loss, whole.loss)
    assert (resumed.slots, resumed.evaluations) == (whole.slots, whole.evaluations)


def test_search_begun_without_closed_forms_resumes_without_them() -> None:
    case, storage = make_client(MIXED), FailingStorage(2)
    (whole,) = agic(steps=6, closed_forms=False)([case], rng=seeded())
    with pytest.raises(RuntimeError, match="killed"):
        agic(steps=6, closed_forms=False)([case], rng=seeded(), memory=storage)
    storage.calls = 10**6
    (resumed,) = agic(steps=6)([case], rng=seeded(), memory=storage)
    assert torch.equal(resumed.x, whole.x)


def test_known_examples_are_merged_with_candidates_only() -> None:
    """The first two examples nearly agree but are known to differ; the third is a search's result for the first."""
    x = torch.zeros(4, 1, 8, 8)
    x[1], x[2], x[3] = 0.02, 0.001, 1.0
    slots = tuple(Slot(number, "c", 1, 0, number - 1) for number in range(1, 5))
    y, confidence = torch.tensor([0, 0, 0, 1]), torch.tensor([0.99, 0.99, 0.1, 0.1])
    found = make_reconstruction("c", x, y, confidence=confidence, slots=slots)
    missed = dict.fromkeys(range(1, 5), 0.5)
    assert len(merge(found, missed).x) == 2
    kept = merge(found, missed, different=2)
    assert [slot.example for slot in kept.slots] == [0, 1, 0, 2]
    assert torch.equal(kept.x, x[[0, 1, 3]])
