"""Tests that simulated and real local steps equal those of torch.optim with common training settings."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from observations import make_observation
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from attacker.attacks.simulation.client import (
    compute_shares,
    compute_total_step,
    convert_to_gradient,
    find_frozen,
    find_omitted,
    find_schedule,
)
from attacker.attacks.simulation.gradients import build_gradient
from attacker.attacks.simulation.local_steps import build_stepped_gradient, simulate_one_step
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.training import MAX_FLOAT, MIN_FLOAT
from fedsim.training.local import train

DATA = DataSpec(shape=(6,), num_classes=3)
SIZES = (2, 2, 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "clipping": {"clip_norm": 0.05, "momentum": 0.5, "weight_decay": 0.1},
    "schedule": {"schedule": (1.0, 0.5, 0.1), "momentum": 0.9},
    "adam": {"optimiser": "adam", "learning_rate": 0.01, "weight_decay": 0.1},
    "adamw": {"optimiser": "adamw", "learning_rate": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99), "schedule": (1.0, 0.2)},
}


def settings(name: str, **others: Any) -> Training:
    return Training(**{"learning_rate": 0.3, "batch_size": 2, "epochs": 1, **SETTINGS[name], **others})


def make_problem() -> tuple[nn.Module, dict[str, Tensor], Tensor, Tensor]:
    model = models.build(ModelSpec(name="mlp", arguments={"hidden": [5]}), DATA, seed=3)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(2))
    return model, weights, x, torch.tensor([0, 1, 2, 2, 1])


def compute_by_torch(training: Training, model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Return the update of an ordinary PyTorch training loop."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lr, decay = training.learning_rate, training.weight_decay
    optimiser: torch.optim.Optimizer
    if training.optimiser == "sgd":
        optimiser = torch.optim.SGD(
            model.parameters(), lr=lr, momentum=training.momentum, nesterov=training.nesterov, weight_decay=decay
        )
    else:
        made = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
        optimiser = made(model.parameters(), lr=lr, weight_decay=decay, betas=training.betas, eps=training.eps)
    factors = training.schedule
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda t: factors[min(t, len(factors) - 1)] if factors else 1.0)
    for rows in ([0, 1], [2, 3], [4]):
        optimiser.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimiser.step()
        scheduler.step()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", SETTINGS)
def test_simulated_and_real_steps_agree_with_torch(name: str) -> None:
    training = settings(name)
    model, weights, x, y = make_problem()
    update = compute_by_torch(training, model, x, y)
    plain = compute_by_torch(Training(learning_rate=training.learning_rate, batch_size=2, epochs=1), make_problem()[0], x, y)
    assert max(float((update[key] - plain[key]).norm() / plain[key].norm()) for key in update) > 0.05  # the setting matters
    simulated = build_stepped_gradient(build_gradient(model, DATA), training, SIZES)(weights, x, y)
    for key, expected in convert_to_gradient(update, weights, training, 3).items():
        torch.testing.assert_close(simulated[key], expected, rtol=1e-3, atol=1e-5)
    batches = [(x[:2], y[:2]), (x[2:4], y[2:4]), (x[4:], y[4:])]
    ours = train(make_problem()[0], weights, batches, training, DATA).update
    for key, expected in update.items():
        torch.testing.assert_close(ours[key], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_simulated_steps_leave_frozen_parameters_as_they_are(name: str) -> None:
    """Frozen weights stay the same in later steps and do not count in the norm that is clipped, as in torch."""
    training = settings(name)
    model, weights, x, y = make_problem()
    frozen = frozenset(list(weights)[:2])
    for key in frozen:
        model.get_parameter(key).requires_grad_(False)
    assert find_frozen(model, training) == find_frozen(make_problem()[0], replace(training, frozen=tuple(frozen))) == frozen
    expected = convert_to_gradient(compute_by_torch(training, model, x, y), weights, training, 3)
    simulated = build_stepped_gradient(build_gradient(model, DATA), training, SIZES, frozen)(weights, x, y)
    for key in set(weights) - frozen:
        torch.testing.assert_close(simulated[key], expected[key], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", SETTINGS)
def test_total_step_of_a_constant_gradient_agrees_with_torch(name: str) -> None:
    """The reference is torch.optim on a linear loss, whose gradient is constant."""
    training = settings(name, weight_decay=0.0, clip_norm=None)
    weight = torch.zeros(1, requires_grad=True)
    sgd = torch.optim.SGD([weight], lr=1, momentum=training.momentum, nesterov=training.nesterov)
    optimiser = sgd if training.optimiser == "sgd" else torch.optim.Adam([weight], lr=1)
    for step in range(3):
        optimiser.param_groups[0]["lr"] = training.compute_rate(step)
        weight.grad = torch.ones(1)
        optimiser.step()
    assert compute_total_step(training, 3) == pytest.approx(-weight.item(), rel=1e-5)
    assert len(compute_shares(training, 3)) == 3


@pytest.mark.parametrize("name", ["clipping", "adam", "adamw"])
def test_one_simulated_step_includes_the_optimiser_and_has_a_slope(name: str) -> None:
    """One step of Adam depends on the gradient's sign alone; a surrogate derivative still lets a search descend."""
    training = settings(name)
    model, weights, x, y = make_problem()
    one = build_gradient(model, DATA)
    expected = build_stepped_gradient(one, training, (5,))(weights, x, y)
    for key, found in simulate_one_step(one(weights, x, y), weights, training).items():
        torch.testing.assert_close(found, expected[key], rtol=1e-4, atol=1e-6)

    def distance(x: Tensor) -> Tensor:
        seen = simulate_one_step(one(weights, x, y), weights, training)
        return torch.stack([(seen[key] - expected[key]).square().sum() for key in seen]).sum()

    start = x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    slope = torch.func.grad(distance)(start)
    assert slope.isfinite().all()
    lengths = torch.logspace(-4, 0, 9) * 0.2 / slope.abs().max()
    assert min(float(distance(start - length * slope)) for length in lengths) < float(distance(start))


def observation(training: Training, num_examples: int = 5) -> Observation:
    spec = ModelSpec(name="mlp", arguments={"hidden": [5]})
    weights = {name: p.detach() for name, p in models.build(spec, DATA).named_parameters()}
    return make_observation(weights, weights, model=spec, data=DATA, training=training, num_examples=num_examples)


def test_frozen_parameters_are_left_out_of_the_comparison() -> None:
    training = Training(learning_rate=0.1, batch_size=5, steps=1)
    seen = observation(training)
    model = models.build(seen.model, DATA)
    names = [name for name, _ in model.named_parameters()]
    assert find_omitted(seen, model) == frozenset()
    assert find_omitted(replace(seen, training=replace(training, frozen=(names[0], "*.bias"))), model) == {
        names[0], *(name for name in names if name.endswith("bias"))
    }  # fmt: skip
    dict(model.named_parameters())[names[2]].requires_grad_(False)
    assert find_omitted(seen, model) == {names[2]}


def test_accumulated_batches_count_as_one_step() -> None:
    training = Training(learning_rate=0.1, batch_size=2, epochs=1, accumulation=2)
    assert find_schedule(observation(training, 5)) == ((4, 1), 2)
    assert find_schedule(observation(replace(training, epochs=None, steps=2), 8)) == ((4, 4), 2)


def test_learning_rate_decays_with_the_round_within_limits() -> None:
    training = Training(learning_rate=0.1, batch_size=2, steps=1, round_decay=0.5)
    assert [training.fix_round(number).learning_rate for number in (1, 2, 3)] == [0.1, 0.05, 0.025]
    for decay, limit in ((0.5, MIN_FLOAT), (2.0, MAX_FLOAT)):  # a recording may count any number of rounds
        assert replace(training, round_decay=decay).fix_round(2**53).learning_rate == limit


@pytest.mark.parametrize(
    ("key", "value"), [("learning_rate", 1e308), ("learning_rate", 1e-300), ("weight_decay", 1e300), ("clip_norm", 1e300)]
)
def test_numbers_beyond_the_range_of_float32_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"training\.{key} must be"):
        Training(**{"learning_rate": 0.1, "batch_size": 1, "steps": 1, key: value})


@pytest.mark.parametrize(
    ("given", "reported", "counted"),
    [
        ({"batch_size": 1, "steps": 1}, 160, 1),
        ({"batch_size": 32, "steps": 2}, 160, 64),
        ({"batch_size": 32, "steps": 2, "accumulation": 2}, 160, 128),
        ({"batch_size": 32, "steps": 2}, 40, 40),
        ({"batch_size": 32, "epochs": 1}, 160, 160),
        ({"batch_size": 32, "epochs": 3, "drop_last": True}, 170, 160),
        ({"batch_size": 32, "epochs": 1, "drop_last": True}, 20, 20),
        ({"batch_size": 32, "epochs": 1}, None, None),
        ({"batch_size": 32, "epochs": 1, "examples": 7}, None, 7),
        ({"batch_size": 32, "steps": 1, "examples": 7}, 160, 7),
    ],
)
def test_number_of_examples_of_an_update_follows_from_the_training(
    given: dict[str, Any], reported: int | None, counted: int | None
) -> None:
    assert Training(learning_rate=0.1, **given).count_examples(reported) == counted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimiser": "lion"}, "unknown training.optimiser 'lion'. Known: sgd, adam, adamw"),
        ({"optimiser": "adam", "momentum": 0.9}, "training.momentum is for sgd; adam has training.betas"),
        ({"nesterov": True}, "needs a momentum"),
        ({"clip_norm": 0.0}, "training.clip_norm must be positive, got 0.0"),
        ({"schedule": (0.0, 1.0)}, "the first above 0"),
        ({"examples": 0}, "training.examples must be positive, got 0"),
        ({"betas": (0.9, 1.0)}, r"training.betas must be two numbers in \[0, 1\)"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Training(learning_rate=0.1, batch_size=1, steps=1, **given)


def test_limits_of_simulations_are_listed() -> None:
    plain = Training(learning_rate=0.1, batch_size=1, steps=1)
    assert plain.list_limits() == []
    all_three = replace(plain, optimiser="adam", precision="bfloat16", augmentation="random crop")
    assert [limit.split()[0] for limit in all_three.list_limits()] == ["adam", "clients", "clients"]
