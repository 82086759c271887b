"""Tests for gradients that many inputs share: the answer is one of them, with a note and low confidence."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from generators import seeded
from observations import make_image_case, observe_steps
from torch import Tensor, nn

from attacker.attacks import Case, exact, rgap
from attacker.attacks.closed_form.routing import EXACT_DISTANCE
from attacker.attacks.optimisers.lbfgs import LBFGSStepper
from fedsim import models
from fedsim.models.building import _ADMITTED
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.codec import encode


def thin(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a network whose first layer maps 256 values to 64, with nine gradient constraints."""
    return nn.Sequential(
        nn.Conv2d(1, 1, 3, stride=2, padding=1), nn.Sigmoid(), nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(),
        nn.Flatten(), nn.Linear(8 * 64, num_classes),
    )  # fmt: skip


def blind(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a network that uses only every second value of every second row."""
    return nn.Sequential(nn.Conv2d(1, 8, 1, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 64, num_classes))


def wide(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(8 * 64, num_classes))


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("open_networks")
    vars(module).update(thin=thin, blind=blind, wide=wide)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = dict(_ADMITTED)
    for name in ("thin", "blind", "wide"):
        models.admit(f"open_networks:{name}")
    yield
    _ADMITTED.clear()
    _ADMITTED.update(before)


def case_on(network: str) -> tuple[Case, Tensor]:
    data, spec = DataSpec(shape=(1, 16, 16), num_classes=4), ModelSpec(name=f"open_networks:{network}")
    grid = torch.linspace(0, 1, 16)
    x = (0.5 + 0.4 * torch.sin(3 * grid[:, None]) * torch.cos(2 * grid[None]))[None, None]
    return Case((observe_steps((x, torch.tensor([2])), model=spec, data=data, learning_rate=1.0),)), x


def mean_squared_error(found: Tensor, x: Tensor) -> float:
    return float((found - x).square().mean())


@pytest.mark.parametrize("network", ["thin", "blind"])
def test_one_of_many_inputs_with_the_observed_gradient_gets_low_confidence(network: str) -> None:
    case, x = case_on(network)
    for attack in (exact(route="layers"), rgap()):
        (answer,) = attack([case], rng=seeded())
        assert float(answer.loss) < EXACT_DISTANCE**2
        assert mean_squared_error(answer.x, x) > 1e-3
        assert float(answer.confidence[0]) < 0.5
        assert any("of 256 values undetermined" in note for note in answer.notes)


@pytest.mark.parametrize("network", ["thin", "blind"])
def test_prior_fills_in_what_the_gradient_does_not_determine(network: str) -> None:
    case, x = case_on(network)
    (walked,), (answer,) = (attack([case], rng=seeded()) for attack in (exact(route="layers"), exact(fallback="none")))
    assert answer.route == "peeled"
    assert mean_squared_error(answer.x, x) < 0.3 * mean_squared_error(walked.x, x)
    assert float(answer.loss) < EXACT_DISTANCE**2
    assert 10 ** answer.evidence["doubt"][0] > 0.5  # equations determine less than half of the image


def test_determined_input_gets_high_confidence() -> None:
    case, x = case_on("wide")
    (answer,) = exact()([case], rng=seeded())
    assert answer.route == "layers"
    assert answer.notes == ()
    assert mean_squared_error(answer.x, x) < 1e-8
    assert float(answer.confidence[0]) > 0.9


def test_confidence_does_not_depend_on_the_other_cases() -> None:
    cases = [make_image_case(i, seed=i)[0] for i in range(3)]
    for case, together in zip(cases, exact()(cases, rng=seeded()), strict=True):
        (alone,) = exact()([case], rng=seeded())
        assert torch.allclose(alone.confidence, together.confidence, rtol=0, atol=1e-9)


def test_interrupted_search_marks_the_answer_although_the_closed_form_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, _ = make_image_case()
    observation = case.observations[0]
    noise = seeded(7)
    update = {name: t + 0.003 * t.std() * torch.randn(t.shape, generator=noise) for name, t in observation.update.items()}
    noisy = Case((replace(observation, payload=encode(update)),))
    (done,) = exact(fallback="dlg", steps=1)([noisy], rng=seeded())

    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LBFGSStepper, "step", stopped)
    (answer,) = exact(fallback="dlg", steps=1)([noisy], rng=seeded())
    assert answer.route == "layers"
    assert answer.interrupted
    assert not done.interrupted


def test_failed_case_does_not_discard_the_answers_of_an_interrupted_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network has no closed form, the second case has no answer, and the search for the first is interrupted."""
    attack = replace(exact(steps=1), routes=("linear", "layers", "peeled"))
    data, model = DataSpec(shape=(3, 8, 8), num_classes=4), ModelSpec(name="lenet_dlg", arguments={"pooling": "max"})
    x = torch.rand(1, *data.shape, generator=seeded(3))
    first, second = (Case((observe_steps((x, torch.tensor([1])), model=model, data=data, client=name),)) for name in "ab")
    monkeypatch.setattr(
        "attacker.attacks.closed_form.attack.find_unmet", lambda attack, case: ["it cannot"] if case is second else []
    )
    with pytest.raises(ValueError, match="it cannot"):
        attack([first, second], rng=seeded())

    def stopped(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LBFGSStepper, "step", stopped)
    (answer,) = attack([first, second], rng=seeded())
    assert (answer.case, answer.interrupted) == (first.key, True)
