"""Tests that mixtures of several examples of a batch are not called certain, whatever the zeros of the first layer say."""

import pytest
import torch
from generators import seed_default
from torch import Tensor, nn
from torch.nn import functional

import fedleak
from attacker.attacks.closed_form.linear import doubts
from attacker.reconstruction import Reconstruction
from fedsim.recording import Observation

CERTAIN = 0.9


def observe_trained(seed: int) -> tuple[Tensor, Observation]:
    """Return a batch of synthetic images and its observation, behind two hidden layers that were trained on other images."""
    torch.manual_seed(seed)
    patterns = torch.rand(3, 10, 1, 8, 8)[0]

    def draw(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(4, (count,))
        x = 0.25 * (patterns[y] - 0.5) + 0.2 * (torch.rand(count, 1, 8, 8) - 0.5) + 0.3 * (torch.rand(count, 1, 1, 1) - 0.5)
        return (x + 0.5).clamp(0, 1), y

    layers = (nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))
    model = nn.Sequential(nn.Flatten(), *layers)
    optimiser = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(60):
        x, y = draw(64)
        optimiser.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    x, y = draw(6)
    gradient = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    return x, fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8), num_examples=6)


def solve(observation: Observation) -> Reconstruction:
    return fedleak.attack(observation, "exact", route="linear", fallback="none").reconstructions[0]


def count_wrong(found: Reconstruction, x: Tensor) -> int:
    error = (found.x[:, None] - x).flatten(2).square().mean(dim=2).amin(dim=1)
    return int(((found.confidence > CERTAIN) & (error > 1e-6)).sum())


@pytest.mark.parametrize("seed", [20, 39])
def test_examples_whose_part_of_the_gradient_no_label_explains_are_undecided(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, observation = observe_trained(seed)
    found = solve(observation)
    assert count_wrong(found, x) == 0
    assert any("may be mixtures of several" in note for note in found.notes)
    monkeypatch.setattr(doubts, "MAX_TURNED", float("inf"))
    assert count_wrong(solve(observation), x) > 0  # what the zeros of the first layer alone would tell


def count_patients(seed: int) -> tuple[int, int]:
    """Return how many rows of a batch of four patients are certain, and how many of these are none of the batch.

    A patient has two numbers and one of two categories; the network has one hidden layer and two classes.
    """
    rng = torch.Generator().manual_seed(seed)
    age, pressure = 0.2 + 0.6 * torch.rand(4, generator=rng), 0.3 + 0.3 * torch.rand(4, generator=rng)
    smokes = (torch.rand(4, generator=rng) < 0.5).float()
    x, y = torch.stack([age, pressure, smokes, 1 - smokes], dim=1), (age + smokes > 1).long()
    with seed_default(seed):
        model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    gradient = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    found = solve(fedleak.observe(model, "cross_entropy", gradient, shape=(4,), num_examples=4))
    far = (found.x[:, None] - x).abs().amax(dim=2).amin(dim=1) > 0.05
    return int((found.confidence > CERTAIN).sum()), int(((found.confidence > CERTAIN) & far).sum())


@pytest.mark.parametrize("seed", [1, 13])
def test_means_of_rows_that_turn_on_the_same_neurons_are_undecided(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of seed 1 has a gradient of lower rank than examples, that of seed 13 one that no label explains."""
    assert count_patients(seed)[1] == 0
    monkeypatch.setattr(doubts, "MAX_HIDDEN_SHARED", 1.0)
    assert count_patients(seed)[1] > 0  # what the zeros of the first layer alone would tell


def test_whole_batches_stay_certain() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))
    rng = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=rng) / weight.shape[-1] ** 0.5
    x, y = torch.rand(6, 1, 8, 8, generator=rng), torch.arange(6)
    gradient = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    found = solve(fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8), num_examples=6))
    assert int((found.confidence > CERTAIN).sum()) == 6
    assert count_wrong(found, x) == 0


def test_mixtures_behind_a_layer_without_a_bias_are_undecided() -> None:
    """Two neurons each see one of four images alone, and two neurons see six others; nothing shows the lengths of the images."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(10, 1, 8, 8, generator=rng), torch.arange(10)
    alone = torch.linalg.pinv(x.flatten(1)).T[:4].repeat(2, 1) - 1e-3
    together = torch.linalg.pinv(x.flatten(1)).T[4:].sum(dim=0) * torch.tensor([[1.0], [2.0]])
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False), nn.ReLU(), nn.Linear(10, 10))
    model[1].weight.data = torch.cat([alone, together])
    gradient = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    found = solve(fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8), num_examples=10))
    assert len(found.x) > 4
    assert count_wrong(found, x) == 0


def test_a_single_neuron_is_no_evidence_of_a_single_example() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    nn.init.constant_(model[1].bias, -100.0)
    model[1].bias.data[0] = 10.0
    x, y = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    gradient = torch.autograd.grad(functional.cross_entropy(model(x), y), list(model.parameters()))
    found = solve(fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8), num_examples=4))
    assert not bool((found.confidence > CERTAIN).any())


def test_copies_of_one_image_are_recovered_where_others_could_be_mixed() -> None:
    """With two classes, the gradients of images that turn on the same neurons are parallel; only 8-bit values tell an image."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    a = torch.randint(256, (1, 1, 8, 8)) / 255
    b = (a + torch.randint(-2, 3, a.shape) / 255).clamp(0, 1)  # turns on the same neurons

    def observe(x: Tensor) -> Observation:
        gradient = torch.autograd.grad(
            functional.cross_entropy(model(x), torch.zeros(len(x), dtype=torch.long)), model.parameters()
        )
        return fedleak.observe(model, "cross_entropy", gradient, shape=(1, 8, 8), num_examples=len(x))

    found = solve(observe(a.repeat(3, 1, 1, 1)))
    assert float((found.x - a).abs().max()) < 1e-3
    assert float(found.confidence[0]) > CERTAIN
    for images in (torch.cat([a, b]), a.repeat(3, 1, 1, 1) * 0.91):
        with pytest.raises(ValueError, match="any answer would be a mixture"):
            solve(observe(images))
