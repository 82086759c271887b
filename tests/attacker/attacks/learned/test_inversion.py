"""Tests of `learning_to_invert`: its simulated clients, its loss, its null, and what its network learns."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from generators import seeded
from observations import observe_rounds
from torch import Tensor

from attacker.attacks import AttackSpec, Case
from attacker.attacks.learned.inversion import MAX_BATCH, learning_to_invert
from attacker.attacks.learned.inversion_network import LABEL_WEIGHT, build_encoder, compute_loss, simulate_updates
from attacker.attacks.simulation.client import build_network
from defenses.gradients import GradientSpec
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.4,), std=(0.3,))
MODEL = ModelSpec(name="mlp", arguments={"hidden": [16]})


def draw_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (count, 1, 8, 8) with one bright stripe, and labels (count,), independent of each other."""
    rng = seeded(seed)
    row = torch.randint(8, (count,), generator=rng)
    x = 0.1 * torch.rand(count, *DATA.shape, generator=rng)
    x[torch.arange(count), 0, row] += 0.8
    return x, torch.randint(DATA.num_classes, (count,), generator=rng)


def observe(x: Tensor, y: Tensor, client: str = "c", defense: str = "", rule: str = "", **training: object) -> Case:
    batches = [(x, y)] * int(training.get("steps", 1))
    case = observe_rounds([batches], model=MODEL, data=DATA, client=client, defense=defense, seed=1, noise_seed=6, **training)
    return Case((replace(case.observations[0], num_examples=len(x), gradient=GradientSpec.parse(rule)),))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, y = draw_images(600, seed=3)
    path = tmp_path_factory.mktemp("public") / "images.npz"
    np.savez(path, images=(x * 255).round().byte().permute(0, 2, 3, 1).numpy(), labels=y.numpy())
    return path


def test_simulated_updates_are_those_of_a_client() -> None:
    x, y = draw_images(4, seed=0)
    for settings in ({}, {"weight_decay": 0.1}):
        case = observe(x[:2], y[:2], **settings)
        first = case.observations[0]
        made = simulate_updates(first, build_network(first), x.reshape(2, 2, *DATA.shape), y.reshape(2, 2), seeded(), "cpu")
        for name, sent in first.update.items():
            torch.testing.assert_close(made[name][0], sent, rtol=1e-4, atol=1e-7)
            assert made[name].shape == (2, *sent.shape)


def test_gradient_rules_are_simulated_with_fresh_randomness() -> None:
    x, y = draw_images(1, seed=0)
    first = observe(x, y, rule="dp_sgd(max_norm=1, noise=0.5)").observations[0]
    made = simulate_updates(first, build_network(first), x.expand(2, 1, *DATA.shape), y.expand(2, 1), seeded(), "cpu")
    assert all(not torch.equal(u[0], u[1]) for u in made.values())


def test_hashed_update_keeps_inner_products_on_average() -> None:
    case = observe(*draw_images(1, seed=0))
    wide = {"w": torch.zeros(20_000)}
    first = case.observations[0]
    object.__setattr__(first, "weights", wide)
    encode_update = build_encoder(first, frozenset(), seeded(1), "cpu")
    a = torch.randn(20_000, generator=seeded(2))
    assert len(encode_update({"w": a})) == 4096
    assert float(encode_update({"w": a}).square().sum()) == pytest.approx(float(a.square().sum()), rel=0.1)
    torch.testing.assert_close(encode_update({"w": 2 * a}), 2 * encode_update({"w": a}))


def test_loss_takes_the_best_order_of_examples() -> None:
    x, y = torch.rand(2, 3, 1, 2, 2, generator=seeded()), torch.randint(4, (2, 3), generator=seeded())
    output = torch.randn(2, 3, 8, generator=seeded(1))
    found, logits = output[..., :4].sigmoid().reshape(2, 3, 1, 2, 2), output[..., 4:]
    expected = []
    for n in range(2):
        each = []
        for order in permutations(range(3)):
            pixels = (found[n] - x[n][list(order)]).square().mean()
            each.append(pixels + LABEL_WEIGHT * torch.nn.functional.cross_entropy(logits[n], y[n][list(order)]))
        expected.append(min(each))
    assert float(compute_loss(output, x, y)) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-5)
    assert float(compute_loss(output.flip(1), x, y)) == pytest.approx(float(compute_loss(output, x, y)), rel=1e-5)


@pytest.mark.parametrize(("defense", "epochs"), [("", 25), ("sign", 10)])
def test_network_beats_the_mean_image_on_new_clients(archive: Path, defense: str, epochs: int) -> None:
    x, y = draw_images(6, seed=9)
    cases = [observe(x[i : i + 1], y[i : i + 1], f"c{i}", defense) for i in range(6)]
    attack = learning_to_invert(images=str(archive), simulations=600, epochs=epochs, hidden=128)
    found = attack(cases, rng=seeded())
    null = attack.null()(cases, rng=seeded())
    errors = torch.stack([(one.x[0] - x[i]).square().mean() for i, one in enumerate(found)])
    nulls = torch.stack([(one.x[0] - x[i]).square().mean() for i, one in enumerate(null)])
    assert float(errors.mean()) < 0.75 * float(nulls.mean())
    assert all(bool(one.confidence.isnan().all()) for one in found)


def test_answer_does_not_depend_on_other_cases(archive: Path) -> None:
    x, y = draw_images(2, seed=9)
    cases = [observe(x[i : i + 1], y[i : i + 1], f"c{i}") for i in range(2)]
    attack = learning_to_invert(images=str(archive), simulations=40, epochs=1, hidden=16)
    both, (alone,) = attack(cases, rng=seeded()), attack(cases[1:], rng=seeded())
    assert torch.equal(alone.x, both[1].x)
    assert not torch.equal(both[0].x, both[1].x)


def test_null_is_the_mean_public_image(archive: Path) -> None:
    case = observe(*draw_images(2, seed=9))
    attack = AttackSpec(name="learning_to_invert", arguments={"images": str(archive)}, null=True).build()
    (null,) = attack([case], rng=seeded())
    with np.load(archive) as arrays:
        mean = torch.from_numpy(arrays["images"].astype(np.float32) / 255).mean(dim=0).permute(2, 0, 1)
    torch.testing.assert_close(null.x, mean.expand(2, *DATA.shape))


def test_unsuitable_clients_are_refused_with_the_reason(archive: Path) -> None:
    attack = learning_to_invert(images=str(archive), simulations=20, epochs=1)
    with pytest.raises(ValueError, match="name an archive"):
        learning_to_invert()([observe(*draw_images(1, seed=0))], rng=seeded())
    with pytest.raises(ValueError, match=f"{MAX_BATCH + 1} examples"):
        attack([observe(*draw_images(MAX_BATCH + 1, seed=0))], rng=seeded())
    with pytest.raises(ValueError, match="2 steps of sgd"):
        attack([observe(*draw_images(1, seed=0), steps=2)], rng=seeded())
