"""Order of a client's examples: which of them it uses in which optimiser step.

With `training.steps`, an unfinished epoch continues in the next round. With `training.epochs`, each round begins a new epoch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsim.recording.training import Training

BatchIndices = NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """Position of a client in its data: the current epoch, counted from 0, and the number of its examples that are used already.

    If all are used, the next batch begins the next epoch.
    """

    epoch: int = 0
    position: int = 0


def choose_versions(indices: BatchIndices, canaries: int, coins: BatchIndices) -> tuple[BatchIndices, list[tuple[int, int]]]:
    """Return the indices of the examples that a client trains on, and its canary pairs, of which it uses one example each.

    Canary pairs serve an audit: from what the server saw, the audit guesses which example of each pair was used. Pair i consists
    of `indices[2 * i]` and `indices[2 * i + 1]`, and coin i decides which of the two is used; the other one is never used.

    indices: data set indices of the client's examples. canaries: number of pairs. coins: random 0 or 1, one per pair; 0 chooses
    the first example. The returned indices begin with the chosen examples; then come those that are in no pair. Raises ValueError
    if `indices` has fewer than `2 * canaries` examples.
    """
    if 2 * canaries > len(indices):
        raise ValueError(
            f"clients.canaries = {canaries} takes {2 * canaries} examples, a pair for each canary, and a client has "
            f"{len(indices)}; lower clients.canaries"
        )
    pairs = indices[: 2 * canaries].reshape(canaries, 2)
    used = pairs[np.arange(canaries), coins]
    return np.concatenate([used, indices[2 * canaries :]]), [(int(a), int(b)) for a, b in pairs]


def draw_batches(
    cursor: Cursor, size: int, training: Training, order: Callable[[int], BatchIndices]
) -> tuple[list[BatchIndices], Cursor]:
    """Return the batches of one round, as positions (0 .. size - 1) among the client's examples, and the cursor after the round.

    cursor: the cursor after the round before. size: number of the client's examples. order: maps the number of an epoch, from 0,
    to the positions (size,) in the order in which this epoch uses them.
    Raises ValueError if `training.drop_last` is set and `size` examples do not fill one batch.
    """
    if training.drop_last and size < training.batch_size:
        raise ValueError(
            f"{size} examples do not fill one batch of {training.batch_size}, and training.drop_last is set; lower batch_size"
        )
    usable = size - size % training.batch_size if training.drop_last else size
    if training.epochs is None:
        assert training.steps is not None
        steps, epoch, position = training.steps, cursor.epoch, cursor.position
    else:
        steps, epoch, position = training.epochs * -(-usable // training.batch_size), cursor.epoch, 0
    chosen = []
    for _ in range(steps):
        if position >= usable:
            epoch, position = epoch + 1, 0
        stop = min(position + training.batch_size, usable)
        chosen.append(order(epoch)[position:stop])
        position = stop
    return chosen, Cursor(epoch, position) if training.epochs is None else Cursor(epoch + 1, 0)
