"""Tests of training learned priors: degradations, batches, files, and resuming."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from generators import seeded
from torch import Tensor, nn

from attacker.attacks.learned.degradation import degrade
from attacker.attacks.learned.networks import Autoencoder, PatchCritic, UNet
from attacker.attacks.learned.prior_file import PriorFacts, build_network, read_prior, write_prior
from attacker.attacks.learned.training import PriorTraining, Trainer, crop_at_random, draw_rows

ENHANCER = PriorFacts(kind="enhancer", size=16, settings={"width": 4}, data="stripes")
AUTOENCODER = PriorFacts(kind="autoencoder", size=16, settings={"width": 4, "factor": 4}, data="stripes")
GENERATOR = PriorFacts(kind="generator", size=16, settings={"width": 4, "latents": 6, "side": 16, "classes": 3}, data="stripes")
DENOISER = PriorFacts(kind="denoiser", size=16, settings={"width": 4}, data="stripes")
SHORT = PriorTraining(steps=8, batch=2)


@pytest.fixture(scope="module")
def stripes() -> Tensor:
    """Images (6, 3, 24, 24) uint8 of vertical stripes."""
    columns = (torch.arange(24) // 3 % 2 * 200 + 20).to(torch.uint8)
    return (columns + torch.arange(6, dtype=torch.uint8)[:, None, None, None] * 5).expand(6, 3, 24, 24).contiguous()


def test_degraded_image_depends_on_the_seed_and_most_are_smoother_and_some_unchanged() -> None:
    x = torch.rand(4, 3, 32, 32, generator=seeded())
    assert torch.equal(degrade(x, seeded()), degrade(x, seeded()))
    made = [degrade(x, seeded(seed)) for seed in range(64)]
    assert all(one.shape == x.shape for one in made)
    roughness = torch.stack([(one[..., 1:] - one[..., :-1]).abs().mean() for one in (x, *made)])
    smoother, unchanged = (roughness[1:] < 0.95 * roughness[0]).sum(), sum(torch.equal(one, x) for one in made)
    assert 32 <= smoother <= 56  # a blur or a smaller size: 1 - 1/4, less those of factor 1 or of hardly any blur
    assert 2 <= unchanged <= 20  # all three are left out: 1/8, and those of factor 1


def test_a_batch_of_crops_has_the_size_and_the_values_of_its_images(stripes: Tensor) -> None:
    batch = crop_at_random(stripes, draw_rows(stripes, 20, seeded()), 16, seeded())
    assert batch.shape == (20, 3, 16, 16)
    assert float(batch.min()) >= 0
    assert float(batch.max()) <= 1
    whole = crop_at_random(stripes, torch.zeros(8, dtype=torch.long), 24, seeded())
    image = stripes[0].float() / 255
    assert all(torch.equal(one, image) or torch.equal(one, image.flip(-1)) for one in whole)
    assert {bool(torch.equal(one, image)) for one in whole} == {True, False}


def test_untrained_u_net_returns_its_input() -> None:
    x = torch.rand(3, 3, 16, 24, generator=seeded())
    network = UNet(4)
    torch.testing.assert_close(network(x), x)
    nn.init.normal_(network.leave.weight)
    torch.testing.assert_close(network(x)[1:2], network(x[1:2]))
    assert PatchCritic(4)(x).ndim == 4


@pytest.mark.parametrize(("factor", "latents"), [(4, 8192), (8, 2048), (16, 512)])
def test_autoencoders_of_128_pixels_have_the_latents_of_the_paper(factor: int, latents: int) -> None:
    with torch.device("meta"):
        network = Autoencoder(4, factor)
        z = network.encode(torch.zeros(1, 3, 128, 128))
        assert z.numel() == latents
        assert network.decode(z).shape == (1, 3, 128, 128)
    with pytest.raises(ValueError, match="a power of 2 from 2, got 6"):
        Autoencoder(4, 6)


@pytest.mark.parametrize("facts", [ENHANCER, AUTOENCODER, GENERATOR, DENOISER])
def test_training_lowers_the_loss_and_resumes_to_the_same_weights(facts: PriorFacts, stripes: Tensor, tmp_path: Path) -> None:
    losses: list[float] = []
    straight = Trainer(stripes, facts, SHORT).run(lambda done, steps, words: losses.append(float(words.split()[1])))
    assert min(losses[-3:]) < losses[0]

    def stop(done: int, steps: int, words: str) -> None:
        if done == 5:
            raise KeyboardInterrupt

    checkpoint = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        Trainer(stripes, facts, SHORT, checkpoint=checkpoint).run(stop)
    resumed = Trainer(stripes, facts, SHORT, checkpoint=checkpoint)
    begun: list[int] = []
    found = resumed.run(lambda done, steps, words: begun.append(done))
    assert begun == [6, 7, 8]
    for name, value in straight.state_dict().items():
        assert torch.equal(value, found.state_dict()[name]), name
    with pytest.raises(ValueError, match="other images or settings"):
        Trainer(stripes, replace(facts, seed=1), SHORT, checkpoint=checkpoint).run()
    whole = checkpoint.read_bytes()
    for left in (0, 3, len(whole) // 2):
        checkpoint.write_bytes(whole[:left])
        with pytest.raises(ValueError, match="is cut off or damaged"):
            Trainer(stripes, facts, SHORT, checkpoint=checkpoint).run()
    resumed.clean_up()
    assert not checkpoint.exists()


def test_file_states_its_training_data_and_is_refused_if_changed(stripes: Tensor, tmp_path: Path) -> None:
    trainer, path = Trainer(stripes, ENHANCER, SHORT), tmp_path / "enhancer.safetensors"
    digest = write_prior(path, trainer.network, trainer.facts)
    read = read_prior(path, "enhancer")
    assert (read.facts.images, read.facts.steps, read.facts.data) == (6, 8, "stripes")
    assert len(read.facts.data_hash) == 64
    assert read.weights_hash == digest
    assert not any(p.requires_grad for p in read.network.parameters())
    x = torch.rand(1, 3, 16, 16, generator=seeded())
    torch.testing.assert_close(read.network(x), trainer.network(x), atol=1e-2, rtol=1e-2)
    with pytest.raises(ValueError, match="this file holds a prior of kind 'enhancer'"):
        read_prior(path, "autoencoder")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="do not have the hash"):
        read_prior(path, "enhancer")
    with pytest.raises(ValueError, match=r"does not exist; train one with attacker train-prior DATA --kind enhancer"):
        read_prior(tmp_path / "none.safetensors", "enhancer")


def test_images_that_are_too_small_or_of_another_type_are_refused(stripes: Tensor) -> None:
    with pytest.raises(ValueError, match="24x24 pixels are smaller than --size 32"):
        Trainer(stripes, replace(ENHANCER, size=32))
    with pytest.raises(ValueError, match="must be uint8 of shape"):
        Trainer(stripes.float(), ENHANCER)


def test_creating_a_trainer_keeps_the_global_random_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Trainer(torch.zeros(1, 3, 16, 16, dtype=torch.uint8), ENHANCER)
    assert torch.equal(torch.rand(1), expected)
    assert isinstance(build_network(AUTOENCODER), Autoencoder)
