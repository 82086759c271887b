"""Tests that confidence is a probability computed from evidence, and undecided if the calibration does not apply."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from generators import seeded
from torch import Tensor, nn

from attacker.attacks import Attack, Case, cpl, dlg, exact, inverting_gradients
from attacker.attacks.confidence import estimate_probabilities, estimates, evidence, find_curve
from attacker.attacks.confidence.curves import CALIBRATION_FILE, FACT_WORDS, MIN_PROBABILITY, Curve
from attacker.attacks.optimisers.descent import Stop
from attacker.reconstruction import Reconstruction
from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation
from fedsim.recording.codec import encode

Make = Callable[..., tuple[Case, Tensor, Tensor]]
LOW_CONFIDENCE = 0.2


def smooth_images(count: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Return colour images of a few sine waves, and labels of ten classes."""
    rng, grid = seeded(11), torch.linspace(0, 1, side)
    phases = torch.rand(count, 3, 4, generator=rng)
    waves = torch.sin(6 * grid[:, None] * phases[..., 0, None, None] + 6 * phases[..., 1, None, None])
    x = 0.5 + 0.25 * waves + 0.2 * torch.cos(7 * grid * phases[..., 2, None, None] + 6 * phases[..., 3, None, None])
    return x.clamp(0, 1), torch.arange(count) % 10


def test_short_search_has_low_confidence(image_case: Make) -> None:
    cases = [image_case(i)[0] for i in range(3)]
    for attack in (dlg(steps=1), inverting_gradients(steps=3)):
        for found, (_, x, _) in zip(attack(cases, rng=seeded()), (image_case(i) for i in range(3)), strict=True):
            assert float((found.x.clamp(0, 1) - x).square().mean()) > 0.02
            assert float(found.confidence[0]) < LOW_CONFIDENCE


@pytest.mark.parametrize("steps", [20, 60, 100])
def test_unfinished_search_is_never_likely(image_case: Make, steps: int) -> None:
    cases, xs, _ = zip(*(image_case(i) for i in range(4)), strict=True)
    for found, x in zip(inverting_gradients(steps=steps, give_up=0.0)(cases, rng=seeded()), xs, strict=True):
        wrong = float((found.x - x).square().mean()) > 0.009
        assert not (wrong and float(found.confidence[0]) >= 0.5)


@pytest.mark.parametrize(("steps", "restarts", "likely"), [(100, 1, False), (100, 2, False), (160, 1, True)])
def test_likely_answers_of_short_starts_are_undecided(
    image_case: Make, steps: int, restarts: int, likely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several short starts are no longer search. The curve is replaced by one that calls every answer likely."""

    def call_likely(route: str, found: Any, explained: Tensor, data: DataSpec) -> estimates.ConfidenceEstimates:
        return estimates.ConfidenceEstimates(torch.full_like(explained, 0.9), explained, found)

    monkeypatch.setattr(estimates, "judge", call_likely)
    stop = Stop(patience=steps, decrease=0.0, stuck=0.0)
    attack = inverting_gradients(steps=steps, restarts=restarts, polish=0.0).copy_with(stop=stop)
    (found,) = attack([image_case(0)[0]], rng=seeded())
    assert found.evaluations == steps * restarts
    assert (float(found.confidence[0]) >= 0.5) == likely
    assert any("evaluations of the gradient" in note for note in found.notes) != likely


def test_two_epochs_on_one_batch_get_low_confidence(observe: Callable[..., object]) -> None:
    """Such answers explain most of the gradient's power, but none is right, so that confidence must be low."""
    x, y = smooth_images(16)
    data, cases = DataSpec(shape=(3, 16, 16), num_classes=10), []
    for i in range(8):
        one = x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]
        cases.append(Case((_epochs(observe(one, one, model=ModelSpec(name="lenet_cpl"), data=data, client=f"c{i}")),)))
    found = inverting_gradients(steps=100)(cases, rng=seeded())
    assert sum(float((one.explained > 0.7).sum()) for one in found) >= 8
    for one, truth in zip(found, x.split(2), strict=True):
        assert float((one.x[:, None] - truth[None]).square().flatten(2).mean(dim=2).min()) > 0.009
        assert not bool((one.confidence > 0.5).any())


def _epochs(seen: object) -> object:
    """Return an observation of two steps on one batch, declared as two epochs."""
    training = replace(seen.training, steps=None, epochs=2)
    return replace(seen, training=training, num_examples=seen.num_examples // 2)


def test_repeated_answer_has_undecided_confidence(observe: Callable[..., object]) -> None:
    """A client reports six examples and trains on two; the four repeated answers must not count as four more examples."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    x = torch.rand(2, 1, 8, 8, generator=seeded())
    model = ModelSpec(name="mlp", arguments={"hidden": (128,)})
    seen = observe((x, torch.tensor([1, 2])), model=model, data=data)
    (found,) = exact(fallback="none")([Case((replace(seen, num_examples=6),))], rng=seeded())
    assert found.route == "linear"
    assert len(found.x) == 6
    decided = ~found.confidence.isnan()
    assert int(decided.sum()) == 2
    assert float((found.x[decided][:, None] - x[None]).square().flatten(2).mean(dim=2).amin(dim=0).max()) < 1e-6
    assert any("4 of 6 examples, which repeat an earlier" in note for note in found.notes)


def test_evidence_does_not_depend_on_the_scale_of_the_gradient(image_case: Make) -> None:
    """A learning rate ten times smaller gives the same evidence for the same answer."""
    (one, _, _), (other, _, _) = (image_case(0, learning_rate=rate) for rate in (1.0, 0.1))
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


def test_unknown_layer_type_leaves_confidence_undecided(observe: Callable[..., object]) -> None:
    models.admit(f"{__name__}:gated", "gated-for-confidence")
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    case = Case((observe((torch.rand(1, 1, 8, 8), torch.tensor([1])), model=ModelSpec(name="gated-for-confidence"), data=data),))
    (found,) = cpl(steps=2)([case], rng=seeded())
    assert isnan(float(found.confidence[0]))
    assert found.explained is not None
    assert 0 <= float(found.explained[0]) <= 1
    assert any("confidence is undecided" in note and "Gate" in note for note in found.notes)


def train_otherwise(seen: Observation, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Observation:
    """Return the observation with the update of one step on `loss`, a function of the logits, instead of the stated one."""
    weights = {name: w.clone().requires_grad_() for name, w in seen.weights.items()}
    logits = torch.func.functional_call(models.build(seen.model, seen.data), weights, (x,))
    gradients = torch.autograd.grad(loss(logits), list(weights.values()))
    update = {name: -seen.training.learning_rate * g for name, g in zip(weights, gradients, strict=True)}
    return replace(seen, payload=encode(update))


@pytest.mark.parametrize("sender", ["adam", "signsgd"])
def test_answers_to_signs_are_undecided_although_they_explain_all(observe: Callable[..., Observation], sender: str) -> None:
    """The signs of a gradient leave room for images that differ by more than counts as recovered."""
    x, y = smooth_images(3)
    data, wrong = DataSpec(shape=(3, 16, 16), num_classes=10), 0
    for image, label in zip(x, y, strict=True):
        seen = observe((image[None], label[None]), model=ModelSpec(name="lenet_dlg"), data=data)
        size = seen.training.learning_rate if sender == "adam" else 1.0
        signs = {name: size * g.sign() for name, g in seen.update.items()}
        if sender == "adam":
            seen = replace(seen, training=replace(seen.training, optimiser="adam"), payload=encode(signs))
        else:
            seen = replace(seen, defenses=DefenseSpec.parse("signsgd(1.0)"), payload=encode(signs))
        (found,) = inverting_gradients(steps=600, give_up=0.0)([Case((seen,))], rng=seeded())
        assert not bool((found.confidence >= 0.5).any())
        if float(found.explained[0]) > 0.99:  # type: ignore[index]
            wrong += float((found.x.clamp(0, 1)[0] - image).square().mean()) > 0.009
            assert any("the signs of the gradient" in note for note in found.notes)
    assert wrong


def test_search_that_does_not_explain_the_gradient_is_never_likely(observe: Callable[..., object]) -> None:
    """Clients minimise the binary cross-entropy of each label, and the recording states cross-entropy."""
    x, y = smooth_images(2)
    model, target = ModelSpec(name="mlp", arguments={"hidden": (64,)}), nn.functional.one_hot(y, 10).float()
    seen = observe((x, y), model=model, data=DataSpec(shape=(3, 16, 16), num_classes=10))
    seen = train_otherwise(seen, x, lambda z: nn.functional.binary_cross_entropy_with_logits(z, target))
    (found,) = cpl(steps=60)([Case((seen,))], rng=seeded())
    assert float((found.x.clamp(0, 1)[:, None] - x[None]).square().flatten(2).mean(dim=2).min()) > 0.05
    assert not bool((found.confidence >= 0.5).any())
    assert any("of the gradient unexplained beyond known noise" in note for note in found.notes)


def test_search_for_a_row_behind_label_smoothing_is_never_likely(observe: Callable[..., object]) -> None:
    x, y = torch.rand(1, 20, generator=seeded(1)), torch.tensor([2])
    model = ModelSpec(name="mlp", arguments={"hidden": (32, 16)})
    seen = observe((x, y), model=model, data=DataSpec(shape=(20,), num_classes=4))
    seen = train_otherwise(seen, x, lambda z: nn.functional.cross_entropy(z, y, label_smoothing=0.2))
    (found,) = cpl(steps=40)([Case((seen,))], rng=seeded())
    assert float((found.x - x).abs().max()) > 0.05
    assert isnan(float(found.confidence[0]))


def test_search_for_a_standardised_row_is_likely_only_if_its_scale_is_stated(observe: Callable[..., object]) -> None:
    """The search's limits of 0 and 1 hold for values that clients do not have, unless the data state how columns are scaled."""
    x, y = torch.rand(1, 40, generator=seeded(1)), torch.tensor([1])
    x[0, 0] = 0.85
    mean, std = (0.5,) + (0.0,) * 39, (0.25,) + (1.0,) * 39
    stated = DataSpec(shape=(40,), num_classes=3, mean=mean, std=std)
    seen = observe((x, y), model=ModelSpec(name="mlp", arguments={"hidden": (48, 24)}), data=stated)
    attack = inverting_gradients(steps=200, tv=0.0)
    (found,) = attack([Case((seen,))], rng=seeded())
    assert float((found.x - x).abs().max()) < 0.05
    assert float(found.confidence[0]) > 0.9
    (doubted,) = attack([Case((replace(seen, data=replace(stated, mean=(0.0,), std=(1.0,))),))], rng=seeded())
    assert float((doubted.x - stated.normalise(x)).abs().max()) > 0.3
    assert isnan(float(doubted.confidence[0]))
    assert any("set mean and std" in note for note in doubted.notes)


class EveryOther(nn.Module):
    """A network that drops every other column of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 8, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[..., ::2])


def test_search_for_pixels_that_the_network_does_not_read_is_never_likely(observe: Callable[..., object]) -> None:
    models.admit(f"{__name__}:EveryOther", "columns-for-confidence")
    x, y = smooth_images(1)
    seen = observe((x, y), model=ModelSpec(name="columns-for-confidence"), data=DataSpec(shape=(3, 16, 16), num_classes=10))
    (found,) = cpl(steps=60)([Case((seen,))], rng=seeded())
    assert found.explained is not None
    assert float(found.explained[0]) > 0.99
    assert float((found.x.clamp(0, 1) - x).square().mean()) > 0.05
    assert isnan(float(found.confidence[0]))
    assert any("does not depend on all of its values" in note for note in found.notes)


def smooth() -> nn.Module:
    """Return a network of sigmoids, as PyTorch initialises it: its gradient shows little of an image but the mean colour."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(1, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 1, 2))
        hidden = [layer for convolution in convolutions for layer in (convolution, nn.Sigmoid())]
        return nn.Sequential(*hidden, nn.Flatten(), nn.Linear(12 * 16, 4))


def test_a_grey_answer_which_the_gradient_does_not_determine_is_never_likely(observe: Callable[..., object]) -> None:
    models.admit(f"{__name__}:smooth", "smooth-for-confidence")
    ring, grey = torch.zeros(1, 1, 16, 16), torch.full((1, 1, 16, 16), 0.3)
    ring[..., 3:13, 3:13], ring[..., 4:12, 4:12] = 1.0, 0.0
    model, data = ModelSpec(name="smooth-for-confidence"), DataSpec(shape=(1, 16, 16), num_classes=4)
    weights = {name: p.detach() for name, p in smooth().named_parameters()}
    attack = inverting_gradients(steps=200, polish=0.0)
    seen = observe((ring, torch.tensor([2])), model=model, data=data, weights=weights)
    (found,) = attack([Case((seen,))], rng=seeded())
    assert found.explained is not None
    assert float(found.explained[0]) > 0.999
    assert float((found.x - ring).square().mean()) > 0.05
    assert isnan(float(found.confidence[0]))
    assert any("nearly of one colour" in note for note in found.notes)
    assert float((found.x - grey).square().mean()) < 0.009


def normalised() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))


def test_confidence_beside_batch_norm_in_training_mode_has_no_graph(observe: Callable[..., object]) -> None:
    models.admit(f"{__name__}:normalised", "normalised-for-confidence")
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    batch = torch.rand(2, 1, 8, 8, generator=seeded()), torch.tensor([1, 2])
    seen = observe(batch, model=ModelSpec(name="normalised-for-confidence"), data=data)
    (found,) = cpl(steps=2)([Case((replace(seen, training=replace(seen.training, mode="train")),))], rng=seeded())
    assert found.evidence
    assert not found.confidence.requires_grad


def test_more_examples_than_in_the_calibration_leave_confidence_undecided(observe: Callable[..., object]) -> None:
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    batch = torch.rand(200, 1, 8, 8, generator=seeded()), torch.randint(4, (200,), generator=seeded())
    case = Case((observe(batch, model=ModelSpec(name="lenet_dlg"), data=data),))
    (found,) = cpl(steps=1)([case], rng=seeded())
    assert bool(found.confidence.isnan().all())
    assert any("confidence is undecided" in note and "examples" in note for note in found.notes)


def test_curvature_is_computed_only_if_confidence_depends_on_it(
    observe: Callable[..., object], image_case: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(estimates, "measure_curvature", fail)
    attack = inverting_gradients(steps=31).copy_with(stop=Stop(give_up=0.5, hopeless=0.0, unexplained=0.0))
    case, _, _ = image_case()
    (found,), (null,) = (one([case], rng=seeded()) for one in (attack, attack.null()))
    assert torch.equal(found.confidence, null.confidence)
    assert any("was given up" in note for note in found.notes)
    model, data = ModelSpec(name="lenet_cpl"), DataSpec(shape=(3, 16, 16), num_classes=10)
    (many,) = inverting_gradients(steps=2)([Case((observe(smooth_images(20), model=model, data=data),))], rng=seeded())
    assert bool(many.confidence.isnan().all())
    assert any("for a number of examples of at most 16, and this answer has 20" in note for note in many.notes)
    with pytest.raises(AssertionError):
        inverting_gradients(steps=2)([case], rng=seeded())


def test_probabilities_within_the_unsure_range_are_undecided() -> None:
    own = Curve(("misfit",), (-1.0,), 0.0, (-9.0,), (9.0,), {}, 10, 5, unsure=(0.1, 0.9))
    probabilities = estimate_probabilities(own, {"misfit": torch.tensor([-4.0, -1.0, 0.0, 1.0, 4.0])}, 5)
    assert probabilities.isnan().tolist() == [False, True, True, True, False]
    assert float(probabilities[0]) > 0.9
    assert float(probabilities[4]) < 0.1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("examples", 6.0, "a number of examples of at most 16, and this answer has 64"),
        ("misfit", -3.0, "an unexplained share of the gradient's power of at least 0.01, and this answer has 0.001"),
    ],
)
def test_a_curve_that_does_not_apply_names_the_limit_in_its_own_unit(name: str, value: float, words: str) -> None:
    own = Curve((), (), 0.0, (), (), {"examples": (0.0, 4.0), "misfit": (-2.0, 0.0)}, 10, 5, unsure=(0.0, 0.0))
    inside = {"examples": torch.tensor([3.0]), "misfit": torch.tensor([-1.0])}
    assert own.explain_unfitted_facts(inside) == ""
    assert words in own.explain_unfitted_facts(inside | {name: torch.tensor([value])})


def test_the_calibration_file_and_the_code_agree() -> None:
    stated = json.loads(CALIBRATION_FILE.read_text())["curves"]
    known = set(evidence.FEATURE_NAMES)
    assert {(one["route"], one["data"]) for one in stated} >= {
        ("optimisation", "images"), ("optimisation", "rows"), ("optimisation from a closed form", "images"),
        ("linear", "images"), ("linear", "rows"), ("layers", "images"),
        ("prior alone", "images"), ("prior alone", "rows"),
    }  # fmt: skip
    for one in stated:
        own = find_curve(one["route"], is_image=one["data"] == "images")
        assert own is not None
        assert set(own.features) <= known
        assert set(own.facts) <= set(FACT_WORDS)
        assert len(own.features) == len(own.weights) == len(own.low) == len(own.high)
        assert 0 <= own.recovered <= own.answers
        for ends in (own.low, own.high):
            p = estimate_probabilities(own, {name: torch.tensor([end]) for name, end in zip(own.features, ends, strict=True)}, 1)
            assert float(p[0]) == pytest.approx(min(max(float(p[0]), MIN_PROBABILITY), 1 - MIN_PROBABILITY))


def test_files_hold_confidence_and_evidence(image_case: Make, tmp_path: Path) -> None:
    case, _, _ = image_case()
    (found,) = cpl(steps=1)([case], rng=seeded())
    path = tmp_path / "answer.safetensors"
    found.write(path)
    again = Reconstruction.read(path)
    assert torch.allclose(again.confidence, found.confidence, equal_nan=True)
    assert again.evidence == found.evidence


@pytest.mark.parametrize(("std", "is_known"), [(0.5, True), (0.48, False)])
def test_exact_images_slightly_outside_their_range_are_undecided(
    observe: Callable[..., object], std: float, is_known: bool
) -> None:
    """With another standard deviation than the client's, images are solved for that are too bright and too dark by a little."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.5,), std=(0.5,))
    x = torch.rand(1, 1, 8, 8, generator=seeded()).round()
    seen = observe((x, torch.tensor([1])), model=ModelSpec(name="mlp"), data=replace(data, std=(std,)))
    (found,) = exact(fallback="none")([Case((replace(seen, data=data),))], rng=seeded())
    assert found.route == "linear"
    assert (found.confidence[0] > 0.9) == is_known
    assert isnan(found.confidence[0]) != is_known
    assert any("instead of 0 to 1: if clients normalise" in note for note in found.notes) != is_known


@pytest.mark.parametrize("attack", [exact(fallback="none"), inverting_gradients(steps=400)])
@pytest.mark.parametrize(("shift", "standardised"), [(0.0, True), (0.05, False)])
def test_images_that_are_standardised_by_their_own_mean_are_undecided(
    image_case: Make, observe: Callable[..., object], attack: Attack, shift: float, standardised: bool
) -> None:
    """The client's mean is the image's own, and the stated one is not: the answer has another brightness than the image."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.5,), std=(0.25,))
    _, x, y = image_case(1)
    seen = data.denormalise((x - x.mean()) / x.std(correction=0)) + shift
    assert 0 <= float(seen.min()) <= float(seen.max()) <= 1, "else the answer is undecided for its range"
    case = Case((observe((seen, y), model=ModelSpec(name="lenet_dlg"), data=data),))
    (found,) = attack([case], rng=seeded())
    assert float((found.x - seen).square().mean()) < 1e-4
    assert isnan(float(found.confidence[0])) == standardised
    assert standardised or float(found.confidence[0]) > 0.9
    assert any("standardised each image by its own mean" in note for note in found.notes) == standardised


def test_an_image_of_one_colour_that_fills_up_a_batch_is_never_likely(observe: Callable[..., object]) -> None:
    """A client that leaves out its last, smaller batch reports more examples than it trains on."""
    x, y = smooth_images(3)
    seen = observe((x, y), model=ModelSpec(name="mlp"), data=DataSpec(shape=(3, 16, 16), num_classes=10))
    (found,) = inverting_gradients(steps=400, give_up=0.0)([Case((replace(seen, num_examples=4),))], rng=seeded())
    wrong = (found.x.clamp(0, 1)[:, None] - x[None]).square().flatten(2).mean(dim=2).amin(dim=1) > 0.1
    assert int(wrong.sum()) == 1
    assert isnan(float(found.confidence[wrong]))
    assert any("of the gradient is unexplained" in note for note in found.notes)


def test_exact_images_far_outside_their_range_are_undecided_by_any_closed_form(
    image_case: Make, observe: Callable[..., object]
) -> None:
    """The client's normalisation is not stated, so that the answer has values of -2 to 2, which are no errors."""
    _, x, y = image_case(1)
    inputs, data = (x - x.mean()) / x.std(), DataSpec(shape=(1, 8, 8), num_classes=4)
    case = Case((observe((inputs, y), model=ModelSpec(name="lenet_dlg"), data=data),))
    (found,) = exact(fallback="none")([case], rng=seeded())
    assert found.route == "layers"
    assert float((found.x - inputs).square().mean()) < 1e-6
    assert isnan(float(found.confidence[0]))
    assert any("instead of 0 to 1" in note or "standardised" in note for note in found.notes)
