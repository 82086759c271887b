"""Tests that confidence is a probability computed from evidence, and undecided if the calibration does not apply."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest
import torch
from generators import draw_smooth_images, seeded
from observations import make_image_case, observe_steps
from torch import Tensor, nn

from attacker.attacks import Case, cpl, dlg, exact, inverting_gradients
from attacker.attacks.confidence import estimates
from attacker.attacks.matching import matching_run
from attacker.attacks.optimisers.stopping import Stop
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.codec import encode

LOW_CONFIDENCE = 0.2


def test_short_search_has_low_confidence() -> None:
    cases = [make_image_case(i)[0] for i in range(3)]
    for attack in (dlg(steps=1), inverting_gradients(steps=3)):
        for found, (_, x, _) in zip(attack(cases, rng=seeded()), (make_image_case(i) for i in range(3)), strict=True):
            assert float((found.x.clamp(0, 1) - x).square().mean()) > 0.02
            assert float(found.confidence[0]) < LOW_CONFIDENCE


def test_closed_form_of_pure_noise_has_low_confidence() -> None:
    """The route `linear` returns the direction of the largest singular value, which explains almost nothing of noise."""
    model, data = ModelSpec(name="mlp", arguments={"hidden": (16,)}), DataSpec(shape=(3, 32, 32), num_classes=10)
    one = torch.rand(1, 3, 32, 32, generator=seeded()), torch.tensor([1])
    seen, rng, routes = observe_steps(one, model=model, data=data), seeded(), []
    for _ in range(6):
        noise = {name: torch.randn(u.shape, generator=rng) for name, u in seen.update.items()}
        (found,) = exact(fallback="none")([Case((replace(seen, payload=encode(noise)),))], rng=seeded())
        assert float(found.confidence[0]) < 0.05
        routes.append(found.route)
    assert "linear" in routes


def test_a_certain_example_is_likely_although_the_gradient_is_of_another_loss() -> None:
    """Label smoothing or a wrong learning rate leave most of a gradient unexplained, also by the right example."""
    x, data = torch.rand(1, 3, 16, 16, generator=seeded()), DataSpec(shape=(3, 16, 16), num_classes=10)
    certain, uncertain = (
        float(estimates.judge_closed_form("linear", x, 0.99, torch.tensor([stays]), data, 1).confidence[0])
        for stays in (1.0, 0.1)
    )
    assert certain > 0.9
    assert uncertain < 0.05


def test_two_epochs_on_one_batch_get_low_confidence() -> None:
    """Such answers explain most of the gradient's power, but none is right, so that confidence must be low."""
    x, y = draw_smooth_images(16)
    data, cases = DataSpec(shape=(3, 16, 16), num_classes=10), []
    for i in range(8):
        one = x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]
        cases.append(Case((_epochs(observe_steps(one, one, model=ModelSpec(name="lenet_cpl"), data=data, client=f"c{i}")),)))
    found = inverting_gradients(steps=100)(cases, rng=seeded())
    assert sum(float((one.explained > 0.7).sum()) for one in found) >= 8
    for one, truth in zip(found, x.split(2), strict=True):
        assert float((one.x[:, None] - truth[None]).square().flatten(2).mean(dim=2).min()) > 0.009
        assert not bool((one.confidence > 0.5).any())


def _epochs(seen: object) -> object:
    """Return an observation of two steps on one batch, declared as two epochs."""
    training = replace(seen.training, steps=None, epochs=2)
    return replace(seen, training=training, num_examples=seen.num_examples // 2)


def stop(done: int, total: int, message: str) -> None:
    """Interrupt a search when two thirds of its steps are done."""
    if done >= 2 * total / 3:
        raise KeyboardInterrupt


def test_the_best_result_of_an_interrupted_search_is_unlikely_or_undecided() -> None:
    """The first search is near the truth and has not converged, in which state wrong answers look as likely; the other is not."""
    case, x, _ = make_image_case(0)
    (found,) = inverting_gradients(steps=600, give_up=0.0)([case], rng=seeded(), progress=stop)
    assert found.interrupted
    assert float((found.x.clamp(0, 1) - x).square().mean()) < 0.009
    assert found.confidence.isnan().all()
    assert any("stopped before its end" in note for note in found.notes)
    wrong, x, _ = make_image_case(1)
    (failed,) = inverting_gradients(steps=6, give_up=0.0)([wrong], rng=seeded(), progress=stop)
    assert failed.interrupted
    assert float((failed.x.clamp(0, 1) - x).square().mean()) > 0.02
    assert float(failed.confidence[0]) < LOW_CONFIDENCE


def test_confidence_of_an_interrupted_search_is_undecided_if_its_curvature_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching_run, "JUDGING_SECONDS", 0.0)
    case, _, _ = make_image_case(0)
    stopped, finished = (inverting_gradients(steps=60)([case], rng=seeded(), progress=watch)[0] for watch in (stop, None))
    assert isnan(float(stopped.confidence[0]))
    assert any("takes too long" in note for note in stopped.notes)
    assert not any("takes too long" in note for note in finished.notes)


def test_repeated_answer_has_undecided_confidence() -> None:
    """A client reports six examples and trains on two; the four repeated answers must not count as four more examples."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    x = torch.rand(2, 1, 8, 8, generator=seeded())
    model = ModelSpec(name="mlp", arguments={"hidden": (128,)})
    seen = observe_steps((x, torch.tensor([1, 2])), model=model, data=data)
    (found,) = exact(fallback="none")([Case((replace(seen, num_examples=6),))], rng=seeded())
    assert found.route == "linear"
    assert len(found.x) == 6
    decided = ~found.confidence.isnan()
    assert int(decided.sum()) == 2
    assert float((found.x[decided][:, None] - x[None]).square().flatten(2).mean(dim=2).amin(dim=0).max()) < 1e-6
    assert any("4 of 6 examples, which repeat an earlier" in note for note in found.notes)


def test_evidence_does_not_depend_on_the_scale_of_the_gradient() -> None:
    """A learning rate ten times smaller gives the same evidence for the same answer."""
    (one, _, _), (other, _, _) = (make_image_case(0, learning_rate=rate) for rate in (1.0, 0.1))
    first, second = (inverting_gradients(steps=20)([case], rng=seeded())[0] for case in (one, other))
    assert first.evidence.keys() == second.evidence.keys()
    for name, values in first.evidence.items():
        assert values == pytest.approx(second.evidence[name], rel=1e-2, abs=1e-2)


class Gate(nn.Module):
    """A layer type that the calibration does not include."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid() + 0.1 * x.sin()


def gated() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), Gate(), nn.Flatten(), nn.Linear(6 * 64, 4))


def test_unknown_layer_type_leaves_confidence_undecided() -> None:
    models.admit(f"{__name__}:gated", "gated-for-confidence")
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    case = Case(
        (observe_steps((torch.rand(1, 1, 8, 8), torch.tensor([1])), model=ModelSpec(name="gated-for-confidence"), data=data),)
    )
    (found,) = cpl(steps=2)([case], rng=seeded())
    assert isnan(float(found.confidence[0]))
    assert 0 <= float(found.explained[0]) <= 1
    assert any("confidence is undecided" in note and "Gate" in note for note in found.notes)


@pytest.mark.parametrize(("network", "undecided"), [("precode(bottleneck=16)", True), ("", False)])
def test_confidence_behind_a_random_bottleneck_is_undecided(network: str, undecided: bool) -> None:
    """The layers in the bottleneck are of calibrated kinds, and its random values are not."""
    x, y = draw_smooth_images(1)
    model = ModelSpec(name="lenet_dlg", network=network)
    seen = observe_steps((x, y), model=model, data=DataSpec(shape=(3, 16, 16), num_classes=10))
    (found,) = inverting_gradients(steps=400, give_up=0.0)([Case((seen,))], rng=seeded())
    assert isnan(float(found.confidence[0])) == undecided
    assert any("no network with Bottleneck" in note for note in found.notes) == undecided


def normalised() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))


def test_confidence_beside_batch_norm_in_training_mode_has_no_graph() -> None:
    models.admit(f"{__name__}:normalised", "normalised-for-confidence")
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    batch = torch.rand(2, 1, 8, 8, generator=seeded()), torch.tensor([1, 2])
    seen = observe_steps(batch, model=ModelSpec(name="normalised-for-confidence"), data=data)
    (found,) = cpl(steps=2)([Case((replace(seen, training=replace(seen.training, mode="train")),))], rng=seeded())
    assert found.evidence
    assert not found.confidence.requires_grad


def test_more_examples_than_in_the_calibration_leave_confidence_undecided() -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    batch = torch.rand(200, 1, 8, 8, generator=seeded()), torch.randint(4, (200,), generator=seeded())
    case = Case((observe_steps(batch, model=ModelSpec(name="lenet_dlg"), data=data),))
    (found,) = cpl(steps=1)([case], rng=seeded())
    assert bool(found.confidence.isnan().all())
    assert any("confidence is undecided" in note and "examples" in note for note in found.notes)


def test_curvature_is_computed_only_if_confidence_depends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(estimates, "measure_curvature", fail)
    attack = inverting_gradients(steps=31).copy_with(stop=Stop(give_up=0.5, hopeless=0.0, unexplained=0.0))
    case, _, _ = make_image_case()
    (found,), (null,) = (one([case], rng=seeded()) for one in (attack, attack.null()))
    assert torch.equal(found.confidence, null.confidence)
    assert any("was given up" in note for note in found.notes)
    model, data = ModelSpec(name="lenet_cpl"), DataSpec(shape=(3, 16, 16), num_classes=10)
    (many,) = inverting_gradients(steps=2)([Case((observe_steps(draw_smooth_images(20), model=model, data=data),))], rng=seeded())
    assert bool(many.confidence.isnan().all())
    assert any("for a number of examples of at most 16, and this answer has 20" in note for note in many.notes)
    with pytest.raises(AssertionError):
        inverting_gradients(steps=2)([case], rng=seeded())


def test_files_hold_confidence_and_evidence(tmp_path: Path) -> None:
    case, _, _ = make_image_case()
    (found,) = cpl(steps=1)([case], rng=seeded())
    path = tmp_path / "answer.safetensors"
    found.write(path)
    again = Reconstruction.read(path)
    assert torch.allclose(again.confidence, found.confidence, equal_nan=True)
    assert again.evidence == found.evidence


@pytest.mark.parametrize(("std", "is_known"), [(0.5, True), (0.48, False)])
def test_exact_images_slightly_outside_their_range_are_undecided(std: float, is_known: bool) -> None:
    """With another standard deviation than the client's, images are solved for that are too bright and too dark by a little."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.5,), std=(0.5,))
    x = torch.rand(1, 1, 8, 8, generator=seeded()).round()
    seen = observe_steps((x, torch.tensor([1])), model=ModelSpec(name="mlp"), data=replace(data, std=(std,)))
    (found,) = exact(fallback="none")([Case((replace(seen, data=data),))], rng=seeded())
    assert found.route == "linear"
    assert (found.confidence[0] > 0.9) == is_known
    assert isnan(found.confidence[0]) != is_known
    assert any("instead of 0 to 1: if clients normalise" in note for note in found.notes) != is_known


def test_exact_images_far_outside_their_range_are_undecided_by_any_closed_form() -> None:
    """The client's normalisation is not stated, so that the answer has values of -2 to 2, which are no errors."""
    _, x, y = make_image_case(1)
    inputs, data = (x - x.mean()) / x.std(), DataSpec(shape=(1, 8, 8), num_classes=4)
    case = Case((observe_steps((inputs, y), model=ModelSpec(name="lenet_dlg"), data=data),))
    (found,) = exact(fallback="none")([case], rng=seeded())
    assert found.route == "layers"
    assert float((found.x - inputs).square().mean()) < 1e-6
    assert isnan(float(found.confidence[0]))
    assert any("instead of 0 to 1" in note or "standardised" in note for note in found.notes)
