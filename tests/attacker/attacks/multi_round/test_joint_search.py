"""Tests of one search over several rounds of a client: comparison, shared examples, and checkpoints."""

from dataclasses import replace

import pytest
import torch
from failing_storage import FailingStorage
from generators import seeded
from observations import make_image_case, observe_steps
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from attacker.attacks import Case, GradientMatching, cpl
from attacker.attacks.linking import Links
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.initialisation import uniform
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.matching.objectives import squared_distance
from attacker.attacks.optimisers.first_order import Adam
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation

DATA = DataSpec(shape=(1, 8, 8), num_classes=4)
LENET = ModelSpec(name="lenet_dlg")


@pytest.fixture
def examples() -> tuple[Tensor, Tensor]:
    grid = torch.linspace(0, 1, 8)
    x = torch.stack([0.5 + 0.4 * torch.sin(3 * grid[:, None] + i) * torch.cos(2 * grid[None] - i) for i in range(3)])
    return x[:, None], torch.tensor([0, 1, 2])


@pytest.fixture
def two_rounds(examples) -> Case:
    """Return two rounds with batches {0, 1} and {1, 2} at different weights; they share example 1."""
    x, y = examples
    first = observe_steps((x[:2], y[:2]), model=LENET, data=DATA)
    second = replace(observe_steps((x[1:], y[1:]), model=LENET, data=DATA, seed=1), round=4)
    links = Links((torch.tensor([0, 1]), torch.tensor([1, 2])), torch.tensor([1.0, 0.5, 1.0]), y, (1, 2), ("pass 2",))
    return Case((first, second), links=links)


def gradient_at(observation: Observation, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model = models.build(observation.model, observation.data)
    weights = {name: w.clone().requires_grad_() for name, w in observation.weights.items()}
    loss = cross_entropy(functional_call(model, weights, (x,)), y)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), create_graph=True), strict=True))


def observed(observation: Observation) -> dict[str, Tensor]:
    return {name: -u / observation.training.learning_rate for name, u in observation.update.items()}


def evaluate_loss(attack: GradientMatching, case: Case, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    search = CaseBatch(attack, [case])
    rows = {str(o): view.rows for o, view in enumerate(search.views)}
    return search.evaluate(x.flatten()[None], {"labels": y[None], "gain": torch.ones(1), "views": rows})


@pytest.mark.parametrize("robust", [0.0, 0.3])
def test_loss_is_the_weighted_sum_over_rounds(two_rounds: Case, robust: float) -> None:
    """The reference is AGIC's equation 5, with weights 1 and 0.1 for the first and second epoch, computed by autograd."""
    x, y = torch.rand(3, 1, 8, 8, generator=seeded(3)).requires_grad_(), torch.tensor([0, 1, 2])
    slope, loss = evaluate_loss(cpl().copy_with(robust=robust), two_rounds, x.detach(), y)
    expected = torch.zeros(())
    for observation, rows, gamma in zip(two_rounds.observations, ([0, 1], [1, 2]), (1.0, 0.1), strict=True):
        distance = squared_distance(gradient_at(observation, x[rows], y[rows]), observed(observation))
        expected = expected + gamma * (robust * (1 + distance / robust).log() if robust else distance)
    torch.testing.assert_close(loss[0], expected.detach(), rtol=1e-4, atol=1e-4)
    (by_torch,) = torch.autograd.grad(expected, x)
    torch.testing.assert_close(slope[0], by_torch.flatten(), rtol=1e-3, atol=1e-4 * float(by_torch.abs().max()))


def test_true_examples_have_no_loss_with_right_links_only(two_rounds: Case, examples) -> None:
    x, y = examples
    _, right = evaluate_loss(cpl(), two_rounds, x, y)
    wrong_links = Links((torch.tensor([0, 1]), torch.tensor([0, 2])), torch.ones(3), y, (1, 2))
    _, wrong = evaluate_loss(cpl(), replace(two_rounds, links=wrong_links), x, y)
    assert float(right) < 1e-6 < 1e-3 < float(wrong)


def test_shared_example_is_returned_once_with_its_places_in_both_rounds(two_rounds: Case, examples) -> None:
    attack = cpl(init="uniform", steps=40, restarts=4).copy_with(later=1.0)
    (found,) = attack([two_rounds], rng=seeded())
    assert found.x.shape == (3, 1, 8, 8)
    assert torch.equal(found.y, examples[1])
    places = [(slot.round, slot.position, slot.example) for slot in found.slots]
    assert places == [(1, 0, 0), (1, 1, 1), (4, 0, 1), (4, 1, 2)]
    assert found.notes[0] == "pass 2"
    assert found.evidence["linked"] == (1.0, 0.5, 1.0)


def test_batched_cases_of_several_rounds_are_answered_like_single_ones(two_rounds: Case, examples) -> None:
    x, y = examples
    other = tuple(
        replace(observe_steps((x[rows].flip(-1), y[rows]), model=LENET, data=DATA, client="d", seed=seed), round=number)
        for rows, seed, number in (([0, 1], 0, 1), ([1, 2], 1, 4))
    )
    attack = cpl().copy_with(optimiser=Adam(learning_rate=0.05), steps=5)
    cases = [two_rounds, Case(other, links=two_rounds.links)]
    together = attack(cases, rng=seeded())
    for case, one in zip(cases, together, strict=True):
        (alone,) = attack([case], rng=seeded())
        torch.testing.assert_close(one.x, alone.x, rtol=1e-3, atol=1e-3)


def test_more_noisy_rounds_lower_the_error(examples) -> None:
    """With equal noise in each, four rounds give less than half of the squared error of one."""
    x, y = examples
    rounds = tuple(
        replace(
            observe_steps((x[:1], y[:1]), model=LENET, data=DATA, seed=seed, defense="gaussian(0.002)", client="e"),
            round=seed + 1,
        )
        for seed in range(4)
    )
    links = Links(tuple(torch.tensor([0]) for _ in rounds), torch.ones(1), y[:1], (1, 2, 3, 4))
    attack = cpl(init="uniform", optimiser="wolfe", steps=60).copy_with(later=1.0)
    (alone,), (together,) = attack([Case(rounds[:1])], rng=seeded()), attack([Case(rounds, links=links)], rng=seeded())
    assert (together.x - x[:1]).square().mean() < 0.5 * (alone.x - x[:1]).square().mean()


def test_surrogate_weights_lie_between_broadcast_and_returned_ones(examples) -> None:
    """The weights lie at the share sigmoid(z) between both (SME); the reference is computed at the share 0.5."""
    x, y = examples
    batches = ((x[:1], y[:1]), (x[1:2], y[1:2]), (x[2:], y[2:]))
    observation = observe_steps(*batches, model=LENET, data=DATA, learning_rate=0.05)
    run = MatchingRun(cpl().copy_with(surrogate=True), [Case((observation,))], seeded(), None)
    search = run.batch
    (start,) = run._draw_starts(search, [0], [0], y[None], None)
    assert len(start) == 3 * 64 + 1
    z = torch.cat([x.flatten(), torch.zeros(1)])
    half = {name: w + 0.5 * observation.update[name] for name, w in observation.weights.items()}
    gradient = gradient_at(replace(observation, weights=half), x, y)
    found = search.views[0].simulate(search.views[0].get_case(0), x, y, z)
    for name, expected in gradient.items():
        torch.testing.assert_close(found[name], expected.detach(), rtol=1e-4, atol=1e-5)
    slope, _ = search.evaluate(z[None], {"labels": y[None], "gain": torch.ones(1), "views": {"0": search.views[0].rows}})
    assert float(slope[0, -1].abs()) > 0


def test_separate_local_epochs_are_merged_in_the_answer(examples) -> None:
    x, y = examples
    observation = observe_steps((x, y), (x[[2, 0, 1]], y[[2, 0, 1]]), model=LENET, data=DATA, learning_rate=0.05)
    training = replace(observation.training, steps=None, epochs=2)
    observation = replace(observation, num_examples=3, training=training)
    attack = cpl(init="uniform", steps=3).copy_with(local_steps="simulated", order_invariant=0.1)
    search = CaseBatch(attack, [Case((observation,))])
    assert (search.count, search.epochs) == (6, 2)
    truth = torch.cat([x, x[[2, 0, 1]]])
    _, loss = search.evaluate(
        truth.flatten()[None],
        {"labels": torch.cat([y, y[[2, 0, 1]]])[None], "gain": torch.ones(1), "views": {"0": search.views[0].rows}},
    )
    assert float(loss) < 1e-6
    (found,) = attack([Case((observation,))], rng=seeded())
    assert found.x.shape == (3, 1, 8, 8)
    assert [slot.example for slot in found.slots] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="set local_steps=simulated"):
        cpl().copy_with(order_invariant=0.1)


def test_killed_search_resumes_to_the_same_result() -> None:
    """The search is killed in its first start, between two starts, and in its second, which needs the result of the first."""
    cases = [make_image_case(i)[0] for i in range(2)]
    attack = cpl(init="uniform", steps=5, restarts=2).copy_with(stop=replace(cpl().search.stop, stuck=0.0, precision=0.0))
    undisturbed = attack(cases, rng=seeded())
    for calls in (1, 4, 9):
        storage = FailingStorage(calls)
        with pytest.raises(RuntimeError, match="killed"):
            attack(cases, rng=seeded(), memory=storage)
        storage.calls = 10**6
        for one, expected in zip(attack(cases, rng=seeded(), memory=storage), undisturbed, strict=True):
            assert torch.equal(one.x, expected.x)
            assert torch.equal(one.loss, expected.loss)
            assert (one.iterations, one.restarts, one.evaluations) == (10, 2, expected.evaluations)


def test_labels_of_linked_examples_come_from_links_or_the_oracle(two_rounds: Case) -> None:
    links = two_rounds.links
    assert links is not None
    relabelled = replace(two_rounds, links=replace(links, labels=torch.tensor([3, 3, 1])))
    (found,) = cpl(init="uniform").copy_with(optimiser=Adam(), steps=1)([relabelled], rng=seeded())
    assert found.y.tolist() == [3, 3, 1]
    oracle = replace(relabelled, known_labels=torch.tensor([2, 0, 0, 1]))
    (found,) = cpl(init=uniform.__name__).copy_with(optimiser=Adam(), steps=1)([oracle], rng=seeded())
    assert (found.y.tolist(), found.oracles) == ([2, 0, 1], ("labels",))
