"""Oracles: information beyond the threat model that the user requests by name. Every row states them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from attacker.scoring.score import Scorer
from fedsim import models
from fedsim.recording import Recording
from fedsim.recording.reader import Row
from fedsim.truth import digest_of


def digest_truth(folders: Sequence[Path]) -> str:
    """Return a digest of all that folders of truth say: what oracles tell belongs to the identity of results."""
    return digest_of(folders)


def true_labels(scorer: Scorer, row: Row, cohort: Sequence[str] = ()) -> Tensor:
    """Return the labels of the examples behind an update, ascending: the multiset, without their order.

    For several epochs, those of the first one, since `num_examples` counts each example once. cohort: the clients of a sum.
    """
    return _used(scorer, row, cohort)[1]


def true_logits(scorer: Scorer, recording: Recording, row: Row, cohort: Sequence[str] = ()) -> Tensor:
    """(N, K), what the model that was sent makes of the examples behind an update, in the order of `true_labels`."""
    observation = recording.observation(row)
    model = models.build(observation.model, observation.data).eval()
    x, _ = _used(scorer, row, cohort)
    with torch.no_grad():
        logits: Tensor = functional_call(model, {**observation.buffers, **observation.weights}, (observation.data.normalise(x),))
    return logits


def _used(scorer: Scorer, row: Row, cohort: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The examples, in ascending order of their labels."""
    used = [[index for _, _, index in scorer.used(row.round, row.attempt, name).examples] for name in cohort or [row.client]]
    total = sum(map(len, used))
    shares = [len(own) if row.num_examples is None else min(row.num_examples, total) * len(own) // total for own in used]
    x, y = scorer.data.train[[index for own, share in zip(used, shares, strict=True) for index in own[:share]]]
    order = y.argsort(stable=True)
    return x[order], y[order]
