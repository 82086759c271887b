"""Tests of the attack ROG: its decoder, its start, its loss behind each compressor, and its reconstructions."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import observe_steps
from torch import Tensor
from torch.nn.functional import interpolate

from attacker.attacks import Case, GradientMatching, inverting_gradients, rog
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.initialisation import get_start
from attacker.attacks.matching.names import get_decoder
from attacker.scoring.metrics import psnr
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=5)
LABELS = torch.tensor([0, 3])
BICUBIC_A = -0.75
"""Coefficient of PyTorch's bicubic kernel."""


def draw_images(seed: int = 0, side: int = 4) -> Tensor:
    """Return two images enlarged from `side` pixels, which `bicubic4` can express for a side of 4."""
    return interpolate(torch.rand(2, 3, side, side, generator=seeded(seed)), size=(16, 16), mode="bicubic", align_corners=False)


def observe_once(defense: str = "", *, epochs: int = 1, rate: float = 0.1, side: int = 4) -> Case:
    seen = observe_steps(
        *[(draw_images(side=side), LABELS)] * epochs,
        model=ModelSpec(name="lenet_rog"),
        data=DATA,
        learning_rate=rate,
        defense=defense,
    )
    training = replace(seen.training, epochs=epochs, steps=None)
    return Case((replace(seen, num_examples=2, training=training),), known_labels=LABELS)


def measure_loss(attack: GradientMatching, case: Case, x: Tensor) -> float:
    """Return the loss of an attack in pixels at examples x, as a share of that of a zero gradient."""
    batch = CaseBatch(attack, [case])
    problem = batch.build_problem([0], x.reshape(1, -1), LABELS[None], None)
    loss = batch.evaluate(x.reshape(1, -1), problem)[1] / problem["gain"]
    return float(loss / batch.views[0].worst)


def test_decoder_agrees_with_the_bicubic_kernel() -> None:
    """The reference is the matrix of the cubic convolution kernel with a = -0.75, with pixels at the border repeated."""

    def weigh(distance: Tensor) -> Tensor:
        d, a = distance.abs(), BICUBIC_A
        near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * (d**3 - 5 * d**2 + 8 * d - 4)
        return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))

    matrix = torch.zeros(16, 4, dtype=torch.float64)
    for row in range(16):
        at = (row + 0.5) / 4 - 0.5
        first = int(torch.tensor(at).floor())
        for tap in range(first - 1, first + 3):
            matrix[row, min(max(tap, 0), 3)] += weigh(torch.tensor(at - tap, dtype=torch.float64))
    z = torch.rand(1, 3, 4, 4, generator=seeded(), dtype=torch.float64)
    torch.testing.assert_close(get_decoder("bicubic4")(DATA).decode(z), matrix @ z @ matrix.T)


def test_start_is_uniform_and_independent_in_the_latent() -> None:
    data = DataSpec(shape=(3, 64, 64), num_classes=5)
    z = get_decoder("bicubic4")(data).encode(get_start("coarse4")(data, torch.zeros(4, dtype=torch.long), seeded()))
    assert z.shape == (4, 3, 16, 16)
    assert float(z.mean()) == pytest.approx(0.5, abs=0.03)
    assert float(z.std()) == pytest.approx(12**-0.5, abs=0.02)
    assert abs(float(((z[..., 1:] - 0.5) * (z[..., :-1] - 0.5)).mean())) < 0.01


@pytest.mark.parametrize("defense", ["", "uniform(3)", "top_k(0.05)", "sign()", "prune(ratio=0.9)", "dgc(0.1)"])
def test_true_examples_have_no_loss_behind_any_compressor(defense: str) -> None:
    """The interval of a quantiser, the entries of a sparsifier and the soft sign leave no distance at the true examples."""
    attack, case = rog(decoder="pixels", tv=0.0), observe_once(defense)
    assert measure_loss(attack, case, draw_images()) < 1e-6
    assert measure_loss(attack, case, draw_images(seed=1)) > 0.05


@pytest.mark.parametrize("defense", ["uniform(3)", "sign()"])
def test_true_examples_have_a_loss_if_the_compressor_is_ignored(defense: str) -> None:
    attack = rog(decoder="pixels", tv=0.0, knows_defense=False)
    assert measure_loss(attack, observe_once(defense), draw_images()) > 1e-3


def test_simulated_epochs_fit_better_than_one_batch() -> None:
    case = observe_once(epochs=5, rate=0.03)
    ways = (rog(decoder="pixels", tv=0.0, local_steps=way, surrogate=False) for way in ("one_batch", "simulated"))
    one, simulated = (measure_loss(attack, case, draw_images()) for attack in ways)
    assert simulated < 1e-6 < 1e-4 < one < 0.5


@pytest.mark.parametrize(("defense", "gain"), [("", 12), ("uniform(3)", 5), ("top_k(0.05)", 8), ("sign()", 1)])
def test_search_in_the_latent_is_better_than_its_null(defense: str, gain: float) -> None:
    """gain: least difference in decibels between the worse image found and the better one of the null.

    The attack, unlike the null, runs without total variation, which is no good prior for images of random colours.
    """
    attack = rog(steps=60, decoder="bicubic4", distance="euclidean", boxed=True, tv=0.0)
    null_attack, case = rog(steps=60, decoder="bicubic4").null(), observe_once(defense)
    (found,), (null,) = attack([case], rng=seeded()), null_attack([case], rng=seeded())
    assert psnr(found.x, draw_images()).min() > psnr(null.x, draw_images()).max() + gain
    assert found.confidence.isnan().all()
    assert "decoder" in " ".join(found.notes)


def test_batched_cases_get_the_answers_of_single_ones() -> None:
    case = observe_once("uniform(3)")
    other = Case((replace(case.observations[0], client="d"),), known_labels=LABELS)
    both = rog(steps=5)([case, other], rng=seeded())
    for one, alone in zip(both, (case, other), strict=True):
        torch.testing.assert_close(one.x, rog(steps=5)([alone], rng=seeded())[0].x, atol=1e-4, rtol=1e-4)


def test_later_phases_start_at_the_best_image_so_far_and_find_finer_details() -> None:
    case, steps = observe_once(side=8), 80
    attacks = (rog(steps=steps, decoder=name, tv=0.0) for name in ("coarse_to_fine", "bicubic4"))
    (found,), (coarse,) = (attack([case], rng=seeded()) for attack in attacks)
    losses = found.loss.tolist()
    for start in (steps // 10, 3 * steps // 10, 6 * steps // 10):
        assert losses[start + 1] == pytest.approx(min(losses[: start + 1]), rel=1e-4)
    assert found.loss.min() < 0.3 * coarse.loss.min()
    truth = draw_images(side=8)
    assert psnr(found.x, truth).mean() > psnr(coarse.x, truth).mean() + 3


@pytest.mark.parametrize("make", [rog, inverting_gradients])
def test_colours_that_vary_count_more_if_asked(make: Callable[..., GradientMatching]) -> None:
    """Two images with equal total variation of their channels: one varies in brightness, the other in colour."""
    steps = torch.rand(2, 1, 16, 16, generator=seeded()) / 2
    images = {"grey": steps.expand(-1, 3, -1, -1), "coloured": torch.cat([steps, steps, 1 - steps], dim=1)}
    case, found = observe_once(), {}
    for colour in (False, True):
        attack = make(decoder="pixels", colour=colour).null()
        found[colour] = {name: measure_loss(attack, case, x) for name, x in images.items()}
    assert found[False]["coloured"] == pytest.approx(found[False]["grey"])
    assert found[True]["grey"] == pytest.approx(found[False]["grey"])
    assert found[True]["coloured"] > 1.5 * found[True]["grey"]


def test_total_variation_counts_twice_for_clients_that_are_known_to_send_signs() -> None:
    plain, signs = observe_once(), observe_once("sign()")
    for knows, factor in ((True, 2.0), (False, 1.0)):
        weights = [float(CaseBatch(rog(knows_defense=knows), [case]).scales.smoothing) for case in (plain, signs)]
        assert weights == pytest.approx([1e-2, factor * 1e-2])
    assert float(CaseBatch(inverting_gradients(tv=1e-2), [signs]).scales.smoothing) == pytest.approx(1e-2)
