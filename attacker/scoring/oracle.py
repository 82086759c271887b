"""Oracles of true labels and logits: information that no server has and that a user gives to an attack by an explicit option."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from attacker.attacks.networks.forward import read_state, run_forward_pass
from attacker.scoring.score import Scorer
from fedsim import models
from fedsim.recording import Recording
from fedsim.recording.index import Row
from fedsim.truth import compute_digest


def digest_truth(folders: Sequence[Path]) -> str:
    """Return a digest of which examples of which data set each client used, according to these folders of truth.

    The digest does not depend on the paths of the folders or their order. It tells whether results of an attack that was given
    labels or logits come from the same truth.
    """
    return compute_digest(folders)


def read_true_labels(scorer: Scorer, row: Row, cohort: Sequence[str] = ()) -> Tensor:
    """Return the labels (N,), in ascending order, of the examples that an update was computed from.

    They are sorted so that their order reveals nothing. If `row.num_examples`, the number of examples behind the update, is not
    None, only that many uses are counted, the first ones, so that further epochs do not repeat examples. The number of a secure
    sum is divided among its clients in proportion to their numbers of uses, rounded down. If `row.num_examples` is None, each
    use counts, so that N includes repeats. Raises NoTruth if no folder of truth has the examples.

    row: the update's entry in the recording. cohort: the clients whose updates were added by secure aggregation; empty for a
    single client's update.
    """
    return _load_used(scorer, row, cohort)[1]


def compute_true_logits(scorer: Scorer, recording: Recording, row: Row, cohort: Sequence[str] = ()) -> Tensor:
    """Return the logits (N, K) of the examples whose labels `read_true_labels` returns, in the same order.

    The model is in eval mode and has the weights that the server sent to the client. row, cohort: as in `read_true_labels`.
    """
    observation = recording.read_observation(row)
    model = models.build(observation.model, observation.data).eval()
    x, _ = _load_used(scorer, row, cohort)
    with torch.no_grad():
        return run_forward_pass(model, read_state(model, observation), observation.data.normalise(x))


def _load_used(scorer: Scorer, row: Row, cohort: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return the examples x (N, *shape) and labels (N,) behind an update, in ascending order of the labels.

    Which uses count is described in `read_true_labels`.
    """
    used = [
        [index for _, _, index in scorer.truth.read_used(row.round, row.attempt, name).examples]
        for name in cohort or [row.client]
    ]
    total = sum(map(len, used))
    shares = [
        len(indices) if row.num_examples is None else min(row.num_examples, total) * len(indices) // total for indices in used
    ]
    x, y = scorer.data.train[[index for indices, share in zip(used, shares, strict=True) for index in indices[:share]]]
    order = y.argsort(stable=True)
    return x[order], y[order]
