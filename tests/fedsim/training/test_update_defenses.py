"""Tests that a federation learns under every defense, and that no two messages have the same noise."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_experiments import Federate

from defenses import DEFENSES, DefenseSpec
from fedsim.client.identity import ClientIdentity

MILD = {
    "cpl_noise": "G-10e-4",
    "cpl_prune": "cpl_prune(20)",
    "clip": "clip(1)",
    "clip_each": "clip_each(1)",
    "dgc": "dgc(0.2)",
    "ef_signsgd": "ef_signsgd()",
    "gaussian": "gaussian(0.01)",
    "gradient_dropout": "gradient_dropout(0.2)",
    "in_gradient_units": "in_gradient_units(gaussian(0.01))",
    "laplace": "laplace(0.01)",
    "liu_clip": "liu_clip(4)",
    "liu_noise": "liu_noise(0.01)",
    "masked": "masked(gaussian(0.01), ['1.*'])",
    "prune": "prune(0.3)",
    "qsgd": "qsgd(levels=64)",
    "random_k": "random_k(0.5, error_feedback=True)",
    "rog_qsgd": "rog_qsgd(bits=6)",
    "rog_top_k": "rog_top_k(sparsity=0.3)",
    "rog_uniform": "rog_uniform(bits=6)",
    "sign": "sign(scale='mean', error_feedback=True)",
    "signsgd": "signsgd(learning_rate=0.03)",
    "top_k": "top_k(0.1, error_feedback=True)",
    "uniform": "uniform(8)",
    "withhold": "withhold(['1.bias'])",
}
"""A setting of each defense that lowers the accuracy little."""

SETTINGS: dict[str, Any] = {
    "rounds": 10,
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"learning_rate": 0.3, "batch_size": 16, "epochs": 1},
}


@pytest.fixture
def accuracy(federate: Federate) -> Callable[[str], float]:
    """A function that returns the held-out accuracy on digits after ten rounds under a defense."""

    def of(defense: str) -> float:
        run = federate("defended", defense=defense, **SETTINGS)
        return float(json.loads((run.out / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"])

    return of


UNDEFENDED = 0.9
"""A lower bound of the accuracy without a defense, which is tested below."""


def test_there_is_a_mild_setting_of_every_defense() -> None:
    assert set(MILD) == set(DEFENSES)


def test_the_federation_learns_without_a_defense(accuracy: Callable[[str], float]) -> None:
    assert UNDEFENDED < accuracy("") < UNDEFENDED + 0.05


@pytest.mark.parametrize("name", sorted(MILD))
def test_a_mild_setting_stays_within_five_points_of_no_defense(name: str, accuracy: Callable[[str], float]) -> None:
    assert accuracy(MILD[name]) > UNDEFENDED


@pytest.mark.parametrize("name", sorted(name for name in MILD if DEFENSES[name].random))
def test_noise_is_fresh_in_every_round_and_for_every_client(name: str) -> None:
    """If two clients send the same update in two rounds, the noise in the four messages is uncorrelated."""
    defense = DefenseSpec.parse(f"{name}({DEFENSES[name].example})", learning_rate=1.0).build()
    update = {"w": torch.linspace(-1, 1, 1000)}
    others = [ClientIdentity("a", f"other {i}").make_generator(1) for i in range(100)]
    mean = torch.stack([defense.apply(update, defense.init(update), rng)[0]["w"] for rng in others]).mean(dim=0)
    rngs = [ClientIdentity("a", secret).make_generator(number) for secret in ("00", "01") for number in (1, 2)]
    sent = [defense.apply(update, defense.init(update), rng)[0]["w"] for rng in rngs]
    for i, one in enumerate(sent):
        for other in sent[:i]:
            assert not torch.equal(one, other)
            together = torch.corrcoef(torch.stack([one - mean, other - mean]))[0, 1]
            assert together.abs() < 0.2
