"""Tests of untrained networks as image priors."""

import torch
from torch import Generator

from attacker.attacks.learned.deep_prior import DeepPrior
from attacker.attacks.matching.names import get_decoder
from fedsim.recording import DataSpec

DATA = DataSpec(shape=(3, 16, 13), num_classes=4)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=Generator().manual_seed(seed))


def test_search_starts_near_grey_and_differs_by_the_given_image_only() -> None:
    torch.manual_seed(5)
    decoder = get_decoder("deep_prior")(DATA)
    again = get_decoder("deep_prior")(DATA)
    z = decoder.encode(rand(2, *DATA.shape))
    assert torch.equal(z, again.encode(rand(2, *DATA.shape)))
    x = decoder.decode(z)
    assert float((x - 0.5).abs().max()) < 0.1
    assert not torch.equal(x[0], x[1])
    assert torch.equal(decoder.decode(decoder.encode(rand(1, *DATA.shape).expand(2, -1, -1, -1)))[0], x[0])


def test_building_a_prior_keeps_the_global_random_state() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    DeepPrior(DATA.shape)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_images_stay_in_range_for_any_weights() -> None:
    decoder = get_decoder("deep_prior")(DATA)
    x = decoder.decode(5 * torch.randn(2, *decoder.shape, generator=Generator().manual_seed(0)))
    assert 0 <= float(x.min()) < float(x.max()) <= 1


def test_only_weights_are_optimised() -> None:
    decoder, prior = get_decoder("deep_prior")(DATA), DeepPrior(DATA.shape)
    z = decoder.encode(rand(2, *DATA.shape)).requires_grad_()
    (slope,) = torch.autograd.grad(decoder.decode(z).square().sum(), [z])
    count = len(prior.weights)
    assert prior.size == count + 3 * 16 * 13
    assert not slope[:, count:].any()
    assert float((slope[:, :count] != 0).float().mean()) > 0.5


def test_structure_is_fitted_sooner_than_noise() -> None:
    """The defining property of a deep image prior (Ulyanov et al. 2018, figure 2)."""
    decoder = get_decoder("deep_prior")(DataSpec(shape=(1, 16, 16), num_classes=2))
    row = torch.linspace(0, 1, 16)
    structured = 0.5 + 0.4 * torch.sin(6 * row[:, None]) * torch.cos(4 * row)
    noise = structured.flatten()[torch.randperm(256, generator=Generator().manual_seed(1))].reshape(16, 16)
    target = torch.stack([structured, noise])[:, None]
    z = decoder.encode(rand(2, 1, 16, 16)).requires_grad_()
    optimiser = torch.optim.Adam([z], lr=3e-3)
    for _ in range(11):
        error = (decoder.decode(z) - target).square().flatten(1).mean(dim=1)
        (z.grad,) = torch.autograd.grad(error.sum(), [z])
        optimiser.step()
    structured_error, noise_error = error.detach().tolist()
    assert structured_error < 0.5 * noise_error
