"""Tests of the attack on imprint layers: examples alone in their bins are exact, and mixtures get low confidence."""

from dataclasses import replace

import pytest
import torch
from generators import seeded
from observations import make_observation, observe_rounds
from torch import Tensor, nn

import fedleak
from attacker.attacks import Case, find_unmet, robbing_the_fed
from attacker.attacks.closed_form.imprint import CERTIFIED_CONFIDENCE
from attacker.attacks.needs import list_oracles
from attacker.reconstruction import MAX_RECOVERED_MSE, Reconstruction
from attacker.scoring.metrics import is_recovered
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training
from fedsim.recording.codec import encode

DATA = DataSpec(shape=(1, 8, 8), num_classes=5, mean=(0.5,), std=(0.25,))
SPEC = ModelSpec(name="imprint", arguments={"base": "mlp", "bins": 64, "spread": 0.5})


def make_images(brightness: Tensor, seed: int = 0) -> Tensor:
    """Return random images with the given means, (N, 1, 8, 8)."""
    noise = 0.2 * torch.rand(len(brightness), *DATA.shape, generator=seeded(seed))
    return noise - noise.mean(dim=(1, 2, 3), keepdim=True) + brightness.reshape(-1, 1, 1, 1)


def make_case(x: Tensor, y: Tensor, *, steps: int = 1, model: ModelSpec = SPEC, noise: float = 0.0) -> Case:
    batches = list(zip(x.chunk(steps), y.chunk(steps), strict=True))
    (seen,) = observe_rounds([batches], model=model, data=DATA, learning_rate=0.01).observations
    update = {name: u + noise * torch.randn(u.shape, generator=seeded(i)) for i, (name, u) in enumerate(seen.update.items())}
    return Case((replace(seen, payload=encode(update)),))


def attack(case: Case) -> Reconstruction:
    (found,) = robbing_the_fed()([case], rng=seeded())
    return found


def test_examples_alone_in_their_bins_are_exact_with_their_labels() -> None:
    x, y = make_images(torch.tensor([0.3, 0.4, 0.5, 0.6, 0.7])), torch.tensor([4, 0, 2, 2, 1])
    found = attack(make_case(x, y))
    order = found.x.mean(dim=(1, 2, 3)).argsort()
    torch.testing.assert_close(found.x[order], x, atol=1e-4, rtol=0)
    assert found.y[order].tolist() == y.tolist()
    assert found.confidence.tolist() == pytest.approx([CERTIFIED_CONFIDENCE] * 5)


def test_two_examples_in_one_bin_get_low_confidence() -> None:
    x, y = make_images(torch.tensor([0.3, 0.505, 0.505, 0.7])), torch.tensor([0, 1, 3, 2])
    found = attack(make_case(x, y))
    certified = found.confidence > 0.9
    assert int(certified.sum()) == 2
    brightness = found.x[certified].mean(dim=(1, 2, 3)).sort().values
    torch.testing.assert_close(brightness, torch.tensor([0.3, 0.7]), atol=1e-3, rtol=0)
    assert found.x.shape == x.shape
    assert (found.x[found.confidence == 0] == 0.5).flatten(1).all(dim=1).any()  # one place stays grey


def test_confidence_is_calibrated_over_random_batches() -> None:
    sums, recovered, certified_wrong = 0.0, 0, 0
    for seed in range(12):
        x = make_images(0.5 + 0.12 * torch.randn(16, generator=seeded(seed)).clamp(-2, 2), seed)
        found = attack(make_case(x, torch.randint(5, (16,), generator=seeded(seed))))
        near = torch.cdist(found.x.flatten(1), x.flatten(1)).argmin(dim=1)
        good = is_recovered(found.x.clamp(0, 1), x[near]) & (found.confidence > 0)
        exact = torch.isclose(found.x, x[near], atol=1e-3).flatten(1).all(dim=1)
        sums, recovered = sums + float(found.confidence.sum()), recovered + int(good.sum())
        certified_wrong += int((~exact & (found.confidence > 0.9)).sum())
    assert certified_wrong == 0
    assert abs(sums - recovered) / (12 * 16) < 0.1


def test_examples_are_recovered_after_two_local_steps() -> None:
    x, y = make_images(torch.tensor([0.3, 0.7, 0.4, 0.6])), torch.tensor([0, 1, 2, 3])
    found = attack(make_case(x, y, steps=2))
    distance = (found.x[:, None] - x[None]).abs().flatten(2).amax(dim=2)
    assert float(distance.min(dim=0).values.max()) < 0.02


def test_noise_above_the_signal_gives_no_confidence() -> None:
    x, y = make_images(torch.tensor([0.3, 0.4, 0.6, 0.7])), torch.tensor([0, 1, 2, 3])
    assert float(attack(make_case(x, y, noise=10.0)).confidence.max()) == 0.0


@pytest.mark.parametrize(("rate", "decay"), [(1e-3, 0.0), (1e-2, 0.1)], ids=["rounded weights", "weight decay"])
def test_errors_of_the_biases_are_not_counted_as_examples(rate: float, decay: float) -> None:
    """Clients that send the difference of rounded weights, or decay their weights without saying so, fill empty bins."""
    data = replace(DATA, mean=(0.0,), std=(1.0,))
    network = models.build(SPEC, data)
    weights = {name: p.detach().clone() for name, p in network.named_parameters()}
    wrong = 0
    for seed in range(8):
        x = make_images(0.5 + 0.12 * torch.randn(16, generator=seeded(seed)).clamp(-2, 2), seed)
        y = torch.randint(5, (16,), generator=seeded(seed))
        gradient = torch.autograd.grad(nn.functional.cross_entropy(network(x), y), list(network.parameters()))
        update = {name: (w - rate * (g + decay * w)) - w for (name, w), g in zip(weights.items(), gradient, strict=True)}
        training = Training(learning_rate=rate, batch_size=16, steps=1)
        found = attack(Case((make_observation(update, weights, model=SPEC, data=data, training=training),)))
        near = torch.cdist(found.x.flatten(1), x.flatten(1)).square().amin(dim=1) / 64
        wrong += int(((found.confidence >= 0.5) & (near > MAX_RECOVERED_MSE)).sum())
    assert wrong == 0


def test_more_bins_than_the_examples_fill_are_undecided() -> None:
    """A client that counts only half of its examples fills more bins than it can."""
    x, y = make_images(torch.linspace(0.2, 0.8, 12)), torch.arange(12) % 5
    (observation,) = make_case(x, y).observations
    found = attack(Case((replace(observation, num_examples=6),)))
    assert found.confidence.isnan().all()
    assert any(note.startswith("confidence is undecided for 12 examples: the bins cannot be counted") for note in found.notes)


def test_imprint_layer_is_required_and_the_malicious_server_is_stated() -> None:
    x, y = make_images(torch.tensor([0.3, 0.7])), torch.tensor([0, 1])
    (reason,) = find_unmet(robbing_the_fed(), make_case(x, y, model=ModelSpec(name="mlp")))
    assert "imprint layer" in reason
    assert find_unmet(robbing_the_fed(), make_case(x, y)) == []
    assert list_oracles(robbing_the_fed().needs) == ("malicious server",)


def test_neurons_that_saturate_are_read_one_by_one() -> None:
    """The paper's sparse variant: hard tanh, with each row divided by the width of its bin."""
    x, y, bins = make_images(torch.linspace(0.3, 0.7, 6)), torch.tensor([4, 0, 2, 2, 1, 3]), 40
    thresholds = torch.linspace(0.2, 0.8, bins)
    sort, join = nn.Linear(64, bins), nn.Linear(bins, 64)
    with torch.no_grad():
        sort.weight.fill_(1 / 64 * bins)
        sort.bias.copy_(-thresholds * bins)
        join.weight.fill_(1 / bins)
    model = nn.Sequential(nn.Flatten(), sort, nn.Hardtanh(0.0, 1.0), join, nn.ReLU(), nn.Linear(64, 5))
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    observation = fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8), num_examples=6)
    found = fedleak.attack(observation, "robbing_the_fed").reconstructions[0]
    sure = found.confidence > 0.9
    error = (found.x[:, None] - x).flatten(2).square().mean(dim=2).amin(dim=1)
    assert int(sure.sum()) >= 5
    assert float(error[sure].max()) < 1e-8
