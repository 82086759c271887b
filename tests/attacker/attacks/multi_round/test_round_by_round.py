"""Tests of joint searches that search each round alone first (`multi_round.round_by_round`)."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from generators import seeded
from ordered_clients import check_progress, check_resumption, draw_images, measure_error, observe_batches

from attacker.attacks import Case, agic
from attacker.attacks.linking import Links
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.matching.polishing import OrderSearch, PolishStart
from attacker.attacks.matching.saved_state import BestResult
from attacker.attacks.matching.warm_starts import HeldExamples
from attacker.attacks.multi_round import round_by_round
from attacker.attacks.multi_round.round_by_round import has_unknown_orders, search_round_by_round
from attacker.attacks.multi_round.usable_rounds import link_same

pytestmark = pytest.mark.usefixtures("orders_inferred_once")
X, Y = draw_images(4), torch.tensor([2, 0, 3, 1])
STEPS = 600
ATTACK = agic(steps=STEPS, beta=1.0)


def make_case(*rounds: tuple[tuple[int, ...], ...], **settings: object) -> Case:
    """Return a case of one client whose rounds have these batches, each round with other weights."""
    seen = [observe_batches(X, Y, order, seed=number, **settings) for number, order in enumerate(rounds)]
    return Case(tuple(replace(one, round=number + 1) for number, one in enumerate(seen)))


ROUNDS = ((0, 3), (2, 1)), ((2, 3), (1, 0)), ((3, 1), (0, 2))


def test_rounds_together_are_better_than_each_alone() -> None:
    case = make_case(*ROUNDS[:2], rate=3.0)
    (found,) = ATTACK([case], rng=seeded())
    alone = ATTACK.matching([Case((one,)) for one in case.observations], rng=seeded())
    assert found.x.shape == X.shape
    assert sorted(found.y.tolist()) == [0, 1, 2, 3]
    assert measure_error(found, X) < 0.5 * min(measure_error(one, X) for one in alone)
    assert found.evaluations <= STEPS
    assert {slot.round for slot in found.slots} == {1, 2}
    assert found.notes[-1].endswith("the answer explains all 2 rounds together")


def test_examples_with_equal_labels_keep_their_places_in_all_rounds() -> None:
    """Labels alone do not tell which of two examples with equal labels was in which step of a round, the other rounds do."""
    labels, orders = torch.tensor([2, 0, 2, 1]), (((0, 3), (2, 1)), ((2, 3), (0, 1)))
    seen = [observe_batches(X, labels, order, seed=k, rate=3.0) for k, order in enumerate(orders)]
    case = Case(tuple(replace(one, round=k + 1) for k, one in enumerate(seen)), links=link_same([4, 4]))
    run = MatchingRun(ATTACK.matching, [case], seeded(), None)
    run.search()
    start = PolishStart(0, run.batch.space.encode([X], [seeded()], run.attack.device)[0], labels)
    found = OrderSearch(run, start).run(0.0, 1.0)
    for order, expected in zip(found.orders, orders, strict=True):
        assert [set(order.examples[:2]), set(order.examples[2:])] == [set(batch) for batch in expected]


def test_answer_is_that_of_the_best_round_if_the_others_hold_other_examples() -> None:
    """The second round is of other images and labels: the two rounds together explain neither."""
    first = make_case(ROUNDS[0], rate=3.0).observations[0]
    others = observe_batches(1 - X.flip(-1), (Y + 1) % 4, ROUNDS[1], rate=3.0, seed=1)
    case = Case((first, replace(others, round=2)), links=link_same([4, 4]))
    (found,) = search_round_by_round(ATTACK.matching.copy_with(steps=900), [case], rng=seeded())
    error = min(measure_error(found, X), measure_error(found, 1 - X.flip(-1)))
    assert error < 0.01
    assert found.evidence["misfit"][0] < -4
    assert re.match("the answer explains round [12] alone", found.notes[-1])


def test_rounds_are_halved_by_their_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four rounds, the better two are polished, then the better of these, each by the iterations of two whole polishes."""
    distances, polished = [0.4, 0.1, 0.3, 0.2, 0.1, 0.9, 0.8, 0.7], []
    run = SimpleNamespace(cases=[object()] * 8, best=[BestResult() for _ in distances])

    def record(_: object, starts: list[PolishStart], *, times: float, stage: int, stages: int) -> None:
        polished.append(([start.case for start in starts], times * len(starts) / 2))
        assert (stage, stages) == (len(polished) - 1, 2)
        distances[3] = 0.05  # the polish makes this round better than round 1

    starts = [PolishStart(i, torch.zeros(1), torch.zeros(1)) for i in range(8)]
    monkeypatch.setattr(round_by_round, "find_starts", lambda _: starts)
    monkeypatch.setattr(round_by_round, "measure_start", lambda _, start: distances[start.case])
    monkeypatch.setattr(round_by_round, "polish_starts", record)
    assert round_by_round._polish_by_halves(run, 4) == [3, 4]
    assert polished == [([1, 3, 4, 7], 2.0), ([3, 4], 2.0)]
    monkeypatch.setattr(round_by_round, "_measure_distance", lambda _, i: -i)
    polished, starts = [], starts[:4]  # no round of the second case can be polished
    assert round_by_round._polish_by_halves(run, 4) == [3, 7]


def test_known_labels_are_kept() -> None:
    case = make_case(*ROUNDS[:2])
    known = replace(case, known_labels=torch.cat([Y, Y]), links=link_same([4, 4]))
    (found,) = search_round_by_round(ATTACK.matching, [known], rng=seeded())
    assert found.y.tolist() == Y.tolist()
    assert measure_error(found, X) < 0.01


def test_rounds_are_searched_one_by_one_only_where_orders_are_unknown() -> None:
    several, one_batch = make_case(*ROUNDS), make_case(((0, 1, 2, 3),), ((0, 1, 2, 3),))
    linked = replace(several, links=link_same([4, 4, 4]))
    matching = ATTACK.matching
    assert has_unknown_orders(matching, linked)
    assert not has_unknown_orders(matching.null(), linked)
    assert not has_unknown_orders(replace(matching, polish=None), linked)
    assert not has_unknown_orders(matching.copy_with(local_steps="one_batch"), linked)
    held = {linked.key: HeldExamples(X, torch.ones(4, dtype=torch.bool))}
    assert not has_unknown_orders(replace(matching, held=held), linked)
    assert not has_unknown_orders(matching, several)
    assert not has_unknown_orders(matching, replace(one_batch, links=link_same([4, 4])))
    assert not has_unknown_orders(matching, Case(several.observations[:1], links=link_same([4])))
    for third in (torch.arange(1, 5), torch.tensor([1, 0, 2, 3])):
        links = Links((torch.arange(4), torch.arange(4), third), torch.ones(1 + int(third.max())))
        assert not has_unknown_orders(matching, replace(several, links=links))


def test_rounds_of_several_steps_are_linked_by_their_numbers_of_examples() -> None:
    """Without features of the last layer, whole epochs on equally many examples are taken to be on the same ones."""
    case, attack = make_case(*ROUNDS), agic(steps=20, polish=0.0, pre_steps=2)
    case = replace(case, known_labels=Y.repeat(3))
    (found,) = attack([case], rng=seeded())
    assert len(found.x) == 4
    assert any("assumed to hold the same examples" in note for note in found.notes)
    shorter = replace(case.observations[2], num_examples=3)
    others = Case((*case.observations[:2], shorter), known_labels=torch.cat([Y, Y, Y[:3]]))
    (mixed,) = attack([others], rng=seeded())
    assert not any("assumed to hold the same examples" in note for note in mixed.notes)


def test_progress_of_both_parts_has_one_total() -> None:
    told: list[tuple[int, int, str]] = []
    agic(steps=200, beta=1.0, closed_forms=False)([make_case(*ROUNDS[:2])], rng=seeded(), progress=lambda *now: told.append(now))
    check_progress(told)


@pytest.mark.parametrize(("part", "steps"), [("joint 0/alone/restart 0", 100), ("joint 0/together/polish ", 400)])
def test_killed_search_resumes_to_bitwise_equal_images(part: str, steps: int) -> None:
    case, attack = make_case(*ROUNDS[:2]), agic(steps=steps, beta=1.0, closed_forms=False)
    check_resumption(attack, case, part)
