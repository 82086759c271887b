"""Tests of batches whose clients compute in bfloat16 or float16: rounding neither hides right examples nor certifies mixtures."""

import pytest
import torch
from generators import seeded
from observations import observe_loss
from torch.nn import functional

from attacker.attacks import Case, exact
from attacker.attacks.closed_form.linear import doubts
from attacker.attacks.confidence import MIN_LIKELY
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training

DATA = DataSpec(shape=(64,), num_classes=6)
MODEL = ModelSpec(name="mlp", arguments={"hidden": [128]})


def attack(precision: torch.dtype, x: torch.Tensor, *, size: int, seed: int) -> Reconstruction:
    """Attack one step on rows x in mixed precision. told: number of examples that the client reports."""
    model = models.build(MODEL, DATA, seed=seed)
    with torch.autocast("cpu", dtype=precision):
        loss = functional.cross_entropy(model(x), torch.arange(len(x)) % 6)
    training = Training(
        learning_rate=0.1, batch_size=size, steps=1, precision="bfloat16" if precision == torch.bfloat16 else "float16"
    )
    observation = observe_loss(loss, model, model=MODEL, data=DATA, training=training)
    return exact(fallback="none")([Case((observation,))], rng=seeded())[0]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_most_rows_of_a_batch_are_certain_and_right(precision: torch.dtype) -> None:
    sure = 0
    for seed in range(4):
        x = torch.rand(4, 64, generator=seeded(seed))
        found = attack(precision, x, size=4, seed=seed)
        certain = found.confidence >= MIN_LIKELY
        error = torch.cdist(found.x, x).min(dim=1).values / 8
        assert float(error[certain].max()) < 0.01
        sure += int(certain.sum())
    assert sure >= 12


def test_the_threshold_for_half_precision_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubts, "MAX_HALF_TURNED", doubts.MAX_TURNED)
    x = torch.rand(4, 64, generator=seeded())
    assert not bool((attack(torch.bfloat16, x, size=4, seed=0).confidence >= MIN_LIKELY).any())


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_two_rows_that_are_reported_as_one_are_not_certain_in_half_precision(precision: torch.dtype) -> None:
    for seed in range(4):
        x = torch.rand(2, 64, generator=seeded(seed))
        assert not bool((attack(precision, x, size=1, seed=seed).confidence >= MIN_LIKELY).any())
