"""Attackers who know how much noise there is prefer smooth images by as much as it leaves open."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Laplace, Normal

from attacker.attacks import Case, cpl, without_gradient
from attacker.attacks.priors import CONTRAST, belief_behind_noise, total_variation
from attacker.attacks.search import Search
from attacker.scoring.metrics import mse
from fedsim.wire import DataSpec, ModelSpec

Make = Callable[..., tuple[Case, Tensor, Tensor]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_weight_makes_a_posterior_of_distance_and_total_variation() -> None:
    """Beside torch's distributions, on images that wrap around so that every pixel has both neighbours."""
    sigma, observed = 0.3, torch.randn(50, generator=seeded())
    images = torch.rand(2, 1, 3, 8, 8, generator=seeded(1))
    gradients = torch.randn(2, 50, generator=seeded(2))

    def posterior(x: Tensor, g: Tensor) -> Tensor:
        likelihood = Normal(g, sigma).log_prob(observed).sum()
        differences = torch.stack([x.roll(1, -1) - x, x.roll(1, -2) - x])
        return -(likelihood + Laplace(0.0, CONTRAST).log_prob(differences).sum())

    def loss(x: Tensor, g: Tensor) -> Tensor:
        wrapped = torch.stack([(x.roll(1, -1) - x).abs().mean(), (x.roll(1, -2) - x).abs().mean()]).sum()
        return (g - observed).square().sum() + belief_behind_noise(torch.tensor(sigma**2), x.numel()) * wrapped

    expected = posterior(images[0], gradients[0]) - posterior(images[1], gradients[1])
    found = loss(images[0], gradients[0]) - loss(images[1], gradients[1])
    assert found.item() == pytest.approx(2 * sigma**2 * expected.item(), rel=1e-4)


def test_an_attacker_who_knows_of_noise_sees_through_it(image_case: Make) -> None:
    cases, truths, _ = zip(*(image_case(i, defense="gaussian(0.002)") for i in (1, 2)), strict=True)
    errors = {}
    for name, arguments in (("plain", {"denoised": False}), ("smooth", {}), ("ignorant", {"knows_defense": False})):
        answers = cpl(optimiser="wolfe", steps=30, **arguments)(cases, rng=seeded())
        errors[name] = sum(mse(found.x, x).item() for found, x in zip(answers, truths, strict=True))
    assert errors["smooth"] < 0.4 * errors["plain"]
    assert errors["ignorant"] == pytest.approx(errors["plain"], rel=0.05)


def test_without_noise_nothing_is_preferred(image_case: Make) -> None:
    case, _, _ = image_case(1, defense="clip(0.1)")
    assert Search(cpl(), [case], seeded(), None).smoothing.tolist() == [0.0]


def test_the_weight_is_of_the_noise_in_the_gradient(image_case: Make) -> None:
    """The update is the gradient times the learning rate, 0.1, and the noise is in the update."""
    case, _, _ = image_case(1, defense="gaussian(0.002)")
    (weight,) = Search(cpl(), [case], seeded(), None).smoothing
    assert weight.item() == pytest.approx(2 * 0.02**2 * 64 / CONTRAST, rel=1e-4)


def test_rows_of_tables_are_not_smooth(observe: Callable[..., object]) -> None:
    batch = (torch.rand(1, 12, generator=seeded()), torch.tensor([1]))
    model, data = ModelSpec(name="mlp", arguments={"hidden": [16]}), DataSpec(shape=(12,), num_classes=3)
    case = Case((observe(batch, model=model, data=data, defense="gaussian(0.002)"),))  # type: ignore[arg-type]
    assert Search(cpl(), [case], seeded(), None).smoothing.tolist() == [0.0]


def test_a_null_prefers_smooth_images_too_and_sees_nothing_else(image_case: Make) -> None:
    (case, _, _), (other, _, _) = (image_case(1, defense="gaussian(0.002)", learning_rate=rate) for rate in (0.1, 0.05))
    null = without_gradient(cpl(optimiser="wolfe", steps=20))
    (found,), (again,) = null([case], rng=seeded()), null([other], rng=seeded())
    (start,) = without_gradient(cpl(denoised=False))([case], rng=seeded())
    variation = total_variation(1.0)
    assert torch.equal(found.x, again.x)
    assert variation(found.x) < 0.2 * variation(start.x)
