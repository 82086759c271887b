"""Tests of a search's penalty on batch norm statistics, which clients return and which give the moments of their batches."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observations import make_observation
from torch import Tensor, nn
from torch.func import vmap

from attacker.attacks import ATTACKS, Case, inverting_gradients
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.matching_run import MatchingRun
from attacker.attacks.optimisers.stopping import Stop
from attacker.attacks.presets import get_arguments
from attacker.attacks.simulation.batch_statistics import Statistics, compute_statistics, measure_mismatch, read_statistics
from attacker.attacks.simulation.client import build_network
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.training.local import train

DATA = DataSpec(shape=(3, 16, 16), num_classes=4, mean=(0.5,) * 3, std=(0.5,) * 3)
MODEL = ModelSpec(name=f"{__name__}:build_network_with_norms")
SIZE = 3


def build_network_with_norms() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(200, 4)),
    )


@pytest.fixture(autouse=True)
def _admitted() -> None:
    models.admit(MODEL.name)


def draw_batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(4)
    images = [torch.rand(SIZE, *DATA.shape, generator=rng) * (step + 1) / steps for step in range(steps)]
    return [(x, torch.tensor([0, 1, 2])) for x in images]


def observe(batches: list[tuple[Tensor, Tensor]], rate: float = 0.1, **settings: Any) -> Observation:
    chosen: dict[str, Any] = {"mode": "train", "buffers": "shared", **settings}
    training = Training(learning_rate=rate, batch_size=SIZE, steps=len(batches), **chosen)
    network = models.build(MODEL, DATA, seed=1)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    own = {name: b.detach().clone() for name, b in network.named_buffers()}
    before = {name: b + 0.3 if b.is_floating_point() else b for name, b in own.items()}
    trained = train(network, weights, batches, training, DATA, buffers=before)
    facts = {"model": MODEL, "data": DATA, "training": training, "buffers": before, "buffers_after": trained.buffers}
    return make_observation(trained.update, weights, **facts)


def measure_by_hand(observation: Observation, x: Tensor) -> Statistics:
    """Return the moments of the inputs of all batch norm layers, computed by PyTorch's own forward pass in training mode."""
    network = models.build(MODEL, DATA).train()
    network.load_state_dict({**observation.weights, **observation.buffers})
    found: Statistics = {}
    for name, layer in network.named_modules():
        if isinstance(layer, nn.BatchNorm2d):

            def keep(_: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                channels = inputs[0].transpose(0, 1).flatten(1).detach()
                found[name] = {"mean": channels.mean(1), "deviation": channels.std(1)}

            layer.register_forward_pre_hook(keep)
    network((x - 0.5) / 0.5)
    return found


def compute(observation: Observation, x: Tensor, sizes: tuple[int, ...]) -> Statistics:
    model = build_network(observation)
    return compute_statistics(model, DATA, "cross_entropy", observation.weights, {}, x, sizes)


def test_statistics_after_one_step_are_those_of_the_batch() -> None:
    batches = draw_batches(1)
    observation = observe(batches)
    seen, true = read_statistics(observation, build_network(observation)), measure_by_hand(observation, batches[0][0])
    assert seen.keys() == true.keys()
    assert len(seen) == 2
    for name, moments in true.items():
        for moment, value in moments.items():
            torch.testing.assert_close(seen[name][moment], value, rtol=1e-3, atol=1e-4)


def test_statistics_after_several_steps_depend_on_their_order() -> None:
    """The learning rate is so small that only the order of the batches matters: the reverse order does not fit."""
    batches = draw_batches(3)
    observation = observe(batches, rate=1e-9)
    seen, x = read_statistics(observation, build_network(observation)), torch.cat([x for x, _ in batches])
    in_order = measure_mismatch(compute(observation, x, (SIZE,) * 3), seen)
    backwards = measure_mismatch(compute(observation, x.flip(0), (SIZE,) * 3), seen)
    assert float(in_order) < 1e-6 < 1e-3 < float(backwards)


def test_the_mismatch_is_least_at_the_true_batch_and_zero_there() -> None:
    batches = draw_batches(1)
    observation, x = observe(batches), batches[0][0]
    seen = read_statistics(observation, build_network(observation))
    at = {share: float(measure_mismatch(compute(observation, x + share * (0.5 - x), (SIZE,)), seen)) for share in (0.0, 0.3, 1.0)}
    assert at[0.0] < 1e-5
    assert at[0.0] < at[0.3] < at[1.0]


def test_a_mismatch_by_hand() -> None:
    seen = {"a": {"mean": torch.tensor([1.0, 0.0]), "deviation": torch.tensor([2.0, 2.0])}}
    found = {"a": {"mean": torch.tensor([3.0, 0.0]), "deviation": torch.tensor([2.0, 4.0])}}
    assert float(measure_mismatch(found, seen)) == pytest.approx(0.5 + 0.5, rel=1e-4)


def test_statistics_of_several_problems_are_those_of_each() -> None:
    observation = observe(draw_batches(1))
    x = torch.rand(2, SIZE, *DATA.shape, generator=torch.Generator().manual_seed(8))
    model = build_network(observation)

    def measure(x: Tensor) -> Statistics:
        return compute_statistics(model, DATA, "cross_entropy", observation.weights, {}, x, (SIZE,))

    both, each = vmap(measure)(x), [measure(one) for one in x]
    for name, moments in both.items():
        for moment, value in moments.items():
            torch.testing.assert_close(value, torch.stack([one[name][moment] for one in each]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"mode": "eval"}, {"buffers": "local"}])
def test_clients_that_return_no_statistics_give_none(settings: dict[str, Any]) -> None:
    observation = observe(draw_batches(1), **settings)
    if "buffers" in settings:
        observation = replace(observation, buffers_after={})
    assert read_statistics(observation, build_network(observation)) == {}
    assert "statistics" not in CaseBatch(inverting_gradients(batch_norm=1.0), [Case((observation,))]).views[0].rows


def test_the_loss_of_a_search_grows_by_the_weighted_mismatch() -> None:
    """The weight is relative to the loss of a zero gradient, which is 1 for the cosine."""
    batches = draw_batches(1)
    case = Case((observe(batches),))
    x = torch.rand(1, SIZE, *DATA.shape, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([[0, 1, 2]])
    losses = []
    for weight in (0.0, 0.25):
        batch = CaseBatch(inverting_gradients(batch_norm=weight, tv=0.0), [case])
        z = batch.space.encode(list(x), [torch.Generator().manual_seed(0)], "cpu")
        losses.append(batch.evaluate(z, batch.build_problem([0], z, labels)))
    seen = read_statistics(case.observations[0], build_network(case.observations[0]))
    mismatch = measure_mismatch(compute(case.observations[0], x[0], (SIZE,)), seen)
    torch.testing.assert_close(losses[1][1] - losses[0][1], 0.25 * mismatch[None], rtol=1e-4, atol=1e-5)
    assert not torch.equal(losses[0][0], losses[1][0])


def test_the_null_never_reads_returned_statistics() -> None:
    observation = observe(draw_batches(1))
    other = replace(observation, buffers_after={name: 2 * b for name, b in observation.buffers_after.items()})
    null = inverting_gradients(batch_norm=1.0, steps=2).null()
    one, two = (null([Case((seen,))], rng=torch.Generator().manual_seed(3))[0] for seen in (observation, other))
    assert torch.equal(one.x, two.x)


@pytest.mark.parametrize("early", [True, False])
def test_early_tests_for_hopeless_searches_are_left_out_with_returned_statistics(early: bool) -> None:
    """With limits that every search exceeds, only a search without statistics is stopped after the fourth iteration."""
    case = Case((observe(draw_batches(1)),))
    stop = Stop(patience=20, give_up=0.5, hopeless=1e9, early=((4, 0.0),), unexplained=0.0)
    attack = inverting_gradients(steps=20, batch_norm=0.0 if early else 1.0).copy_with(stop=stop)
    (found,) = attack([case], rng=torch.Generator().manual_seed(0))
    assert len(found.loss) == (4 if early else 20)


@pytest.mark.parametrize(("weight", "adam"), [(0.0, 60), (1.0, 100)])
def test_searches_that_compare_statistics_are_not_polished(weight: float, adam: int) -> None:
    case = Case((observe(draw_batches(1)),))
    run = MatchingRun(inverting_gradients(batch_norm=weight, steps=100), [case], torch.Generator().manual_seed(0), None)
    assert run.steps == adam


@pytest.mark.parametrize("name", ["inverting_gradients", "agic"])
def test_by_default_a_search_compares_the_statistics_that_clients_return(name: str) -> None:
    """Statistics that belong to other images change the answer, unless the search is that of the paper."""
    observation = observe(draw_batches(1))
    other = replace(observation, buffers_after={name: 2 * b for name, b in observation.buffers_after.items()})
    for arguments, same in (({}, False), (get_arguments(name, "published", MODEL, DATA), True)):
        attack = ATTACKS[name](**{**arguments, "steps": 2})
        one, two = (attack([Case((seen,))], rng=torch.Generator().manual_seed(3))[0] for seen in (observation, other))
        assert torch.equal(one.x, two.x) == same
