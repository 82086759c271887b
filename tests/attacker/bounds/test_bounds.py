"""Tests of lower bounds of the reconstruction error: against closed forms, dense matrices, and a wide random layer."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observations import make_observation
from torch import Tensor

from attacker.bounds import (
    FisherInformation,
    GaussianPrior,
    NoisyMessage,
    NotBounded,
    UsedExamples,
    bound_error,
    build_message,
    find_declared_noise,
    fit_prior,
)
from defenses.gradients import GradientSpec
from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training
from fedsim.training.local import train

DATA = DataSpec(shape=(6,), num_classes=3)
X = torch.tensor([[0.2, 0.9, 0.4, 0.1, 0.7, 0.5], [0.6, 0.3, 0.8, 0.2, 0.1, 0.9]], dtype=torch.float64)
Y = torch.tensor([0, 2])


def make_used(defense: str = "", gradient: str = "plain", *, examples: int = 2) -> UsedExamples:
    spec = ModelSpec(name="mlp", arguments={"hidden": [5]})
    model = models.build(spec, DATA)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    update = {name: torch.full_like(w, 0.01) for name, w in weights.items()}
    training = Training(learning_rate=0.5, batch_size=examples, steps=1)
    facts = {"defense": defense, "gradient": GradientSpec.parse(gradient)}
    seen = make_observation(update, weights, model=spec, data=DATA, training=training, **facts)
    return UsedExamples(seen, (tuple(range(examples)),))


def make_prior(size: int) -> GaussianPrior:
    rows = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    return GaussianPrior(rows.new_zeros(size), rows[: size - 1], torch.linspace(0.1, 0.6, size - 1, dtype=rows.dtype), 0.3)


def make_white_prior(size: int, deviation: float) -> GaussianPrior:
    like = torch.full((size,), 0.5, dtype=torch.float64)
    return GaussianPrior(like, like.new_zeros(0, size), like.new_zeros(0), deviation)


def compute_covariance(prior: GaussianPrior) -> Tensor:
    root = prior.scale(torch.eye(prior.mean.numel(), dtype=torch.float64))
    return root @ root


def test_examples_behind_an_update_are_counted_and_not_taken_from_the_client() -> None:
    seen = make_used(gradient="dp_sgd(noise=2.0)").observation
    false = UsedExamples.select(replace(seen, num_examples=2**52), [(7, 3), (3, 9)], [3, 7, 9])
    assert (false.steps, false.observation.num_examples) == (((1, 0), (0, 2)), 3)
    one = [UsedExamples.select(replace(seen, num_examples=count), [(3, 7)], [3, 7]) for count in (2, 200)]
    assert torch.equal(*(build_message(used, Y).std for used in one))  # the noise of DP-SGD is divided by the batch size


@pytest.mark.parametrize("max_dense", [1000, 0])
def test_bound_of_a_linear_message_is_the_closed_form(max_dense: int) -> None:
    matrix = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    std, prior = torch.tensor(0.3, dtype=torch.float64), make_prior(4)
    found = bound_error(
        FisherInformation([NoisyMessage(lambda x: matrix @ x[0], std)], X[:1, :4]), prior, max_dense=max_dense, probes=400
    )
    posterior = torch.linalg.inv(matrix.T @ matrix / std**2 + torch.linalg.inv(compute_covariance(prior)))
    assert float(found.mse) == pytest.approx(float(posterior.trace()) / 4, rel=1e-9 if max_dense else 0.05)
    assert abs(float(found.mse) - float(posterior.trace()) / 4) <= 4 * float(found.error) + 1e-12
    assert found.prior == pytest.approx(float(compute_covariance(prior).trace()) / 4)


@pytest.mark.parametrize("probes", [0, 1])
def test_fewer_than_two_probes_are_refused(probes: int) -> None:
    """Their standard error would be NaN."""
    message = NoisyMessage(lambda x: x[0], torch.tensor(0.3, dtype=torch.float64))
    information, prior = FisherInformation([message], X[:1]), make_prior(6)
    with pytest.raises(ValueError, match=f"probes must be at least 2.*got {probes}"):
        bound_error(information, prior, max_dense=0, probes=probes)
    assert bool(bound_error(information, prior, max_dense=0, probes=2).error.isfinite().all())


def test_posterior_mean_reaches_the_bound() -> None:
    rng = torch.Generator().manual_seed(0)
    matrix, prior = torch.randn(5, 4, generator=rng, dtype=torch.float64), make_prior(4)
    x = prior.scale(torch.randn(20_000, 4, generator=rng, dtype=torch.float64))
    seen = x @ matrix.T + 0.4 * torch.randn(20_000, 5, generator=rng, dtype=torch.float64)
    covariance = compute_covariance(prior)
    gain = covariance @ matrix.T @ torch.linalg.inv(matrix @ covariance @ matrix.T + 0.16 * torch.eye(5, dtype=torch.float64))
    error = float((seen @ gain.T - x).square().mean())
    std = torch.tensor(0.4, dtype=torch.float64)
    bound = bound_error(FisherInformation([NoisyMessage(lambda x: matrix @ x[0], std)], x[:1]), prior)
    assert error == pytest.approx(float(bound.mse), rel=0.03)


def test_information_of_a_network_agrees_with_its_jacobian() -> None:
    message = build_message(make_used("gaussian(0.01)"), Y)
    jacobian = torch.autograd.functional.jacobian(message.simulate, X).flatten(1)
    dense = jacobian.T @ jacobian / 0.01**2
    assert float(message.std) == pytest.approx(0.01)
    assert torch.allclose(FisherInformation([message], X).to_dense(), dense, rtol=1e-9, atol=1e-9 * float(dense.abs().max()))


def test_rounds_lower_the_bound_and_noise_raises_it() -> None:
    prior, message = make_white_prior(6, 0.3), build_message(make_used("gaussian(0.01)"), Y)
    once, thrice = (bound_error(FisherInformation([message] * n, X), prior).mse for n in (1, 3))
    louder = bound_error(FisherInformation([build_message(make_used("gaussian(0.1)"), Y)], X), prior).mse
    weaker = NoisyMessage(message.simulate, message.std / math.sqrt(3))
    assert bool((thrice < once).all())
    assert bool((once < louder).all())
    assert bool((louder < prior.variance).all())
    assert torch.allclose(thrice, bound_error(FisherInformation([weaker], X), prior).mse, rtol=1e-9)


@pytest.mark.parametrize("defense", ["clip(0.01) | gaussian(0.01)", "top_k(0.3) | gaussian(0.01)", "prune(0.7) | gaussian(0.01)"])
def test_clipping_and_pruning_before_the_noise_raise_the_bound(defense: str) -> None:
    prior = make_white_prior(6, 0.3)
    plain, defended = (
        bound_error(FisherInformation([build_message(make_used(text), Y)], X), prior).mse for text in ("gaussian(0.01)", defense)
    )
    assert bool((defended > plain).all())


def test_pruning_alone_leaves_an_error_where_too_few_coordinates_are_sent() -> None:
    prior = make_white_prior(6, 0.3)
    few, all_sent = (
        bound_error(FisherInformation([build_message(make_used(text), Y)], X), prior).mse for text in ("top_k(0.02)", "")
    )
    assert float(few.sum()) > 0.09  # at most 4 coordinates for 12 unknown values
    assert float(all_sent.max()) < 1e-6


def test_steps_after_the_noise_do_not_change_the_message() -> None:
    sent, processed = (build_message(make_used(text), Y) for text in ("gaussian(0.01)", "gaussian(0.01) | top_k(0.1)"))
    assert torch.equal(sent.simulate(X), processed.simulate(X))


def test_message_of_several_steps_is_the_update_of_local_training() -> None:
    used = make_used(examples=1)
    seen = replace(used.observation, training=replace(used.observation.training, steps=2))
    message = build_message(UsedExamples(seen, ((0,), (1,))), Y)
    batches = [(X[:1].float(), Y[:1]), (X[1:].float(), Y[1:])]
    update = train(models.build(seen.model, DATA), seen.weights, batches, seen.training, DATA).update
    assert torch.allclose(message.simulate(X), torch.cat([u.flatten() for u in update.values()]).double(), atol=1e-6)


def test_the_noise_of_a_message_without_a_defense_is_its_rounding() -> None:
    """Half the distance of two neighbouring float32 numbers, relative to the largest entry, here 0.01."""
    message = build_message(make_used(), Y)
    expected = torch.full_like(message.std, 0.01 * torch.finfo(torch.float32).eps / 2)
    assert torch.allclose(message.std, expected, rtol=1e-5, atol=0)


def test_the_noise_of_dp_sgd_is_that_of_the_update() -> None:
    message = build_message(make_used("", "dp_sgd(max_norm=2.0, noise=0.3)"), Y)
    assert float(message.std) == pytest.approx(0.5 * 2.0 * 0.3 / 2, rel=1e-6)  # learning rate, clipping norm, noise, batch size


@pytest.mark.parametrize(
    ("defense", "gradient"), [("sign()", "plain"), ("gaussian(snr_db=10)", "plain"), ("top_k(0.1, error_feedback=True)", "plain")]
)
def test_unsupported_defenses_are_refused(defense: str, gradient: str) -> None:
    with pytest.raises(NotBounded):
        build_message(make_used(defense, gradient), Y)


def test_a_fitted_prior_has_the_covariance_of_its_examples() -> None:
    rng = torch.Generator().manual_seed(0)
    x = make_prior(4).scale(torch.randn(4000, 4, generator=rng, dtype=torch.float64))
    fitted = fit_prior(x)
    assert torch.allclose(compute_covariance(fitted), torch.cov(x.T), atol=1e-9)
    few = fit_prior(x[:6])
    assert few.variance == pytest.approx(float(torch.cov(x[:6].T).trace()) / 4)
    with pytest.raises(ValueError, match="got 1"):
        fit_prior(x[:1])


def test_a_prior_fitted_to_few_examples_keeps_their_total_variance() -> None:
    """With fewer examples than values, half of the directions are kept, and the others share the rest of the variance."""
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fitted = fit_prior(x)
    assert len(fitted.basis) == 3
    assert 10 * fitted.variance == pytest.approx(float(torch.cov(x.T).trace()))


def test_the_standard_error_of_the_bound_falls_with_the_root_of_the_probes() -> None:
    matrix = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    message = NoisyMessage(lambda x: matrix @ x[0], torch.tensor(0.3, dtype=torch.float64))
    information, prior = FisherInformation([message], X[:1, :4]), make_prior(4)
    few, many = (float(bound_error(information, prior, max_dense=0, probes=probes).error) for probes in (100, 400))
    assert many == pytest.approx(few / 2, rel=0.2)


def make_recording(defense: str, gradient: str, sizes: tuple[int | None, ...]) -> Any:
    """Return what `find_declared_noise` reads of a recording. sizes: numbers of examples that clients reported."""
    training = Training(learning_rate=0.5, batch_size=4, steps=3)
    return SimpleNamespace(
        manifest=SimpleNamespace(defense=DefenseSpec.parse(defense), gradient=gradient, training=training),
        list_rounds=lambda: [1],
        read_sent=lambda number: SimpleNamespace(weights={"0.weight": X, "0.bias": Y}),
        read_rows=lambda on_damage: [SimpleNamespace(reported=size) for size in sizes],
    )


@pytest.mark.parametrize(
    ("defense", "gradient", "multiplier", "uses"),
    [
        ("clip(2.0) | gaussian(1.0)", "plain", 0.5, 1),
        ("", "dp_sgd(max_norm=2.0, noise=0.3)", 0.3, 3),  # the client of 4 examples uses each in every step
        ("clip(2.0) | gaussian(1.0)", "dp_sgd(max_norm=2.0, noise=0.3)", 0.5, 1),
        ("", "plain", 0.0, 1),
    ],
)
def test_declared_noise_and_its_uses_by_the_smallest_client(defense: str, gradient: str, multiplier: float, uses: int) -> None:
    noise, found = find_declared_noise(make_recording(defense, gradient, (12, 4, None, 8)))
    assert (noise.multiplier, found) == (pytest.approx(multiplier), uses)


def test_the_bound_of_a_wide_random_layer_has_its_known_value() -> None:
    """The Fisher information of the outputs relu(w_j x), j = 1 .. M, with noise s is M / (2 s^2) in each of the d directions."""
    rng, inputs, neurons, noise = torch.Generator().manual_seed(0), 8, 20_000, 0.5
    w = torch.randn(neurons, inputs, generator=rng, dtype=torch.float64)
    x = torch.randn(1, inputs, generator=rng, dtype=torch.float64)
    message = NoisyMessage(lambda x: (x @ w.T).clamp(min=0)[0], torch.tensor(noise, dtype=torch.float64))
    bound = bound_error(FisherInformation([message], x / x.norm()), make_white_prior(inputs, 1e3))
    assert float(bound.mse) == pytest.approx(2 * noise**2 / neurons, rel=0.06)
