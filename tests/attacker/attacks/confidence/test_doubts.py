"""Tests that likely answers become undecided where there is reason to doubt them."""

from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import Any

import pytest
import torch
from generators import draw_smooth_images, seed_default, seeded
from observations import make_image_case, observe_steps
from torch import Tensor, nn

from attacker.attacks import Attack, Case, cpl, exact, inverting_gradients
from attacker.attacks.confidence import estimates
from attacker.attacks.optimisers.stopping import Stop
from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation
from fedsim.recording.codec import encode


@pytest.mark.parametrize("steps", [20, 60, 100])
def test_unfinished_search_is_never_likely(steps: int) -> None:
    cases, xs, _ = zip(*(make_image_case(i) for i in range(4)), strict=True)
    for found, x in zip(inverting_gradients(steps=steps, give_up=0.0)(cases, rng=seeded()), xs, strict=True):
        wrong = float((found.x - x).square().mean()) > 0.009
        assert not (wrong and float(found.confidence[0]) >= 0.5)


@pytest.mark.parametrize(("steps", "restarts", "likely"), [(100, 1, False), (100, 2, False), (160, 1, True)])
def test_likely_answers_of_short_starts_are_undecided(
    steps: int, restarts: int, likely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several short starts are no longer search. The curve is replaced by one that calls every answer likely."""

    def call_likely(route: str, found: Any, explained: Tensor, data: DataSpec) -> estimates.ConfidenceEstimates:
        return estimates.ConfidenceEstimates(torch.full_like(explained, 0.9), explained, found)

    monkeypatch.setattr(estimates, "judge", call_likely)
    stop = Stop(patience=steps, decrease=0.0, stuck=0.0)
    attack = inverting_gradients(steps=steps, restarts=restarts, polish=0.0).copy_with(stop=stop)
    (found,) = attack([make_image_case(0)[0]], rng=seeded())
    assert found.evaluations == steps * restarts
    assert (float(found.confidence[0]) >= 0.5) == likely
    assert any("evaluations of the gradient" in note for note in found.notes) != likely


@pytest.mark.parametrize(("misfit", "likely"), [(1e-4, False), (1e-6, True)])
def test_likely_answers_of_a_stopped_search_are_undecided_unless_it_had_converged(
    misfit: float, likely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is stopped at three quarters of its iterations, as by Ctrl-C; the shares of the gradient are given."""

    def call_likely(route: str, found: Any, explained: Tensor, data: DataSpec) -> estimates.ConfidenceEstimates:
        return estimates.ConfidenceEstimates(torch.full_like(explained, 0.9), explained, found)

    def stop_late(done: int, total: int, message: str) -> None:
        if 4 * done >= 3 * total:
            raise KeyboardInterrupt

    monkeypatch.setattr(estimates, "judge", call_likely)
    monkeypatch.setattr(estimates, "compute_shares", lambda found: (torch.tensor(misfit), torch.tensor(0.0), 1000))
    attack = inverting_gradients(steps=240, polish=0.0, give_up=0.0)
    (found,) = attack([make_image_case(0)[0]], rng=seeded(), progress=stop_late)
    (ended,) = attack([make_image_case(0)[0]], rng=seeded())
    assert found.interrupted
    assert (float(found.confidence[0]) >= 0.5) == likely
    assert any("the search was stopped before its end" in note for note in found.notes) != likely
    assert float(ended.confidence[0]) >= 0.5


def train_otherwise(seen: Observation, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Observation:
    """Return the observation with the update of one step on `loss`, a function of the logits, instead of the stated one."""
    weights = {name: w.clone().requires_grad_() for name, w in seen.weights.items()}
    logits = torch.func.functional_call(models.build(seen.model, seen.data), weights, (x,))
    gradients = torch.autograd.grad(loss(logits), list(weights.values()))
    update = {name: -seen.training.learning_rate * g for name, g in zip(weights, gradients, strict=True)}
    return replace(seen, payload=encode(update))


@pytest.mark.parametrize("sender", ["adam", "signsgd"])
def test_answers_to_signs_are_undecided_although_they_explain_all(sender: str) -> None:
    """The signs of a gradient leave room for images that differ by more than counts as recovered."""
    x, y = draw_smooth_images(3)
    data, cases, wrong = DataSpec(shape=(3, 16, 16), num_classes=10), list[Case](), 0
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        seen = observe_steps((image[None], label[None]), model=ModelSpec(name="lenet_dlg"), data=data, client=f"c{i}")
        size = seen.training.learning_rate if sender == "adam" else 1.0
        signs = {name: size * g.sign() for name, g in seen.update.items()}
        if sender == "adam":
            seen = replace(seen, training=replace(seen.training, optimiser="adam"), payload=encode(signs))
        else:
            seen = replace(seen, defenses=DefenseSpec.parse("signsgd(1.0)"), payload=encode(signs))
        cases.append(Case((seen,)))
    for image, found in zip(x, inverting_gradients(steps=600, give_up=0.0)(cases, rng=seeded()), strict=True):
        assert not bool((found.confidence >= 0.5).any())
        if float(found.explained[0]) > 0.99:
            wrong += float((found.x.clamp(0, 1)[0] - image).square().mean()) > 0.009
            assert any("the signs of the gradient" in note for note in found.notes)
    assert wrong


def test_search_that_does_not_explain_the_gradient_is_never_likely() -> None:
    """Clients minimise the binary cross-entropy of each label, and the recording states cross-entropy."""
    x, y = draw_smooth_images(2)
    model, target = ModelSpec(name="mlp", arguments={"hidden": (64,)}), nn.functional.one_hot(y, 10).float()
    seen = observe_steps((x, y), model=model, data=DataSpec(shape=(3, 16, 16), num_classes=10))
    seen = train_otherwise(seen, x, lambda z: nn.functional.binary_cross_entropy_with_logits(z, target))
    (found,) = cpl(steps=60)([Case((seen,))], rng=seeded())
    assert float((found.x.clamp(0, 1)[:, None] - x[None]).square().flatten(2).mean(dim=2).min()) > 0.05
    assert not bool((found.confidence >= 0.5).any())
    assert any("of the gradient unexplained beyond known noise" in note for note in found.notes)


def test_search_for_a_row_behind_label_smoothing_is_never_likely() -> None:
    x, y = torch.rand(1, 20, generator=seeded(1)), torch.tensor([2])
    model = ModelSpec(name="mlp", arguments={"hidden": (32, 16)})
    seen = observe_steps((x, y), model=model, data=DataSpec(shape=(20,), num_classes=4))
    seen = train_otherwise(seen, x, lambda z: nn.functional.cross_entropy(z, y, label_smoothing=0.2))
    (found,) = cpl(steps=40)([Case((seen,))], rng=seeded())
    assert float((found.x - x).abs().max()) > 0.05
    assert isnan(float(found.confidence[0]))


def test_search_for_a_standardised_row_is_likely_only_if_its_scale_is_stated() -> None:
    """The search's limits of 0 and 1 hold for values that clients do not have, unless the data state how columns are scaled."""
    x, y = torch.rand(1, 40, generator=seeded(1)), torch.tensor([1])
    x[0, 0] = 0.85
    mean, std = (0.5,) + (0.0,) * 39, (0.25,) + (1.0,) * 39
    stated = DataSpec(shape=(40,), num_classes=3, mean=mean, std=std)
    seen = observe_steps((x, y), model=ModelSpec(name="mlp", arguments={"hidden": (48, 24)}), data=stated)
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


def test_search_for_pixels_that_the_network_does_not_read_is_never_likely() -> None:
    models.admit(f"{__name__}:EveryOther", "columns-for-confidence")
    x, y = draw_smooth_images(1)
    seen = observe_steps((x, y), model=ModelSpec(name="columns-for-confidence"), data=DataSpec(shape=(3, 16, 16), num_classes=10))
    (found,) = cpl(steps=60)([Case((seen,))], rng=seeded())
    assert float(found.explained[0]) > 0.99
    assert float((found.x.clamp(0, 1) - x).square().mean()) > 0.05
    assert isnan(float(found.confidence[0]))
    assert any("does not depend on all of its values" in note for note in found.notes)


def smooth() -> nn.Module:
    """Return a network of sigmoids, as PyTorch initialises it: its gradient shows little of an image but the mean colour."""
    with seed_default(0):
        convolutions = (nn.Conv2d(1, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 2, 2), nn.Conv2d(12, 12, 5, 1, 2))
        hidden = [layer for convolution in convolutions for layer in (convolution, nn.Sigmoid())]
        return nn.Sequential(*hidden, nn.Flatten(), nn.Linear(12 * 16, 4))


def test_a_grey_answer_which_the_gradient_does_not_determine_is_never_likely() -> None:
    models.admit(f"{__name__}:smooth", "smooth-for-confidence")
    ring, grey = torch.zeros(1, 1, 16, 16), torch.full((1, 1, 16, 16), 0.3)
    ring[..., 3:13, 3:13], ring[..., 4:12, 4:12] = 1.0, 0.0
    model, data = ModelSpec(name="smooth-for-confidence"), DataSpec(shape=(1, 16, 16), num_classes=4)
    weights = {name: p.detach() for name, p in smooth().named_parameters()}
    attack = inverting_gradients(steps=200, polish=0.0)
    seen = observe_steps((ring, torch.tensor([2])), model=model, data=data, weights=weights)
    (found,) = attack([Case((seen,))], rng=seeded())
    assert float(found.explained[0]) > 0.999
    assert float((found.x - ring).square().mean()) > 0.05
    assert isnan(float(found.confidence[0]))
    assert any("nearly of one colour" in note for note in found.notes)
    assert float((found.x - grey).square().mean()) < 0.009


def flat() -> nn.Module:
    """Return a LeNet of sigmoids with the weights that PyTorch draws, whose gradient hardly depends on details of the image."""
    layers = [nn.Conv2d(3 if i == 0 else 12, 12, 5, stride=stride, padding=2) for i, stride in enumerate((2, 2, 1))]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Sigmoid())), nn.Flatten(), nn.Linear(768, 10))


def test_a_search_that_converged_early_is_not_likely_if_the_gradient_leaves_much_open() -> None:
    """Its answers explain all but 1e-8 of the gradient after 40 evaluations, and are wrong by twice what counts as recovered."""
    models.admit(f"{__name__}:flat", "flat-for-confidence")
    x, y = draw_smooth_images(4, 32)
    model, data = ModelSpec(name="flat-for-confidence"), DataSpec(shape=(3, 32, 32), num_classes=10)
    weights = {name: p.detach() for name, p in models.build(model, data, seed=1).named_parameters()}
    cases = [Case((observe_steps((x[i : i + 1], y[i : i + 1]), model=model, data=data, weights=weights),)) for i in range(4)]
    for i, found in enumerate(cpl(steps=100, restarts=1)(cases, rng=seeded())):
        assert float((found.x.clamp(0, 1) - x[i]).square().mean()) > 0.009
        assert not float(found.confidence[0]) >= 0.5


@pytest.mark.parametrize("attack", [exact(fallback="none"), inverting_gradients(steps=400)])
@pytest.mark.parametrize(("shift", "standardised"), [(0.0, True), (0.05, False)])
def test_images_that_are_standardised_by_their_own_mean_are_undecided(attack: Attack, shift: float, standardised: bool) -> None:
    """The client's mean is the image's own, and the stated one is not: the answer has another brightness than the image."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.5,), std=(0.25,))
    _, x, y = make_image_case(1)
    seen = data.denormalise((x - x.mean()) / x.std(correction=0)) + shift
    assert 0 <= float(seen.min()) <= float(seen.max()) <= 1, "else the answer is undecided for its range"
    case = Case((observe_steps((seen, y), model=ModelSpec(name="lenet_dlg"), data=data),))
    (found,) = attack([case], rng=seeded())
    assert float((found.x - seen).square().mean()) < 1e-4
    assert isnan(float(found.confidence[0])) == standardised
    assert standardised or float(found.confidence[0]) > 0.9
    assert any("standardised each image by its own mean" in note for note in found.notes) == standardised


def test_an_image_of_one_colour_that_fills_up_a_batch_is_never_likely() -> None:
    """A client that leaves out its last, smaller batch reports more examples than it trains on."""
    x, y = draw_smooth_images(3)
    seen = observe_steps((x, y), model=ModelSpec(name="mlp"), data=DataSpec(shape=(3, 16, 16), num_classes=10))
    (found,) = inverting_gradients(steps=400, give_up=0.0)([Case((replace(seen, num_examples=4),))], rng=seeded())
    wrong = (found.x.clamp(0, 1)[:, None] - x[None]).square().flatten(2).mean(dim=2).amin(dim=1) > 0.1
    assert int(wrong.sum()) == 1
    assert isnan(float(found.confidence[wrong]))
    assert any("of the gradient is unexplained" in note for note in found.notes)


@pytest.mark.parametrize(("factor", "steps"), [(1.0, 600), (0.5, 600), (1.3, 600), (0.5, 12)])
def test_unlikely_answers_are_undecided_if_only_a_factor_refutes_them(factor: float, steps: int) -> None:
    """Clients whose learning rate is not the stated one. A search that failed remains unlikely."""
    x, y = draw_smooth_images(1)
    seen = observe_steps((x, y), model=ModelSpec(name="lenet_dlg"), data=DataSpec(shape=(3, 16, 16), num_classes=10))
    seen = replace(seen, payload=encode({name: factor * u for name, u in seen.update.items()}))
    (found,) = inverting_gradients(steps=steps, polish=0.0, give_up=0.0)([Case((seen,))], rng=seeded())
    recovered = float((found.x.clamp(0, 1) - x).square().mean()) <= 0.009
    assert recovered == (steps == 600)
    refuted = any(f"but for a factor of {factor:.3g}," in note for note in found.notes)
    assert refuted == (recovered and factor != 1)
    assert isnan(float(found.confidence[0])) == refuted
    assert refuted or (float(found.confidence[0]) > 0.5) == recovered


def state_confidences(monkeypatch: pytest.MonkeyPatch, *confidences: float) -> None:
    """Replace the curve and other doubts, so that the examples of an answer have these confidences in turn."""

    def judge(route: str, found: Any, explained: Tensor, data: DataSpec) -> estimates.ConfidenceEstimates:
        return estimates.ConfidenceEstimates(torch.tensor(confidences)[: len(explained)], explained, found)

    monkeypatch.setattr(estimates, "judge", judge)
    monkeypatch.setattr(estimates, "list_search_doubts", lambda *_: iter(()))
    monkeypatch.setattr(estimates, "_doubt_scale", lambda judged, *_: judged)


@pytest.mark.parametrize(("rate", "changes"), [(1e-5, False), (0.3, True)])
@pytest.mark.parametrize("merged", [True, False])
def test_confidence_is_decided_only_at_its_ends_if_steps_that_matter_are_taken_for_one(
    rate: float, changes: bool, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps that are simulated in an assumed order, confidence is decided only at its ends as well."""
    state_confidences(monkeypatch, 0.05, 0.3, 0.7, 0.95)
    x, y = draw_smooth_images(4)
    batches = [(x[:2], y[:2]), (x[2:], y[2:])]
    data = DataSpec(shape=(3, 16, 16), num_classes=10)
    seen = observe_steps(*batches, model=ModelSpec(name="lenet_dlg"), data=data, learning_rate=rate)
    attack = inverting_gradients(steps=4, polish=0.0, give_up=0.0, local_steps="one_batch" if merged else "simulated")
    (found,) = attack([Case((seen,))], rng=seeded())
    between = changes or not merged
    assert found.confidence.isnan().tolist() == [False, between, between, False]
    assert any("were taken for one" in note for note in found.notes) == (merged and changes)


LONG, SHORT = cpl(steps=60), inverting_gradients(steps=2, tv=0.0, polish=0.0, give_up=0.0)


@pytest.mark.parametrize(("rows", "attack", "undecided"), [(2, LONG, True), (2, SHORT, False), (1, LONG, False)])
def test_unlikely_rows_of_a_batch_are_undecided_if_the_gradient_is_explained(
    rows: int, attack: Attack, undecided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state_confidences(monkeypatch, 0.05, 0.95)
    x, y = torch.rand(rows, 12, generator=seeded(1)), torch.arange(rows)
    seen = observe_steps(
        (x, y), model=ModelSpec(name="mlp", arguments={"hidden": (32,)}), data=DataSpec(shape=(12,), num_classes=3)
    )
    (found,) = attack([Case((seen,))], rng=seeded())
    assert (float(found.explained[0]) > 0.98) == (attack is not SHORT)
    assert isnan(float(found.confidence[0])) == undecided
    assert any("rows of a batch" in note for note in found.notes) == undecided
    assert not found.confidence[1:].isnan().any()


class Signals(nn.Module):
    """A network of convolutions for table rows that are signals of two channels, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv1d(2, 12, 7, padding=3), nn.Tanh(), nn.Conv1d(12, 16, 5, stride=2, padding=2), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(16 * 16, 32), nn.ELU(), nn.Linear(32, 6)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unflatten(1, (2, 32)))


@pytest.mark.parametrize(("steps", "explained"), [(150, True), (10, False)])
def test_table_rows_of_a_batch_that_explain_the_gradient_are_not_unlikely(steps: int, explained: bool) -> None:
    """The calibration has batches of four rows only from searches that ended early, and calls all answers to them wrong."""
    models.admit(f"{__name__}:Signals", "signals-for-confidence")
    angles = torch.linspace(0, 6.28, 32) * (1 + 4 * torch.rand(3, 2, 1, generator=seeded(5)))
    x, y = (0.5 + 0.4 * angles.sin()).flatten(1), torch.tensor([0, 2, 5])
    seen = observe_steps((x, y), model=ModelSpec(name="signals-for-confidence"), data=DataSpec(shape=(64,), num_classes=6))
    (found,) = inverting_gradients(steps=steps, tv=0.0, give_up=0.0, polish=0.0)([Case((seen,))], rng=seeded())
    assert (float(found.explained[0]) > 0.99) == explained
    right = bool(((found.x[:, None] - x[None]).abs().amax(dim=2).amin(dim=1) < 0.05).all())
    assert right == explained
    assert bool((found.confidence < 0.5).all()) != explained
    assert any("rows of a batch" in note for note in found.notes) == explained
