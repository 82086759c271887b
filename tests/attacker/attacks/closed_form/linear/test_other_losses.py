"""Tests of batches of table rows whose clients use another loss than stated, which changes only the errors at the outputs."""

from collections.abc import Callable

import pytest
import torch
from generators import seeded
from observations import observe_loss
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from attacker.attacks import Case, exact
from attacker.attacks.confidence import MIN_LIKELY
from attacker.reconstruction import MAX_RECOVERED_MSE, Reconstruction
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training

FEATURES, CLASSES, ROWS = 13, 3, 4
Loss = Callable[[Tensor, Tensor], Tensor]


def smooth(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits, y, label_smoothing=0.1)


def weigh(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits, y, weight=torch.tensor([0.2, 1.0, 4.0]))


def square(logits: Tensor, y: Tensor) -> Tensor:
    return mse_loss(logits, 3 * torch.rand(len(y), CLASSES, generator=seeded(int(y.sum()))))


def mix(logits: Tensor, y: Tensor) -> Tensor:
    """MixUp with label smoothing, of inputs that are mixed already."""
    return 0.6 * smooth(logits, y) + 0.4 * smooth(logits, (y + 1) % CLASSES)


def attack(loss: Loss, x: Tensor, *, seed: int, hidden: tuple[int, ...] = (64, 32)) -> Reconstruction:
    data = DataSpec(shape=tuple(x.shape[1:]), num_classes=CLASSES)
    spec = ModelSpec(name="mlp", arguments={"hidden": list(hidden)})
    model = models.build(spec, data, seed=seed)
    y = torch.randint(CLASSES, (len(x),), generator=seeded(seed))
    training = Training(learning_rate=0.1, batch_size=len(x), steps=1)
    observation = observe_loss(loss(model(x), y), model, model=spec, data=data, training=training)
    return exact(fallback="none")([Case((observation,))], rng=seeded())[0]


@pytest.mark.parametrize("loss", [smooth, weigh, square])
@pytest.mark.parametrize("rows", [1, ROWS])
def test_rows_of_another_loss_are_certain_and_right(loss: Loss, rows: int) -> None:
    certain = 0
    for seed in range(6):
        x = torch.randn(rows, FEATURES, generator=seeded(seed))
        found = attack(loss, x, seed=seed)
        nearest = torch.cdist(found.x, x).amin(dim=1)
        sure = found.confidence >= MIN_LIKELY
        assert float(nearest[sure].max() if bool(sure.any()) else 0.0) < 1e-3
        certain += int(sure.sum())
    assert certain >= 0.7 * 6 * rows


def test_inputs_that_clients_mixed_are_not_certain() -> None:
    for seed in range(6):
        x = torch.randn(ROWS, FEATURES, generator=seeded(seed))
        assert not bool((attack(mix, x, seed=seed).confidence >= MIN_LIKELY).any())


@pytest.mark.parametrize("loss", [smooth, weigh])
def test_mixtures_that_the_first_layer_does_not_determine_are_not_certain(loss: Loss) -> None:
    """With some errors at the outputs, mixtures of the two images explain the gradients of both layers of this narrow network."""
    for seed in range(4):
        x = torch.rand(2, 3, 4, 4, generator=seeded(seed))
        found = attack(loss, x, seed=seed, hidden=(16,))
        error = (found.x[:, None] - x).flatten(2).square().mean(dim=2).amin(dim=1)
        assert not bool((error[found.confidence >= MIN_LIKELY] > MAX_RECOVERED_MSE).any())
