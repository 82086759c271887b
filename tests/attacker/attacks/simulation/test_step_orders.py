"""Tests of the search for the order in which a client used its examples (`simulation.step_orders`)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from checkpoint_memory import DictMemory
from generators import seeded
from observations import observe_steps
from ordered_clients import DATA, check_progress, check_resumption, draw_images, measure_error, observe_batches

from attacker.attacks import Case, inverting_gradients
from attacker.attacks.confidence import INFERRED_ORDER, estimates
from attacker.attacks.labels import observed
from attacker.attacks.linking import Links
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.matching.polishing import MIN_STEP_EFFECT, OrderSearch, PolishStart, polish
from attacker.attacks.simulation.client import count_ordered_steps
from attacker.attacks.simulation.step_orders import Fit, StepOrder, list_neighbours, search_order
from fedsim.recording import DataSpec, ModelSpec, Observation
from fedsim.recording.codec import encode

STEPS = 900


def list_batches(order: StepOrder, sizes: Sequence[int]) -> list[set[int]]:
    """Return the examples of each step."""
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return [set(order.examples[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def test_neighbours_differ_by_one_exchange_within_an_epoch() -> None:
    """Two epochs of batches of two examples and of one: two exchanges in each epoch, and no steps of equal size."""
    found = list_neighbours(StepOrder((0, 1, 2, 2, 1, 0), (0, 0, 1)), (2, 1, 2, 1))
    assert {order.examples for order in found} == {(2, 1, 0, 2, 1, 0), (0, 2, 1, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 0, 1)}
    assert {order.labels for order in found} == {(0, 0, 1)}


def test_steps_of_equal_size_change_places_as_a_whole_and_labels_one_by_one() -> None:
    order = StepOrder((0, 1, 2, 3), (0, 1, 1, 2))
    assert StepOrder((2, 3, 0, 1), order.labels) in list_neighbours(order, (2, 2))
    relabelled = [one for one in list_neighbours(order, (2, 2), classes=range(3)) if one.labels != order.labels]
    assert len(relabelled) == 4 * 2
    assert all(one.examples == order.examples for one in relabelled)
    assert all(sum(a != b for a, b in zip(one.labels, order.labels, strict=True)) == 1 for one in relabelled)


@pytest.mark.parametrize("planted", list(permutations(range(4)))[::5])
def test_search_finds_the_order_at_which_the_distance_is_zero(planted: tuple[int, ...]) -> None:
    """The fixed examples mislead: their smallest distance is at another order, and only fits show the planted one."""
    sizes, misleading = (2, 2), list_batches(StepOrder((0, 2, 1, 3), ()), (2, 2))
    aim = list_batches(StepOrder(planted, ()), sizes)
    fitted: list[StepOrder] = []

    def measure(orders: Sequence[StepOrder]) -> list[float]:
        return [float(len(list_batches(order, sizes)[0] - misleading[0])) for order in orders]

    def fit(orders: Sequence[StepOrder]) -> list[Fit]:
        fitted.extend(orders)
        return [Fit(float(len(list_batches(order, sizes)[0] - aim[0])), torch.zeros(1)) for order in orders]

    found, best = search_order(StepOrder((0, 1, 2, 3), (0, 1, 2, 3)), sizes, measure, fit, fits=20)
    assert list_batches(found, sizes) == aim
    assert best.distance == 0
    assert len(fitted) == len({tuple(map(tuple, map(sorted, list_batches(order, sizes)))) for order in fitted}) <= 6
    nearest, none = search_order(StepOrder((0, 1, 2, 3), (0, 1, 2, 3)), sizes, measure, fit, fits=0)
    assert (list_batches(nearest, sizes), none) == (misleading, None)


def test_orders_that_exchange_equal_labels_are_fitted_once_in_one_epoch() -> None:
    fitted: list[StepOrder] = []

    def fit(orders: Sequence[StepOrder]) -> list[Fit]:
        fitted.extend(orders)
        return [Fit(1.0, torch.zeros(1)) for _ in orders]

    start = StepOrder((0, 1, 2, 3), (5, 6, 6, 6))
    search_order(start, (2, 2), lambda orders: [1.0] * len(orders), fit, fits=20)
    assert len(fitted) == 2  # label 5 in the first batch, or in the second
    fitted.clear()
    search_order(start, (2, 2), lambda orders: [1.0] * len(orders), fit, fits=20, alone=False)
    assert len(fitted) == 6  # examples that are also in other updates are no longer interchangeable


@pytest.mark.parametrize(
    ("orders", "settings"),
    [
        (((0, 3), (2, 1)), {"rate": 3.0}),
        (((0, 3), (2, 1)), {"rate": 3.0, "momentum": 0.9}),
        (((3, 1), (0, 2), (2, 1), (3, 0)), {}),
        (((0, 1, 3), (2,)), {"defense": "top_k(0.5)"}),
    ],
)
@pytest.mark.usefixtures("orders_inferred_once")
def test_images_of_several_batches_are_recovered_with_their_order(
    orders: tuple[tuple[int, ...], ...], settings: dict[str, object]
) -> None:
    x, y = draw_images(4), torch.tensor([2, 0, 3, 1])
    case = Case((observe_batches(x, y, orders, **settings),))
    steps = STEPS * len(orders) // 2
    (found,) = inverting_gradients(steps=steps)([case], rng=seeded())
    assert found.evaluations <= steps
    assert sorted(found.y.tolist()) == [0, 1, 2, 3]
    assert measure_error(found, x) < 0.01
    assert found.evidence["misfit"][0] < -4


@pytest.mark.usefixtures("orders_inferred_once")
@pytest.mark.parametrize("inferred", [False, True])
def test_probabilities_from_10_to_90_percent_are_undecided_in_a_fixed_order_alone(
    monkeypatch: pytest.MonkeyPatch, inferred: bool
) -> None:
    case = Case((observe_batches(draw_images(4), torch.tensor([2, 0, 3, 1]), ((0, 3), (2, 1))),))
    attack = inverting_gradients(steps=STEPS, local_steps="auto" if inferred else "simulated", give_up=0.0)
    run = MatchingRun(attack, [case], seeded(), None)
    run.search()
    polish(run)
    for probability, decided in ((0.05, True), (0.15, False), (0.3, False), (0.95, True)):
        routes = list[str]()

        def judge(
            route: str,
            found: Any,
            explained: torch.Tensor,
            data: DataSpec,
            probability: float = probability,
            routes: list[str] = routes,
        ) -> estimates.ConfidenceEstimates:
            routes.append(route)
            return estimates.ConfidenceEstimates(torch.full_like(explained, probability), explained, found)

        monkeypatch.setattr(estimates, "judge", judge)
        (found,) = run.build_answers()
        assert routes == [found.route] == [INFERRED_ORDER if inferred else "optimisation"]
        noted = any("an assumed order" in note for note in found.notes)
        assert noted != (inferred or decided)
        assert bool(found.confidence.isnan().all()) == noted or probability >= 0.5


@pytest.mark.usefixtures("orders_inferred_once")
@pytest.mark.parametrize("contrast", [0.2, 1.0])
def test_images_of_one_colour_are_never_likely_in_an_inferred_order(monkeypatch: pytest.MonkeyPatch, contrast: float) -> None:
    x = draw_images(4)
    x[0] = 0.5 + contrast * (x[0] - 0.5)
    case = Case((observe_batches(x, torch.tensor([2, 0, 3, 1]), ((0, 3), (2, 1))),))

    def judge(route: str, found: Any, explained: torch.Tensor, data: DataSpec) -> estimates.ConfidenceEstimates:
        return estimates.ConfidenceEstimates(torch.full_like(explained, 0.95), explained, found)

    monkeypatch.setattr(estimates, "judge", judge)
    (found,) = inverting_gradients(steps=STEPS)([case], rng=seeded())
    assert measure_error(found, x) < 0.01
    smooth = int(found.y.tolist().index(2))
    undecided = [smooth] if contrast < 1 else []
    assert found.confidence.isnan().nonzero().flatten().tolist() == undecided
    assert any("of one colour" in note for note in found.notes) == bool(undecided)


def test_steps_that_are_taken_for_one_explain_less() -> None:
    x, y = draw_images(4), torch.tensor([2, 0, 3, 1])
    case = Case((observe_batches(x, y, ((0, 3), (2, 1))),))
    (found,) = inverting_gradients(steps=STEPS, local_steps="one_batch", give_up=0.0)([case], rng=seeded())
    assert measure_error(found, x) > 0.1
    assert found.evidence["misfit"][0] > -1


@pytest.mark.usefixtures("orders_inferred_once")
def test_orders_of_several_rounds_are_found_with_the_images() -> None:
    """The joint search over two rounds of a client, each with an order of its own, and positions that links give."""
    x, y, again = draw_images(4), torch.tensor([2, 0, 3, 1]), torch.tensor([3, 1, 0, 2])
    first = observe_batches(x, y, ((0, 3), (2, 1)))
    second = observe_batches(x[again], y[again], ((1, 3), (0, 2)), seed=1)
    links = Links((torch.arange(4), again), torch.ones(4), labels=y)
    case = Case((first, replace(second, round=2)), links=links)
    (found,) = inverting_gradients(steps=STEPS)([case], rng=seeded())
    assert measure_error(found, x) < 0.01
    assert found.evidence["misfit"][0] < -4


def test_null_of_ordered_steps_does_not_read_the_update() -> None:
    y, found = torch.tensor([2, 0, 3, 1]), []
    for seed in (1, 2):
        case = Case((observe_batches(torch.rand(4, *DATA.shape, generator=seeded(seed)), y, ((0, 3), (2, 1))),))
        found += inverting_gradients(steps=100).null()([case], rng=seeded())
    assert torch.equal(found[0].x, found[1].x)
    assert [one.evaluations for one in found] == [100, 100]


@pytest.mark.usefixtures("orders_inferred_once")
def test_progress_covers_the_search_for_orders() -> None:
    x, y = draw_images(4), torch.tensor([2, 0, 3, 1])
    cases = [Case((observe_batches(x, y, ((0, 3), (2, 1)), client=name),)) for name in "ab"]
    seen: list[tuple[int, int, str]] = []
    inverting_gradients(steps=300)(cases, rng=seeded(), progress=lambda *told: seen.append(told))
    check_progress(seen)
    assert any("order of examples" in text for _, _, text in seen)


@pytest.mark.usefixtures("orders_inferred_once")
def test_order_is_not_searched_for_where_steps_hardly_matter() -> None:
    x, y, effects = draw_images(4), torch.tensor([2, 0, 3, 1]), []
    for rate in (1e-3, 2e-3, 3.0):
        case, told = Case((observe_batches(x, y, ((0, 3), (2, 1)), rate=rate),)), list[str]()
        run = MatchingRun(inverting_gradients(steps=300), [case], seeded(), lambda *now, told=told: told.append(now[2]))
        run.search()
        effects.append(OrderSearch(run, PolishStart(0, *run.best[0].get_latent())).measure_effect())
        polish(run)
        assert any("order of examples" in text for text in told) == (rate == 3.0)
        assert run.best[0].evaluations <= 300
    assert effects[1] == pytest.approx(4 * effects[0], rel=0.1)
    assert effects[1] < MIN_STEP_EFFECT < effects[2]


def test_killed_search_for_orders_resumes_to_bitwise_equal_images() -> None:
    x, y = draw_images(4), torch.tensor([2, 0, 3, 1])
    case, attack = Case((observe_batches(x, y, ((0, 3), (2, 1))),)), inverting_gradients(steps=300)
    check_resumption(attack, case, "polish ")


@pytest.mark.parametrize(
    ("examples", "batch_size", "epochs", "steps"),
    [(4, 2, 1, 2), (5, 2, 2, 6), (4, 4, 3, 1), (4, 8, 1, 1), (32, 8, 1, 4), (33, 11, 1, 1), (20, 2, 1, 10), (22, 2, 1, 1)],
)
def test_order_is_searched_for_where_few_examples_are_in_few_steps(
    examples: int, batch_size: int, epochs: int, steps: int
) -> None:
    seen = observe_steps((draw_images(2), torch.tensor([0, 1])), model=ModelSpec(name="lenet_dlg"), data=DATA)
    training = replace(seen.training, steps=None, epochs=epochs, batch_size=batch_size)
    assert count_ordered_steps(training, examples) == steps


@pytest.mark.parametrize(
    ("settings", "defense", "fits"),
    [
        ({}, "", 22),
        ({}, "top_k(0.5)", 22),
        ({}, "sign()", 0),
        ({}, "gaussian(1e-3)", 0),
        ({"surrogate": True}, "", 0),
        ({"local_steps": "one_batch"}, "", 0),
        ({"polish": 0.0}, "", 0),
    ],
)
@pytest.mark.usefixtures("orders_inferred_once")
def test_orders_are_searched_for_only_before_a_polish(settings: dict[str, Any], defense: str, fits: int) -> None:
    x, y = draw_images(4), torch.tensor([2, 0, 3, 1])
    case = Case((observe_batches(x, y, ((0, 3), (2, 1)), defense=defense),))
    run = MatchingRun(inverting_gradients(steps=3000, **settings), [case], seeded(), None)
    assert run.fits == fits
    polishing = 30 if fits else run.polishing
    ordered = run.orders[0] is not None
    assert ordered == (fits > 0 and not defense)
    assert run.steps == (3000 - polishing * 20 * (2 if fits else 1) - fits * 40) // (2 if ordered else 1)


def test_measured_evaluation_infers_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forecast of an audit would otherwise take longer than the attack."""

    def refuse(*args: object, **settings: object) -> None:
        raise AssertionError("an order was searched for")

    case = Case((observe_batches(draw_images(4), torch.tensor([2, 0, 3, 1]), ((0, 3), (2, 1))),))
    monkeypatch.setattr(observed, "infer_step_order", refuse)
    for attack in (inverting_gradients(steps=STEPS), inverting_gradients(steps=STEPS).null()):
        assert attack.time_evaluation(case) > 0
    with pytest.raises(AssertionError, match="searched for"):
        inverting_gradients(steps=STEPS)([case], rng=seeded())


def spoil(observation: Observation) -> Observation:
    """Return an observation whose update is noise, so that no order of examples explains it."""
    noise = seeded(1)
    update = {name: u.std() * torch.randn(u.shape, generator=noise) for name, u in observation.update.items()}
    return replace(observation, payload=encode(update))


def test_order_of_a_client_does_not_depend_on_the_others_of_its_chunk() -> None:
    y = torch.tensor([2, 0, 3, 1])
    good = Case((observe_batches(draw_images(4), y, ((0, 3), (2, 1)), rate=3.0, client="good"),))
    bad = Case((spoil(observe_batches(draw_images(4), y, ((0, 3), (2, 1)), rate=3.0, client="bad")),))
    attack, told = inverting_gradients(steps=STEPS), list[tuple[int, int, str]]()
    alone = {case.key: attack([case], rng=seeded())[0] for case in (good, bad)}
    assert measure_error(alone[good.key], draw_images(4)) < 0.01
    found = attack([bad, good], rng=seeded(), progress=lambda *words: told.append(words))
    check_progress(told)
    for one in found:
        assert one.evaluations == alone[one.case].evaluations
        assert torch.equal(one.y, alone[one.case].y)
    assert float((found[1].x - alone[good.key].x).square().mean()) < 1e-5
    memory = DictMemory("restart 0 in order")
    with pytest.raises(SystemExit):
        attack([bad, good], rng=seeded(), memory=memory)
    resumed = attack([bad, good], rng=seeded(), memory=replace(memory, until=""))
    assert all(torch.equal(one.x, other.x) for one, other in zip(found, resumed, strict=True))
