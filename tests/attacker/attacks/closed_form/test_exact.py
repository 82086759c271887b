"""Tests of the attack `exact`: closed forms (routes) are tried in order, checked by their gradient, and else a search runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from generators import seeded
from observations import make_image_case, observe_loss, observe_steps
from torch import Tensor, nn

from attacker.attacks import AttackSpec, Case, cpl, exact, find_unmet, inverting_gradients, rgap
from attacker.attacks.closed_form.observations import observe
from attacker.attacks.closed_form.rgap.inversion import run_rgap
from attacker.attacks.closed_form.routes import _REQUIREMENTS, ROUTES
from attacker.attacks.closed_form.routing import EXACT_DISTANCE
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode


def alter_case(case: Case, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **fields: Any) -> Case:
    """Return a copy of a case with another update, and with changed public settings."""
    observation = case.observations[0]
    update = change({name: t.clone() for name, t in observation.update.items()})
    given = {key: getattr(observation, key) for key in vars(observation) if key in Observation.__dataclass_fields__}
    return Case((Observation(**{**given, "payload": encode(update), **fields}),))


def two_classes(model: nn.Module, x: Tensor, y: Tensor, name: str, **arguments: Any) -> Case:
    """Return a case of one example on a network with a single logit."""
    data = DataSpec(shape=tuple(x.shape[1:]), num_classes=2)
    loss, spec = models.find_loss("logistic")(model(x), y), ModelSpec(name=name, arguments=arguments)
    training = Training(learning_rate=1.0, batch_size=1, steps=1, loss="logistic")
    return Case((observe_loss(loss, model, model=spec, data=data, training=training),))


def test_undefended_lenet_is_solved_layer_by_layer() -> None:
    cases, xs, ys = zip(*(make_image_case(i) for i in range(3)), strict=True)
    found = exact()(cases, rng=seeded())
    for answer, x, y in zip(found, xs, ys, strict=True):
        assert answer.route == "layers"
        assert float((answer.x - x).square().mean()) < 1e-6
        assert answer.y.tolist() == y.tolist()
        assert float(answer.explained[0]) > 0.99999
        assert float(answer.confidence[0]) > 0.9
        assert answer.notes == ()
        assert answer.oracles == ()
        assert answer.iterations == 0
        assert float(answer.loss) < EXACT_DISTANCE**2


def test_batched_cases_are_answered_like_single_ones() -> None:
    cases = [make_image_case(i, seed=i)[0] for i in range(3)]
    together = rgap()(cases, rng=seeded())
    for case, answer in zip(cases, together, strict=True):
        (alone,) = rgap()([case], rng=seeded())
        assert torch.allclose(alone.x, answer.x, atol=1e-4)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(self.first(x))
        return self.head((x + torch.sigmoid(self.second(x))).mean(dim=(2, 3)))


def test_residual_network_is_searched_for_with_the_reason() -> None:
    data, model = DataSpec(shape=(3, 8, 8), num_classes=4), ModelSpec(name=f"{__name__}:Residual")
    models.admit(model.name)
    x = torch.rand(1, *data.shape, generator=seeded(3))
    case = Case((observe_steps((x, torch.tensor([1])), model=model, data=data),))
    (answer,) = exact(steps=1)([case], rng=seeded())
    assert answer.route == "optimisation"
    assert any("joins" in note and "residual" in note for note in answer.notes)
    with pytest.raises(ValueError, match="joins 2 paths"):
        rgap()([case], rng=seeded())


def test_batch_is_refused_by_r_gap_with_the_reason() -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    x = torch.rand(2, *data.shape, generator=seeded(3))
    case = Case((observe_steps((x, torch.tensor([1, 2])), model=ModelSpec(name="lenet_dlg"), data=data),))
    assert find_unmet(rgap(), case) == ["it works for one example only"]
    with pytest.raises(ValueError, match="the update was computed from 2 examples"):
        exact(route="layers")([case], rng=seeded())


def test_more_examples_than_reported_are_noted() -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    x = torch.rand(2, *data.shape, generator=seeded(3))
    honest = observe_steps((x, torch.tensor([1, 2])), model=ModelSpec(name="lenet_dlg"), data=data)
    lying = alter_case(Case((honest,)), lambda u: u, num_examples=1)
    (answer,) = rgap()([lying], rng=seeded())
    assert any("rank two or more" in note for note in answer.notes)
    assert any("differs from the observed one by" in note for note in answer.notes)


def test_zero_or_not_finite_update_is_refused() -> None:
    case, _, _ = make_image_case()
    zero = alter_case(case, lambda u: {name: torch.zeros_like(t) for name, t in u.items()})
    broken = alter_case(case, lambda u: {name: t / 0 for name, t in u.items()})
    with pytest.raises(ValueError, match=r"update of 00001-c0 is zero"):
        exact()([zero], rng=seeded())
    with pytest.raises(ValueError, match=r"update of 00001-c0 contains NaN or infinite values"):
        exact()([broken], rng=seeded())


def test_other_weights_or_another_loss_are_noted() -> None:
    """Twice the loss, or weights that the client did not have, give a gradient that no example explains."""
    case, _, _ = make_image_case()
    doubled = alter_case(case, lambda u: {name: 2 * t for name, t in u.items()})
    (answer,) = rgap()([doubled], rng=seeded())
    assert any("does not fit the loss, it is off by 50%" in note for note in answer.notes)
    stranger = {name: w.roll(1, 0) for name, w in case.observations[0].weights.items()}
    (answer,) = rgap()([alter_case(case, lambda u: u, weights=stranger)], rng=seeded())
    assert any("does not fit the loss" in note for note in answer.notes)
    assert any("gradient of this answer differs from the observed one by" in note for note in answer.notes)
    assert float(answer.confidence[0]) < 0.5


def of_logit(mu: float, x: Tensor) -> Case:
    """Return a case of one example of class 1 on a CNN6 whose single logit is mu."""
    model = models.build(ModelSpec(name="cnn6"), DataSpec(shape=(3, 32, 32), num_classes=2), seed=0)
    with torch.no_grad():
        list(model.parameters())[-1].mul_(mu / float(model(x)))
    return two_classes(model, x, torch.tensor([1]), "cnn6")


@pytest.mark.parametrize("mu", [0.5, 2.5])
def test_twin_that_fills_the_range_of_data_is_chosen(mu: float) -> None:
    """A single logit without bias: two inputs, multiples of each other, have the same gradient.

    Below the minimum of the loss equation, the twin is larger and outside of [0, 1]; above, it is smaller, with low contrast.
    """
    x = torch.rand(1, 3, 32, 32, generator=seeded(5))
    (answer,) = rgap()([of_logit(mu, x)], rng=seeded())
    assert float((answer.x - x).square().mean()) < 1e-8
    assert answer.y.tolist() == [1]
    assert any("twin" in note for note in answer.notes)


def test_both_twins_have_the_observed_gradient() -> None:
    observed = observe([of_logit(1.0, torch.rand(1, 3, 32, 32, generator=seeded(5)))])
    (answer,) = run_rgap(observed)
    assert answer.twin is not None
    assert observed.measure_misfit(0, answer.x, answer.y) < 1e-4
    assert observed.measure_misfit(0, answer.twin, answer.y) < 1e-4
    ratio = answer.twin / answer.x
    assert torch.allclose(ratio, ratio.mean(), rtol=1e-6)
    assert not 0.9 < float(ratio.mean()) < 1.1


def test_gradient_that_no_example_has_is_noted() -> None:
    """The product of weights and gradients of a single logit is never below -0.278."""
    case = of_logit(1.2785, torch.rand(1, 3, 32, 32, generator=seeded(5)))
    (answer,) = rgap()([alter_case(case, lambda u: {name: 1.5 * t for name, t in u.items()})], rng=seeded())
    assert any("no single example has exactly the last layer's gradient" in note for note in answer.notes)
    (answer,) = rgap()([alter_case(case, lambda u: {name: 0.9 * t for name, t in u.items()})], rng=seeded())
    assert not any("no single example" in note for note in answer.notes)


def test_search_starts_from_the_closed_forms_answer() -> None:
    """With noise the closed form is not exact; the search starts from its answer and reduces the misfit to the gradient.

    One iteration, since after more the search from the regular start arrives at the same minimum.
    """
    case, _x, _ = make_image_case()
    noise = seeded(7)

    def disturbed(update: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: t + 0.003 * t.std() * torch.randn(t.shape, generator=noise) for name, t in update.items()}

    noisy = alter_case(case, disturbed)
    observed = observe([noisy])
    (closed,), (routed,) = rgap()([noisy], rng=seeded()), exact(steps=1)([noisy], rng=seeded())
    misfits = [observed.measure_misfit(0, found.x, found.y) for found in (closed, routed)]
    assert EXACT_DISTANCE < misfits[0] < 1
    assert routed.route == "optimisation from layers"
    assert misfits[1] < misfits[0]


@pytest.mark.parametrize("attack", [cpl, inverting_gradients])
def test_optimisation_attacks_may_start_from_the_closed_form(attack: Callable[..., Any]) -> None:
    case, x, _ = make_image_case()
    (plain,), (started,) = (attack(steps=2, closed_form_start=given)([case], rng=seeded()) for given in (False, True))
    assert float((started.x - x).square().mean()) < 0.1 * float((plain.x - x).square().mean())


def test_a_route_can_be_forced_and_must_exist() -> None:
    case, _, _ = make_image_case()
    (answer,) = exact(route="optimisation", steps=1)([case], rng=seeded())
    assert answer.route == "optimisation"
    with pytest.raises(ValueError, match=rf"unknown route 'magic'\. Known: auto, {', '.join(ROUTES)}, optimisation"):
        AttackSpec(name="exact", arguments={"route": "magic"})
    with pytest.raises(ValueError, match="needs a fallback"):
        exact(route="optimisation", fallback="none")


def test_known_label_is_listed_as_an_oracle() -> None:
    case, _, y = make_image_case()
    (answer,) = rgap()([replace(case, known_labels=y)], rng=seeded())
    assert answer.oracles == ("labels",)


def test_notes_are_written_and_read_back(tmp_path: Path) -> None:
    case, _, _ = make_image_case()
    (answer,) = rgap()([alter_case(case, lambda u: {name: 2 * t for name, t in u.items()})], rng=seeded())
    answer.write(tmp_path / "one.safetensors")
    assert Reconstruction.read(tmp_path / "one.safetensors").notes == answer.notes != ()


def test_route_that_fails_unexpectedly_is_noted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("no such kernel\nin any library")

    case, _, _ = make_image_case()
    monkeypatch.setitem(ROUTES, "linear", fail)
    monkeypatch.setitem(ROUTES, "layers", fail)
    (answer,) = exact(steps=1)([case], rng=seeded())
    assert answer.route != "layers"
    exact(steps=1)([case], rng=seeded())
    assert [one.getMessage() for one in caplog.records if "the route layers failed" in one.getMessage()] == [
        "the route layers failed: RuntimeError: no such kernel"
    ]
    with pytest.raises(ValueError, match=r"the route layers failed: RuntimeError: no such kernel$"):
        exact(route="layers", fallback="none")([case], rng=seeded())


def test_plan_names_a_requirement_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(observed: Any) -> Any:
        raise TypeError("no tensor")

    monkeypatch.setitem(_REQUIREMENTS, "features", fail)
    reasons = exact().plan(make_image_case()[0]).reasons
    assert reasons["features"] == "the route features failed: TypeError: no tensor"
    assert reasons["layers"] == ""
