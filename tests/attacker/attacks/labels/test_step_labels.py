"""Tests of labels and orders that are inferred from the update of several local steps (`labels.step_labels`)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from generators import seeded
from ordered_clients import draw_images, observe_batches

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels import step_labels
from attacker.attacks.labels.observed import read_labels, read_order
from attacker.attacks.labels.rules import infer_from_bias, infer_labels
from attacker.attacks.labels.step_labels import StepLabels, can_infer_order, infer_step_order
from attacker.attacks.simulation.client import build_network
from attacker.attacks.simulation.step_orders import StepOrder
from fedsim.recording.observation import Observation

LABELS = torch.tensor([2, 0, 3, 1])
ORDER = ((0, 3), (2, 1))
"""Examples of each step: labels 2 and 1 in the first, 3 and 0 in the second."""


def view(observation: Observation) -> ObservedGradients:
    return ObservedGradients([observation], model=build_network(observation), device="cpu")


def list_labels(order: StepOrder, sizes: Sequence[int]) -> list[list[int]]:
    """Return the sorted labels of each step."""
    parts = torch.tensor(order.examples).split(list(sizes))
    return [sorted(order.labels[i] for i in part.tolist()) for part in parts]


@pytest.mark.parametrize("order", [ORDER, ((2, 1), (0, 3)), ((0, 1), (2, 3))])
@pytest.mark.parametrize("settings", [{"rate": 0.3}, {"rate": 3.0}, {"rate": 3.0, "momentum": 0.9}])
def test_labels_of_each_step_are_inferred(order: tuple[tuple[int, ...], ...], settings: dict[str, object]) -> None:
    seen = view(observe_batches(draw_images(4), LABELS, order, **settings))
    found = read_order(infer_labels, seen, 0, seen.model, seeded())
    assert list_labels(found.order, (2, 2)) == [sorted(LABELS[list(step)].tolist()) for step in order]
    assert found.effect > 0.1
    assert read_labels(infer_labels, seen, 0, seen.model, seeded()).tolist() == [0, 1, 2, 3]


def test_one_gradient_shows_too_little() -> None:
    """The label rule alone, at the mean of the weights, is wrong about the updates of the test above."""
    seen = view(observe_batches(draw_images(4), LABELS, ORDER, rate=3.0))
    assert read_labels(infer_from_bias, seen, 0, seen.model, seeded()).tolist() != [0, 1, 2, 3]


def test_known_labels_are_kept() -> None:
    """Wrong labels explain the update worse than the true ones, and neither is changed."""
    seen, costs = view(observe_batches(draw_images(4), LABELS, ORDER, rate=0.3)), []
    for labels in (LABELS, torch.tensor([2, 2, 3, 1])):
        problem = StepLabels(seen, 0, seeded())
        best = problem.search(StepOrder((0, 1, 2, 3), tuple(labels.tolist())), known=True)
        assert sorted(best.order.labels) == sorted(labels.tolist())
        costs.append(best.cost)
    assert costs[0] < 0.1 * costs[1]


def test_simulated_head_follows_the_trained_head() -> None:
    """With features that do not change, the simulated update is that of the head in the network, trained by torch.optim.SGD."""
    seen = view(observe_batches(draw_images(4), LABELS, ORDER, rate=0.5))
    problem, order = StepLabels(seen, 0, seeded()), StepOrder((0, 3, 2, 1), tuple(LABELS.tolist()))
    training = problem.simulate_network(order)
    z, used = problem.z, torch.tensor(order.examples)
    head = torch.nn.Linear(training.weight.shape[1], len(training.weight), dtype=torch.double)
    with torch.no_grad():
        head.weight.copy_(training.weight)
        head.bias.copy_(seen.get_state(0)["weights"][problem.names[1]])
    start = [p.detach().clone() for p in head.parameters()]
    optimiser = torch.optim.SGD(head.parameters(), lr=0.5)
    for s, rows in enumerate(used.split(2)):
        features = training.means[s] + z[rows] @ training.directions
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(head(features), LABELS[rows]).backward()
        optimiser.step()
    weight, bias = [(before - after.detach()) / 1.0 for before, after in zip(start, head.parameters(), strict=True)]
    simulated = problem._simulate_head(z, used, LABELS, training)
    assert torch.allclose(simulated[:, :-1] * training.scale, weight, rtol=1e-6, atol=1e-9)
    assert torch.allclose(simulated[:, -1], bias, rtol=1e-6, atol=1e-9)


def test_effect_grows_with_the_square_of_the_learning_rate() -> None:
    effects = []
    for rate in (1e-4, 2e-4):
        seen = view(observe_batches(draw_images(4), LABELS, ORDER, rate=rate))
        effects.append(StepLabels(seen, 0, seeded()).measure_effect(StepOrder((0, 3, 2, 1), tuple(LABELS.tolist()))))
    assert effects[1] == pytest.approx(4 * effects[0], rel=0.1)


@pytest.mark.parametrize(
    "settings",
    [{"optimiser": "adam"}, {"clip_norm": 1.0}, {"batch_size": 4}, {"frozen": ("*",)}, {"epochs": 11, "batch_size": 4}],
)
def test_order_is_not_inferred_from_updates_that_are_not_simulated(settings: dict[str, object]) -> None:
    observation = observe_batches(draw_images(4), LABELS, ORDER)
    changed = replace(observation, training=replace(observation.training, **settings))
    assert can_infer_order(view(observation))
    assert not can_infer_order(view(changed))
    assert infer_step_order(view(changed), 0, LABELS, seeded(), known=True) is None


def test_order_is_not_inferred_behind_a_defense() -> None:
    assert not can_infer_order(view(observe_batches(draw_images(4), LABELS, ORDER, defense="top_k(0.5)")))


def test_unexplained_update_has_no_order() -> None:
    observation = observe_batches(draw_images(4), LABELS, ORDER, rate=3.0)
    noise = seeded(1)
    update = {name: u.std() * torch.randn(u.shape, generator=noise) for name, u in observation.update.items()}
    seen = view(observation)
    seen.gradients = {name: u[None] for name, u in update.items()}
    assert infer_step_order(seen, 0, LABELS, seeded(), known=False) is None


@pytest.mark.parametrize("known", [False, True])
def test_search_computes_no_more_than_its_limit(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With wrong labels to begin with, the search goes on to the limit; only the first fit is always made."""
    seen, costs = view(observe_batches(draw_images(4), LABELS, ORDER, rate=3.0)), []
    for limit in (0.0, 3e5, step_labels.MAX_ALL_CELLS):
        monkeypatch.setattr(step_labels, "MAX_ALL_CELLS", limit)
        problem = StepLabels(seen, 0, seeded())
        costs.append(problem.search(StepOrder((0, 1, 2, 3), (2, 2, 2, 2)), known=known).cost)
        unknown = problem.z.numel()
        first = step_labels.FIT_STEPS * unknown * (4 * (10 + 1) + unknown)
        assert problem.cells <= max(limit, first)
    assert costs[0] > costs[1] >= costs[2]
