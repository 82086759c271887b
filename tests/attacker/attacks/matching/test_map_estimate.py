"""Tests of the total-variation prior that is weighted by a known noise variance (MAP estimate)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from generators import seeded
from observations import make_image_case, observe_steps
from torch import Tensor
from torch.distributions import Laplace, Normal

from attacker.attacks import Case, GradientMatching, cpl, exact, inverting_gradients, rog
from attacker.attacks.closed_form.observations import ClosedFormAnswer
from attacker.attacks.closed_form.observations import observe as observe_closed
from attacker.attacks.closed_form.routes import ROUTES
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.matching.priors import (
    COLOUR_MAP_TV,
    COSINE_MAP_TV,
    NEIGHBOUR_CONTRAST,
    VariationTerm,
    compute_map_tv_weight,
    convert_weight_to_cosine,
    total_variation,
)
from attacker.attacks.optimisers.stopping import MIN_HOPELESS_LOSS
from attacker.attacks.papers.agic import agic
from attacker.scoring.metrics import mse
from fedsim.recording import DataSpec, ModelSpec
from fedsim.recording.masked_vectors import SUM_CLIENT


def cpl_by_cosine(**arguments: Any) -> GradientMatching:
    return cpl(distance="cosine", **arguments)


def test_weighted_total_variation_gives_the_log_posterior() -> None:
    """The reference uses PyTorch's distributions on periodic images, in which every pixel has both neighbours."""
    sigma, observed = 0.3, torch.randn(50, generator=seeded())
    images = torch.rand(2, 1, 3, 8, 8, generator=seeded(1))
    gradients = torch.randn(2, 50, generator=seeded(2))

    def posterior(x: Tensor, g: Tensor) -> Tensor:
        likelihood = Normal(g, sigma).log_prob(observed).sum()
        differences = torch.stack([x.roll(1, -1) - x, x.roll(1, -2) - x])
        return -(likelihood + Laplace(0.0, NEIGHBOUR_CONTRAST).log_prob(differences).sum())

    def loss(x: Tensor, g: Tensor) -> Tensor:
        wrapped = torch.stack([(x.roll(1, -1) - x).abs().mean(), (x.roll(1, -2) - x).abs().mean()]).sum()
        return (g - observed).square().sum() + compute_map_tv_weight(torch.tensor(sigma**2), x.numel()) * wrapped

    expected = posterior(images[0], gradients[0]) - posterior(images[1], gradients[1])
    found = loss(images[0], gradients[0]) - loss(images[1], gradients[1])
    assert found.item() == pytest.approx(2 * sigma**2 * expected.item(), rel=1e-4)


def test_converted_weight_gives_the_same_minimum_for_cosines() -> None:
    """For gradients of norm S, differences of losses by cosine, times S R / variance, are those of negative log-posteriors."""
    sigma, count = 0.3, 50
    observed = 2 * torch.randn(count, generator=seeded())
    received, noise = observed.square().sum(), torch.tensor(count * sigma**2)
    signal = (received - noise).sqrt()
    gradients = [signal * torch.nn.functional.normalize(g, dim=0) for g in torch.randn(2, count, generator=seeded(2))]
    variations = torch.tensor([0.1, 0.4])
    weight = convert_weight_to_cosine(compute_map_tv_weight(torch.tensor(sigma**2), 128), received, noise)
    found = [1 - torch.cosine_similarity(g, observed, dim=0) + weight * tv for g, tv in zip(gradients, variations, strict=True)]
    expected = [
        -Normal(g, sigma).log_prob(observed).sum() + 128 / NEIGHBOUR_CONTRAST * tv
        for g, tv in zip(gradients, variations, strict=True)
    ]
    slope = signal * received.sqrt() / sigma**2
    assert (slope * (found[0] - found[1])).item() == pytest.approx((expected[0] - expected[1]).item(), rel=1e-4)


def test_knowledge_of_the_noise_lowers_the_error() -> None:
    cases, truths, _ = zip(*(make_image_case(i, defense="gaussian(0.002)") for i in (1, 2)), strict=True)
    errors = {}
    for name, arguments in (("plain", {"denoised": False}), ("smooth", {}), ("ignorant", {"knows_defense": False})):
        answers = cpl(optimiser="wolfe", steps=30, **arguments)(cases, rng=seeded())
        errors[name] = sum(mse(found.x, x).item() for found, x in zip(answers, truths, strict=True))
    assert errors["smooth"] < 0.4 * errors["plain"]
    assert errors["ignorant"] == pytest.approx(errors["plain"], rel=0.05)


def test_without_noise_the_prior_has_no_weight() -> None:
    case, _, _ = make_image_case(1, defense="clip(0.1)")
    assert CaseBatch(cpl(), [case]).scales.smoothing.tolist() == [0.0]


@pytest.mark.parametrize("defense", ["qsgd(1)", "qsgd(3)", "gaussian(0.01)", "gaussian(snr_db=0)"])
def test_every_known_noise_gives_the_prior_a_weight(defense: str) -> None:
    case, _, _ = make_image_case(1, defense=defense)
    assert CaseBatch(cpl(), [case]).scales.map_smoothing.item() > 0


def test_prior_weight_follows_from_the_noise_of_the_gradient() -> None:
    """The update is the gradient times the learning rate, 0.1, and the noise is in the update."""
    case, _, _ = make_image_case(1, defense="gaussian(0.002)")
    (weight,) = CaseBatch(cpl(), [case]).scales.smoothing
    assert weight.item() == pytest.approx(2 * 0.02**2 * 64 / NEIGHBOUR_CONTRAST, rel=1e-4)


def test_noise_of_a_sum_of_four_clients_is_that_of_their_mean() -> None:
    case, _, _ = make_image_case(1, defense="gaussian(0.002)")
    (own,) = case.observations
    four = Case((replace(own, client=SUM_CLIENT, cohort=tuple("abcd")),))
    alone, together = (CaseBatch(cpl(), [each]) for each in (case, four))
    assert together.scales.smoothing.item() == pytest.approx(alone.scales.smoothing.item() / 4, rel=1e-5)
    assert together.views[0].power.item() == pytest.approx(alone.views[0].power.item() / 4, rel=1e-5)


def test_layer_weights_are_applied_to_the_noise() -> None:
    """The distance at the true example is the power of the noise with layer weights applied."""
    case, x, y = make_image_case(1, defense="gaussian(0.002)")
    search = CaseBatch(agic(distance="euclidean", beta=50.0).matching, [case])
    (view,) = search.views
    distance = view.compute_distance(view.get_case(0), x, y, x.flatten())
    assert view.power.item() == pytest.approx(distance.item(), rel=0.1)


def test_noise_of_parameters_that_are_not_compared_is_left_out() -> None:
    """The parameters of a PRECODE block are not compared, so that their noise must not count either."""
    batch = (torch.rand(1, 1, 8, 8, generator=seeded()), torch.tensor([1]))
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    for network in ("", "precode(bottleneck=16)"):
        model = ModelSpec(name="lenet_dlg", network=network)
        case = Case((observe_steps(batch, model=model, data=data, defense="gaussian(0.002)"),))
        (view,) = CaseBatch(cpl(), [case]).views
        assert view.coordinates == 7732
        assert view.power.item() == pytest.approx(7732 * 0.02**2, rel=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 16, 1)])
def test_images_of_one_row_or_column_are_recovered(shape: tuple[int, ...]) -> None:
    x, y = torch.linspace(0, 1, 16).reshape(1, *shape), torch.tensor([1])
    model, data = ModelSpec(name="mlp", arguments={"hidden": [32]}), DataSpec(shape=shape, num_classes=3)
    case = Case((observe_steps((x, y), model=model, data=data),))
    (found,) = exact(route="optimisation")([case], rng=seeded())
    assert mse(found.x, x).item() < 1e-3


def test_exact_searches_on_if_the_closed_form_fits_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    case, x, _ = make_image_case(1, defense="gaussian(0.002)")
    (fitted,) = cpl(optimiser="wolfe", denoised=False)([case], rng=seeded())
    monkeypatch.setitem(ROUTES, "layers", lambda observed, rng, rgap: [ClosedFormAnswer(fitted.x.double(), fitted.y, "layers")])
    (routed,) = exact()([case], rng=seeded())
    seen = observe_closed([case])
    assert seen.measure_misfit(0, fitted.x, fitted.y) < seen.measure_misfit(0, routed.x, routed.y) < 1.1 * seen.estimate_noise(0)
    assert routed.route.startswith("optimisation")
    assert mse(routed.x, x).item() < mse(fitted.x, x).item()


def test_table_rows_get_no_smoothness_prior() -> None:
    batch = (torch.rand(1, 12, generator=seeded()), torch.tensor([1]))
    model, data = ModelSpec(name="mlp", arguments={"hidden": [16]}), DataSpec(shape=(12,), num_classes=3)
    case = Case((observe_steps(batch, model=model, data=data, defense="gaussian(0.002)"),))
    assert CaseBatch(cpl(), [case]).scales.smoothing.tolist() == [0.0]


def test_null_applies_the_prior_and_does_not_depend_on_the_update() -> None:
    (case, _, _), (other, _, _) = (make_image_case(1, defense="gaussian(0.002)", learning_rate=rate) for rate in (0.1, 0.05))
    null = cpl(optimiser="wolfe", steps=20).null()
    (found,), (again,) = null([case], rng=seeded()), null([other], rng=seeded())
    (start,) = cpl(denoised=False).null()([case], rng=seeded())
    assert torch.equal(found.x, again.x)
    assert total_variation(found.x) < 0.2 * total_variation(start.x)


@pytest.mark.parametrize("attack", [inverting_gradients(), cpl()])
@pytest.mark.parametrize("snr", [-10, 0, 10])
def test_floor_is_the_loss_of_the_true_examples_behind_known_noise(attack: Any, snr: int) -> None:
    case, sent = make_image_case(1)[0], make_image_case(1, defense=f"gaussian(snr_db={snr})")[0]
    clean, noisy = ({name: u / -0.1 for name, u in one.observations[0].update.items()} for one in (case, sent))
    expected = float(attack.objective.distance(clean, noisy))
    assert CaseBatch(attack, [sent]).scales.floor.item() == pytest.approx(expected, rel=0.1)
    assert CaseBatch(attack, [case]).scales.floor.item() == 0
    assert CaseBatch(attack.null(), [sent]).scales.floor.item() == 0


def test_search_is_not_given_up_for_a_loss_that_the_noise_explains() -> None:
    case, x, _ = make_image_case(1, defense="gaussian(snr_db=0)")
    (found,) = inverting_gradients(steps=120, tv=0.03)([case], rng=seeded())
    assert found.iterations == 120
    assert float(found.loss[-1]) > MIN_HOPELESS_LOSS
    (null,) = inverting_gradients(steps=120, tv=0.03).null()([case], rng=seeded())
    assert mse(found.x, x).item() < mse(null.x, x).item()


@pytest.mark.parametrize(("make", "share"), [(inverting_gradients, COLOUR_MAP_TV), (rog, COSINE_MAP_TV), (cpl_by_cosine, 1.0)])
def test_known_noise_adds_total_variation_to_cosines(make: Callable[..., GradientMatching], share: float) -> None:
    """The weight grows with the power of the noise, if the attacker knows it, up to that of 100 times the signal's power."""
    weights = {}
    for std in (0.0, 0.001, 0.002, 10.0):
        case, _, _ = make_image_case(1, defense=f"gaussian({std})" if std else "")
        search = CaseBatch(make(tv=0.0), [case])
        weights[std] = search.scales.smoothing.item()
        assert CaseBatch(make(tv=0.0, denoised=False), [case]).scales.smoothing.item() == 0
        assert CaseBatch(make(tv=0.0, knows_defense=False), [case]).scales.smoothing.item() == 0
    assert weights[0.0] == 0
    assert 0 < 3 * weights[0.001] < weights[0.002]  # four times the power, as far as the signal is estimated well
    largest = share * 10 * 64 / NEIGHBOUR_CONTRAST / search.views[0].coordinates
    assert weights[10.0] == pytest.approx(largest, rel=0.1)


@pytest.mark.parametrize("defense", ["", "gaussian(0.001)"])
@pytest.mark.parametrize(("share", "factor"), [(0.0, 100.0), (0.2, 10.0), (0.4, 1.0), (0.75, 1.0)])
def test_continuation_lets_the_weight_of_total_variation_fall_in_the_first_two_fifths(
    share: float, factor: float, defense: str
) -> None:
    """The part of the weight that belongs to a MAP estimate from known noise is constant."""
    case, x, y = make_image_case(defense=defense)
    batch = CaseBatch(inverting_gradients(tv=0.2, continuation=100.0), [case])
    z = torch.rand_like(x).reshape(1, -1)
    problem = batch.build_problem([0], z, y[None])
    more = batch.evaluate(z, problem, share)[1] - batch.evaluate(z, problem)[1]
    assert more.item() == pytest.approx((factor - 1) * 0.2 * total_variation(z.view_as(x)).item(), rel=1e-4, abs=1e-6)


def test_continuation_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        VariationTerm(continuation=0.5)
