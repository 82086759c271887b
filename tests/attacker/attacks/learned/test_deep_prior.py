"""Tests of untrained networks as image priors."""

from itertools import pairwise

import pytest
import torch
from torch import Generator

from attacker.attacks.learned.deep_prior import CODES, DeepPrior, ResidualBlock
from attacker.attacks.matching.decoders import Decoder
from attacker.attacks.matching.names import get_decoder
from attacker.attacks.matching.parametrisation import LatentSpace, Parametrisation
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


def test_code_of_the_features_reaches_every_residual_block_with_its_sign() -> None:
    prior = DeepPrior(DATA.shape, codes=CODES)
    z, features = prior.encode(rand(1, *DATA.shape)), torch.randn(1, 40, generator=Generator().manual_seed(3))
    injected, opposite, scaled = (prior.inject(z, sign * features) for sign in (1, -1, 5))
    images = [prior.decode(one) for one in (z, injected, opposite)]
    assert all(float((a - b).abs().max()) > 1e-4 for a, b in pairwise((*images, images[0])))
    assert torch.allclose(injected, scaled)
    (slope,) = torch.autograd.grad(prior.decode(injected.requires_grad_()).square().sum(), [injected])
    named = dict(prior.network.named_parameters())
    slopes = dict(zip(named, torch.split(slope[0, : len(prior.weights)], [w.numel() for w in named.values()]), strict=True))
    injecting = [name for name in named if name.endswith("inject.weight")]
    assert len(injecting) == sum(isinstance(block, ResidualBlock) for block in prior.network.modules()) > 3
    assert all(slopes[name].any() for name in injecting)
    assert not slope[0, len(prior.weights) :].any()


def test_shared_network_gets_the_slopes_of_all_images_of_a_batch() -> None:
    alone, together = (LatentSpace(Parametrisation(decoder=get_decoder("shared_prior")), DATA, count) for count in (1, 2))
    x, rngs, labels = rand(2, *DATA.shape), [Generator().manual_seed(0)], torch.zeros(2, dtype=torch.long)
    z = together.encode([x], rngs, "cpu")[0].requires_grad_()
    made, _ = together.decode(z, labels)
    (slope,) = torch.autograd.grad(made.square().sum(), [z])
    slopes = []
    for i in range(2):
        own = alone.encode([x[i : i + 1]], rngs, "cpu")[0].requires_grad_()
        one, _ = alone.decode(own, labels[:1])
        assert torch.allclose(one[0], made[i], atol=1e-6)
        slopes.append(torch.autograd.grad(one.square().sum(), [own])[0])
    shared = together.decoder.shared
    assert together.size == shared + 2 * (alone.size - shared)
    assert torch.allclose(slope[:shared], (slopes[0] + slopes[1])[:shared], rtol=1e-3, atol=1e-4)
    assert torch.equal(together.project(z[None])[0], z)


def test_decoder_cannot_share_all_of_its_latents() -> None:
    with pytest.raises(ValueError, match="with shared=3 needs"):
        Decoder((3,), decode=torch.sigmoid, encode=torch.logit, shared=3)
