"""Oracles: information that no server has and that the user gives to an attack by an explicit option.

Every score row names them.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call

from attacker.scoring.score import Scorer
from fedsim import models
from fedsim.recording import Recording
from fedsim.recording.reader import Row
from fedsim.truth import compute_digest


def digest_truth(folders: Sequence[Path]) -> str:
    """Return a digest of all truth in these folders: which examples of which data set each client used.

    Results of an attack that was given labels or logits from other truth are therefore not reused.
    """
    return compute_digest(folders)


def read_true_labels(scorer: Scorer, row: Row, cohort: Sequence[str] = ()) -> Tensor:
    """Return the labels (N,), in ascending order, of the examples that an update was computed from.

    They are sorted so that their order reveals nothing. An example that was used in several epochs has one label here, since
    `row.num_examples` counts it once. row: the update's entry in the recording. cohort: the clients whose updates were added by
    secure aggregation; empty for a single client's update.
    """
    return _load_used(scorer, row, cohort)[1]


def compute_true_logits(scorer: Scorer, recording: Recording, row: Row, cohort: Sequence[str] = ()) -> Tensor:
    """Return the logits (N, K) of the examples that an update was computed from, in the order of `read_true_labels`.

    The model is in eval mode and has the weights that the server sent to the client. row, cohort: as in `read_true_labels`.
    """
    observation = recording.read_observation(row)
    model = models.build(observation.model, observation.data).eval()
    x, _ = _load_used(scorer, row, cohort)
    with torch.no_grad():
        logits: Tensor = functional_call(model, {**observation.buffers, **observation.weights}, (observation.data.normalise(x),))
    return logits


def _load_used(scorer: Scorer, row: Row, cohort: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the examples x (N, *shape) and labels (N,) that an update was computed from, in ascending order of the labels."""
    used = [[index for _, _, index in scorer.read_used(row.round, row.attempt, name).examples] for name in cohort or [row.client]]
    total = sum(map(len, used))
    shares = [len(own) if row.num_examples is None else min(row.num_examples, total) * len(own) // total for own in used]
    x, y = scorer.data.train[[index for own, share in zip(used, shares, strict=True) for index in own[:share]]]
    order = y.argsort(stable=True)
    return x[order], y[order]
