"""Tests of rows behind a single output, where a loss that nobody stated, such as the squared error, changes only a factor."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attacker.attacks.closed_form.router import ClosedForm
from observations import make_observation
from torch import nn

from attacker.attacks import AttackSpec, Case
from attacker.attacks.closed_form import routes
from attacker.attacks.closed_form.rgap.inversion import ClosedFormAnswer
from attacker.attacks.confidence.evidence import LIKELY
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training

FEATURES = 12


def relu(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 1))


def tanh(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def normalised(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A network that is no chain of supported layers."""
    return nn.Sequential(nn.Linear(FEATURES, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 1))


def linear(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Linear(FEATURES, 1)


def attack(network: str, x: torch.Tensor, *, seed: int = 0) -> Reconstruction:
    """Attack one step of regression by the squared error on rows x, as if it were of one row with the logistic loss."""
    spec, data = ModelSpec(name=f"{__name__}:{network}"), DataSpec(shape=(FEATURES,), num_classes=2)
    models.admit(spec.name)
    model = models.build(spec, data, seed=seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    targets = 3 * torch.rand(len(x), generator=torch.Generator().manual_seed(seed))
    (model(x)[:, 0] - targets).square().mean().backward()
    update = {name: -0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    training = Training(learning_rate=0.1, batch_size=1, steps=1, loss="logistic")
    observation = make_observation(update, weights, model=spec, data=data, training=training)
    exact = AttackSpec(name="exact", arguments={"fallback": "none"}).build()
    (found,) = exact([Case((observation,))], rng=torch.Generator().manual_seed(0))
    return found


def draw_rows(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(100 + seed))


@pytest.mark.parametrize("network", ["relu", "tanh", "normalised"])
def test_a_row_of_a_regression_is_certain(network: str) -> None:
    for seed in range(5):
        x = draw_rows(1, seed)
        found = attack(network, x, seed=seed)
        assert found.route == "linear"
        assert torch.allclose(found.x, x, atol=1e-5)
        assert float(found.confidence) >= LIKELY
        assert any("explains the gradient up to a factor" in note for note in found.notes)


@pytest.mark.parametrize("network", ["relu", "normalised"])
def test_two_rows_that_are_reported_as_one_are_not_certain(network: str) -> None:
    for seed in range(10):
        assert not float(attack(network, draw_rows(2, seed), seed=seed).confidence) >= LIKELY


def test_near_rows_that_turn_on_the_same_neurons_could_be_a_mixture() -> None:
    """Without hidden neurons, all rows have parallel gradients, and their mixture explains the whole update."""
    found = attack("linear", draw_rows(2, 0))
    assert bool(found.confidence.isnan().all())
    assert any("a mixture of several examples" in note for note in found.notes)
    assert bool(attack("linear", draw_rows(1, 0)).confidence.isnan().all())


@pytest.mark.parametrize(("stays", "kept"), [(1.0, "linear"), (0.9, "layer_input")])
def test_a_row_that_is_read_off_is_not_displaced_by_an_estimate(
    monkeypatch: pytest.MonkeyPatch, observe: Callable[..., Observation], stays: float, kept: str
) -> None:
    """With another loss than stated, the distance to the whole gradient says little about the example."""
    one, spec = torch.rand(1, 64), DataSpec(shape=(64,), num_classes=4)
    case = Case((observe((one, torch.tensor([1])), model=ModelSpec(name="mlp", arguments={"hidden": [80]}), data=spec),))
    read = ClosedFormAnswer(one, torch.tensor([2]), "linear", stays=torch.tensor([stays]))
    estimate = ClosedFormAnswer(one + 0.01 * torch.rand(1, 64), torch.tensor([1]), "layer_input")
    monkeypatch.setitem(routes.ROUTES, "linear", lambda *_: [read])
    monkeypatch.setitem(routes.ROUTES, "layer_input", lambda *_: [estimate])
    exact = AttackSpec(name="exact", arguments={"fallback": "none"}).build()
    assert isinstance(exact, ClosedForm)
    (found,) = replace(exact, routes=("linear", "layer_input"))([case], rng=torch.Generator().manual_seed(0))
    assert found.route == kept
