"""Tests that updates with error feedback are explained by what a defense kept of earlier rounds."""

from dataclasses import replace

import pytest
import torch
from observations import observe_rounds, observe_steps
from torch import Generator, Tensor

from attacker.attacks import Case
from attacker.attacks.membership.attack import Membership, keeps_values
from attacker.attacks.membership.pool import Pool
from attacker.attacks.membership.regression import combine
from defenses import DefenseSpec
from fedsim.recording import DataSpec, ModelSpec, Training

DATA = DataSpec(shape=(1, 8, 8), num_classes=4, mean=(0.5,), std=(0.5,))
MODEL = ModelSpec(name="mlp", arguments={"hidden": [32]})
TRAINING = Training(learning_rate=0.1, batch_size=8, epochs=1, weight_decay=0.01)


@pytest.fixture
def pool() -> Pool:
    rng = Generator().manual_seed(0)
    return Pool(torch.rand(60, 1, 8, 8, generator=rng), torch.arange(60) % DATA.num_classes)


def record(defense: str, x: Tensor, y: Tensor, rounds: int) -> Case:
    """Return the case of a client that takes one step on the same examples in each round."""
    settings = {"epochs": 1, "steps": None, "weight_decay": 0.01}
    return observe_rounds([[(x, y)]] * rounds, model=MODEL, data=DATA, defense=defense, **settings)


@pytest.mark.parametrize(
    "defense",
    [
        "top_k(0.05, error_feedback=True)",
        "random_k(0.05, error_feedback=True)",
        "dgc(0.02)",
        "dgc(0.02, nesterov=True, masking=False, dense_vectors=False)",
        "clip(100) | top_k(0.05, error_feedback=True)",
    ],
)
def test_examples_explain_what_is_sent_late(defense: str, pool: Pool) -> None:
    """Of one step on eight examples, each has the coefficient 1/8 in every round, and the others have 0."""
    case = record(defense, pool.x[:8], pool.y[:8], rounds=12)
    assert keeps_values(case)
    found = Membership().fit([case], Pool(pool.x[:8], pool.y[:8]), Generator())
    for seen in case.observations[4:]:
        torch.testing.assert_close(found[seen.key].values, torch.full((8,), 1 / 8).double(), rtol=2e-3, atol=0)


def test_only_defenses_that_send_kept_values_are_followed(pool: Pool) -> None:
    for defense in ("", "top_k(0.1)", "sign('mean')", "sign('mean', error_feedback=True)", "gaussian(0.1)"):
        seen = observe_steps((pool.x[:4], pool.y[:4]), model=MODEL, data=DATA, defense=defense)
        assert not keeps_values(Case((seen,)))


def test_scores_of_residuals_separate_training_examples(pool: Pool) -> None:
    """The candidates' gradients of a round alone explain values that are sent late less well."""
    case = record("top_k(0.05, error_feedback=True)", pool.x[:8], pool.y[:8], rounds=30)
    unaware = Case(tuple(replace(o, defenses=DefenseSpec.parse("top_k(0.05)")) for o in case.observations))
    margins = []
    for one in (case, unaware):
        found = Membership().fit([one], pool, Generator())
        scores = combine([found[o.key] for o in one.observations[20:]])
        margins.append(float((scores[:8].min() - scores[8:].max()) / scores[8:].std()))
    assert margins[0] > max(3.0, 2 * margins[1])
