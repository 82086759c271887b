"""Truth of a recorded app, which its owner gives, since the clients of an app that records itself write none."""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim import data as datasets
from fedsim.data import Dataset, Examples
from fedsim.data import client_parts as parts
from fedsim.recording import DataSpec, Recording, Training
from fedsim.truth import TruthWriter, describe_dataset

DATA_FOLDER = "data"
"""Name of the folder with the examples, inside the folder of truth."""
RANGE_TOLERANCE = 1e-3
"""Largest distance of a value from [0, 1] that is taken for a rounding error and clamped."""


def write_truth(
    recording: Recording,
    examples: Mapping[tuple[int, str], tuple[Any, Any]],
    *,
    others: tuple[Any, Any] | None = None,
) -> Path:
    """Write which examples clients used, so that attacks on a recorded app can be scored. Return the folder `truth` of the run.

    `fedleak.score`, `attacker score` and `attacker audit` then use them by default. Attacks never read them.

    examples: for the round and the name of a client, as in the rows of `Recording.read_rows`, all examples (x, y) that it trained
              on in this round, in the order of their first use if it is known. x: (N, *shape), real numbers in [0, 1] or bytes,
              as they are before the normalisation. y: (N,), integers. Each is a tensor or an array. Updates whose examples are
              left out cannot be scored, and `fedsim verify` names them. Equal examples count as one, also in other rounds.
    others:   further examples (x, y) like those of the clients, best several hundred. Scores compare each reconstruction with
              them, to tell a recovered example from chance; without them, few examples can hardly show a leak.
    The examples are assigned to local steps as `Training` states it, one epoch like the other.

    Raises ValueError, and writes nothing, if the run has a folder `truth` already, if there are no examples, if the recording has
    no update of a round and client, if its steps use fewer examples, or if examples do not have the shape, range or labels that
    the recording states.
    """
    folder = recording.folder.resolve().parent / "truth"
    if folder.exists():
        raise ValueError(f"{folder} exists already; delete this folder to write other examples")
    attempts = {(row.round, row.client): row.attempt for row in recording.read_rows() if row.status in ("complete", "masked")}
    if not examples:
        raise ValueError("no examples are given; give those of at least one round and client")
    training = recording.manifest.training
    places: dict[tuple[bytes, int], int] = {}
    used: dict[tuple[int, str], list[int]] = {}
    for key, (x, y) in examples.items():
        if key not in attempts:
            known = ", ".join(str(one) for one in sorted(attempts)[:3])
            raise ValueError(f"{key!r}: the recording has no update of this round and client; it has {known}, ...")
        values, labels = _check(repr(key), x, y, recording.manifest.data)
        if training.steps is not None and len(labels) > training.steps * training.step_size:
            raise ValueError(
                f"examples of {key!r}: {len(labels)} are given, and a round of {training.steps} * {training.step_size} uses "
                "fewer; give only those that the client used in this round"
            )
        rows = zip(values, labels.tolist(), strict=True)
        used[key] = [places.setdefault((value.tobytes(), label), len(places)) for value, label in rows]
    spec = recording.manifest.data
    if others is not None:
        for value, label in zip(*_check("others", *others, spec), strict=True):
            places.setdefault((value.tobytes(), int(label)), len(places))
    stored = np.stack([np.frombuffer(value, np.float32).reshape(spec.shape) for value, _ in places])
    train = Examples(values=stored, labels=np.array([label for _, label in places], np.int64))
    names = tuple(map(str, range(spec.num_classes)))
    empty = Examples(values=stored[:0], labels=train.labels[:0])
    data = Dataset(name="the given examples", spec=spec, class_names=names, train=train, test=empty)
    parts.write_part(folder / DATA_FOLDER, data, train)
    name = f"part:{folder / DATA_FOLDER}"
    describe_dataset(folder, lambda: datasets.describe(data, name, {}))
    for (round, client), indices in used.items():
        steps = _assign_to_steps(indices, training)
        TruthWriter(folder, client).write(round, attempts[round, client], steps)
    return folder


def _check(key: str, x: Any, y: Any, spec: DataSpec) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return examples as arrays. Raises ValueError, naming `key`, if they do not fit `spec`. key: what they belong to."""
    values, labels = np.asarray(x), np.asarray(y)
    if values.shape != (len(labels) if labels.ndim == 1 else -1, *spec.shape) or not len(labels):
        shape = ", ".join(map(str, spec.shape))
        raise ValueError(
            f"examples of {key}: x must have shape (N, {shape}) and y shape (N,), with N > 0, got {values.shape} and "
            f"{labels.shape}"
        )
    if labels.dtype.kind not in "iu" or not 0 <= labels.min() <= labels.max() < spec.num_classes:
        found = f"{labels.dtype} from {labels.min()} to {labels.max()}"
        raise ValueError(f"examples of {key}: labels must be integers from 0 to {spec.num_classes - 1}, got {found}")
    scaled = values.astype(np.float32) / (255 if values.dtype == np.uint8 else 1)
    if not (scaled.min() >= -RANGE_TOLERANCE and scaled.max() <= 1 + RANGE_TOLERANCE):
        raise ValueError(
            f"examples of {key}: values must lie in [0, 1], got [{scaled.min():g}, {scaled.max():g}]; give them as they are "
            "before the normalisation"
        )
    return scaled.clip(0, 1), labels.astype(np.int64)


def _assign_to_steps(indices: Sequence[int], training: Training) -> list[list[int]]:
    """Return the indices of the examples of each local step of a round.

    If the steps need more examples than there are, the client starts again with the first one.
    """
    sizes = training.count_step_examples(len(indices))
    if sizes is None:
        assert training.steps is not None
        sizes = (training.step_size,) * training.steps
    epoch = len(indices) if training.epochs is None else sum(sizes) // training.epochs or len(indices)
    order = cycle(indices[:epoch])
    return [list(islice(order, size)) for size in sizes or (len(indices),)]
