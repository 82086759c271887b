"""Tests of simulated gradients for attackers who know a client's training and defense, and for those who ignore them."""

from typing import Any

import pytest
import torch
from generators import seed_default
from observations import make_observation
from torch import Tensor
from torch.func import vmap

from attacker.attacks import Case, cpl, inverting_gradients
from attacker.attacks.simulation.client import (
    build_channel,
    build_facts,
    build_network,
    compute_shares,
    compute_total_step,
    convert_to_gradient,
    find_omitted,
    simulate_channel,
)
from attacker.attacks.simulation.gradients import build_gradient
from defenses import DefenseSpec
from defenses.gradients import GradientSpec
from defenses.networks import Bottleneck
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.training.local import _SGD, train

DATA = DataSpec(shape=(1, 6, 6), num_classes=3, mean=(0.4,), std=(0.5,))


def draw_examples(count: int = 4, seed: int = 5) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, 6, 6, generator=rng), torch.randint(3, (count,), generator=rng)


def observe_client(
    gradient: str = "plain", network: str = "", *, certain: bool = False, defense: str = "", **changes: Any
) -> Observation:
    """Return the observation of one client; `certain` sets the standard deviation of a variational bottleneck to zero."""
    spec = ModelSpec(name="mlp", arguments={"hidden": [8]}, network=network)
    model = models.build(spec, DATA, seed=1)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if certain:
        (name,) = [name for name, m in model.named_modules() if isinstance(m, Bottleneck)]
        weights[f"{name}.encoder.bias"][weights[f"{name}.encoder.bias"].numel() // 2 :] = -40.0
    training = Training(**{"learning_rate": 0.1, "batch_size": 4, "steps": 1, **changes})
    x, y = draw_examples()
    rule, rng = GradientSpec.parse(gradient).build(), torch.Generator().manual_seed(3)
    with seed_default(4):
        trained = train(model, weights, [(x, y)] * (training.steps or 1), training, DATA, rule=rule, rng=rng)
    facts = {"model": spec, "data": DATA, "training": training, "gradient": GradientSpec.parse(gradient)}
    return make_observation(trained.update, weights, defense=defense, **facts)


def seen(o: Observation) -> dict[str, Tensor]:
    return convert_to_gradient(o.update, o.weights, o.training, o.training.steps or 1)


def simulated(o: Observation, *, knows: bool) -> dict[str, Tensor]:
    """Return the simulated gradient at the true examples."""
    model = build_network(o)
    gradient = build_gradient(model, DATA, rule=o.gradient.build() if knows else None)(o.weights, *draw_examples())
    if not knows:
        return gradient
    channel = build_channel(o, model)
    return simulate_channel(channel, channel.learn(o.update), gradient, o.weights, o.training, 1)


def distance(a: dict[str, Tensor], b: dict[str, Tensor], without: frozenset[str] = frozenset()) -> float:
    """Return the squared distance between two gradients, relative to the squared norm of `b`."""
    names = [name for name in b if name not in without]
    return float(sum((a[n] - b[n]).square().sum() for n in names) / sum(b[n].square().sum() for n in names))


@pytest.mark.parametrize("gradient", ["dp_sgd(0.3, noise=0)", "fed_cdp(0.05, noise=0)", "soteria(0.5)"])
def test_known_rule_reproduces_the_clients_gradient_and_an_ignored_one_does_not(gradient: str) -> None:
    o = observe_client(gradient)
    assert distance(simulated(o, knows=True), seen(o)) < 1e-9
    assert distance(simulated(o, knows=False), seen(o)) > 1e-2


@pytest.mark.parametrize("gradient", ["dp_sgd(0.3, noise=0.5)", "fed_cdp(0.05, noise=0.5)", "fed_cdp(0.05, snr_db=3)"])
def test_distance_at_the_true_examples_is_the_stated_noise(gradient: str) -> None:
    o = observe_client(gradient)
    model = build_network(o)
    left = sum(float((g - seen(o)[name]).square().sum()) for name, g in simulated(o, knows=True).items())
    power = float(build_channel(o, model).noise(o.update)) / compute_total_step(o.training, 1) ** 2
    assert left == pytest.approx(power, rel=0.25)  # only 323 values; and with snr_db the power is an estimate


def test_noise_of_gradient_rule_and_update_defense_add_up() -> None:
    o = observe_client("dp_sgd(0.3, noise=0.5)", defense="gaussian(0.1)")
    power = build_channel(o, build_network(o)).noise(o.update)
    parts = [
        build_channel(observe_client("dp_sgd(0.3, noise=0.5)"), build_network(o)),
        DefenseSpec.parse("gaussian(0.1)").build_channel(),
    ]
    assert torch.allclose(power, sum(part.noise(o.update) for part in parts))


@pytest.mark.parametrize(
    ("changes", "exact"),
    [({}, True), ({"steps": 2}, False), ({"weight_decay": 0.1}, False), ({"defense": "gaussian(0.1)"}, False)],
)
def test_layer_that_soteria_prunes_is_left_out_if_its_zeros_are_hidden(changes: dict[str, Any], exact: bool) -> None:
    o = observe_client("soteria(0.5)", **changes)
    head, _ = models.find_head(build_network(o))
    assert find_omitted(o, build_network(o)) == (frozenset() if exact else {head})


def test_precode_is_simulated_without_noise_and_with_its_divergence() -> None:
    o = observe_client(network="precode(bottleneck=6, beta=0.2)", certain=True)
    assert distance(simulated(o, knows=True), seen(o)) < 1e-6
    assert distance(simulated(o, knows=False), seen(o)) > 1e-3


def test_block_of_precode_is_left_out_and_simulations_draw_nothing() -> None:
    o = observe_client(network="precode(bottleneck=6)")
    model = build_network(o)
    assert find_omitted(o, model) == {
        f"3.bottleneck.{part}.{kind}" for part in ("encoder", "decoder") for kind in ("weight", "bias")
    }
    assert find_omitted(observe_client(network="dropout"), build_network(observe_client(network="dropout"))) == frozenset()
    state = torch.get_rng_state()
    one, two = (simulated(o, knows=True) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("gradient", "network"),
    [("dp_sgd(0.3)", ""), ("soteria", ""), ("plain", "precode(4)"), ("fed_cdp(1, noise=1)", "dropout(0.5)")],
)
def test_simulations_of_batched_problems_agree_with_single_ones(gradient: str, network: str) -> None:
    o = observe_client(gradient, network)
    model = build_network(o)
    simulate = build_gradient(model, DATA, rule=o.gradient.build())
    xs, ys = zip(*(draw_examples(seed=s) for s in (1, 2, 3)), strict=True)
    together = vmap(simulate, in_dims=(None, 0, 0))(o.weights, torch.stack(xs), torch.stack(ys))
    for i in range(3):
        alone = simulate(o.weights, xs[i], ys[i])
        assert all(torch.allclose(together[name][i], alone[name], atol=1e-6) for name in alone)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_shares_of_the_steps_agree_with_the_optimiser(momentum: float) -> None:
    """A unit gradient in one step, and zero in the others, gives an update equal to the step's share."""
    training = Training(learning_rate=0.1, batch_size=1, steps=4, momentum=momentum)
    for step, share in enumerate(compute_shares(training, 4)):
        optimiser = _SGD({"w": torch.zeros(())}, training)
        for now in range(4):
            optimiser.step((torch.tensor(float(now == step)),))
        assert optimiser.update[0].item() == pytest.approx(-share)
    assert sum(compute_shares(training, 4)) == pytest.approx(compute_total_step(training, 4))


def test_step_sizes_are_computed_or_assumed_equal() -> None:
    def sizes(count: int, **changes: Any) -> list[int]:
        o = observe_client()
        training = Training(**{"learning_rate": 0.1, "batch_size": 4, **changes})
        made = Observation(**{**{f: getattr(o, f) for f in o.__dataclass_fields__}, "num_examples": count, "training": training})
        return [step.size for step in build_facts(made, build_network(o)).steps]

    assert sizes(10, epochs=2) == [4, 4, 2, 4, 4, 2]
    assert sizes(8, steps=2) == [4, 4]
    assert sizes(6, steps=2) == [3, 3]


@pytest.mark.parametrize("gradient", ["dp_sgd(1e-4, noise=0)", "fed_cdp(1e-4, noise=0)"])
def test_search_works_with_very_strong_clipping(gradient: str) -> None:
    case = Case((observe_client(gradient),), known_labels=draw_examples()[1])
    (found,) = cpl(steps=30)([case], rng=torch.Generator().manual_seed(0))
    assert found.explained.min() > 0.4  # less than 1, as four examples pass eight hidden units


@pytest.mark.parametrize(
    ("gradient", "network"), [("dp_sgd(0.3, noise=0.01)", ""), ("soteria(0.5)", ""), ("plain", "precode(6)")]
)
def test_attack_lowers_the_loss_with_a_known_defense(gradient: str, network: str) -> None:
    o = observe_client(gradient, network)
    (found,) = inverting_gradients(steps=40, tv=0.0)(
        [Case((o,), known_labels=draw_examples()[1])], rng=torch.Generator().manual_seed(0)
    )
    assert found.loss[-1] < 0.7 * found.loss[0]
