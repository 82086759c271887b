"""Tests of rows behind a single output, where a loss that nobody stated, such as the squared error, changes only a factor."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_loss, observe_steps
from torch import nn

from attacker.attacks import Case, exact
from attacker.attacks.closed_form import routes
from attacker.attacks.closed_form.observations import ClosedFormAnswer
from attacker.attacks.confidence import MIN_LIKELY
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
    targets = 3 * torch.rand(len(x), generator=seeded(seed))
    loss = (model(x)[:, 0] - targets).square().mean()
    training = Training(learning_rate=0.1, batch_size=1, steps=1, loss="logistic")
    observation = observe_loss(loss, model, model=spec, data=data, training=training)
    return exact(fallback="none")([Case((observation,))], rng=seeded())[0]


def draw_rows(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, FEATURES, generator=seeded(100 + seed))


@pytest.mark.parametrize("network", ["relu", "tanh", "normalised"])
def test_a_row_of_a_regression_is_certain(network: str) -> None:
    for seed in range(5):
        x = draw_rows(1, seed)
        found = attack(network, x, seed=seed)
        assert found.route == "linear"
        assert torch.allclose(found.x, x, atol=1e-5)
        assert float(found.confidence) >= MIN_LIKELY
        assert any("with another loss or learning rate" in note for note in found.notes)


@pytest.mark.parametrize("network", ["relu", "normalised"])
def test_two_rows_that_are_reported_as_one_are_not_certain(network: str) -> None:
    for seed in range(10):
        assert not float(attack(network, draw_rows(2, seed), seed=seed).confidence) >= MIN_LIKELY


def test_near_rows_that_turn_on_the_same_neurons_could_be_a_mixture() -> None:
    """Without hidden neurons, all rows have parallel gradients, and their mixture explains the whole update."""
    found = attack("linear", draw_rows(2, 0))
    assert bool(found.confidence.isnan().all())
    assert any("a mixture of several examples" in note for note in found.notes)
    assert bool(attack("linear", draw_rows(1, 0)).confidence.isnan().all())


@pytest.mark.parametrize(("stays", "final", "kept"), [(1.0, False, "linear"), (1.0, True, "linear"), (0.9, True, "layer_input")])
def test_a_row_that_is_read_off_is_not_displaced_by_an_estimate(
    monkeypatch: pytest.MonkeyPatch, stays: float, final: bool, kept: str
) -> None:
    """With another training than stated, the distance to the whole gradient says little about the example."""
    one, label = torch.rand(1, 64, generator=seeded(1)), torch.tensor([1])
    read = ClosedFormAnswer((one + 0.02).clamp(0, 1), torch.tensor([2]), "linear", stays=torch.tensor([stays]))
    estimate = ClosedFormAnswer((one + 0.1).clamp(0, 1), label, "layer_input", final=final)
    assert choose(monkeypatch, observe_steps((one, label), **LARGE), read, estimate) == kept


def test_a_near_answer_is_not_displaced_by_a_final_one_that_fits_less_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, right answers are not exact, and `layer_input` is the last route."""
    one, label = torch.rand(1, 64, generator=seeded(1)), torch.tensor([1])
    near = ClosedFormAnswer(one + 3e-3, label, "linear", stays=torch.tensor([0.999]))
    estimate = ClosedFormAnswer((one + 0.2).clamp(0, 1), label, "layer_input", final=True)
    assert choose(monkeypatch, observe_steps((one, label), **LARGE), near, estimate) == "linear"


LARGE = {"model": ModelSpec(name="mlp", arguments={"hidden": [80]}), "data": DataSpec(shape=(64,), num_classes=4)}


def choose(monkeypatch: pytest.MonkeyPatch, observation: Observation, *answers: ClosedFormAnswer) -> str:
    """Return the route whose answer `exact` keeps, of routes that give these answers in this order."""
    for one in answers:
        monkeypatch.setitem(routes.ROUTES, one.route, lambda *_, one=one: [one])
    attack = replace(exact(fallback="none"), routes=tuple(one.route for one in answers), stability=False)
    (found,) = attack([Case((observation,))], rng=seeded())
    return found.route
