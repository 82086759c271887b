"""Readers of parts of a reconstruction file, such as its summary or one example, that do not read the rest.

A page shows the summaries of thousands of files, and one image at a time.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attacker.reconstruction import MAX_BYTES, read_facts
from attacker.service.index.json_lines import to_number
from fedsim.recording import DamagedFile
from fedsim.recording.safe_files import is_count, open_tensors, parse_json, read_bytes

MAX_VALUES = 100_000_000
REPLACE_ADVICE = "delete the file and replay the attack again"
"""Advice for a reconstruction that cannot be used. A replay skips a file that it can read, so that it must be deleted first."""
MAX_CURVE_POINTS = 200
"""Largest number of points of a loss curve."""


class ReconstructionSummary(NamedTuple):
    """One case's reconstruction in numbers.

    examples: number of reconstructed examples. route: the method that reconstructed them. loss: the attack's final loss; None if
    there is none or it is not finite. confidence: mean over examples of the attack's estimate of the probability that an example
    is recovered; None if no estimate is known. interrupted: whether the search stopped before its end.
    """

    examples: int
    route: str
    iterations: int | None
    seconds: float | None
    loss: float | None
    confidence: float | None
    interrupted: bool


class WholeReconstruction(NamedTuple):
    """A case's reconstruction without its images.

    labels: one class per example. confidence: one estimated probability per example that it is recovered; None if unknown.
    places: dict from the index of an example to the first of the places in the recording that it fills: round, client, local step
    from 1, and position in the batch of this step from 0.
    rounds: dict from the index of an example to all rounds in which the client used it, according to the attack. Both dicts lack
    examples that the attack assigns to no place.
    losses: pairs of iteration and loss, see `thin_curve`. oracles: names of information that the attack had and no server has.
    shape: shape of the tensor of all reconstructed examples; its first axis counts the examples.
    """

    answer: ReconstructionSummary
    labels: tuple[int, ...]
    confidence: tuple[float | None, ...]
    places: Mapping[int, tuple[int, str, int, int]]
    rounds: Mapping[int, tuple[int, ...]]
    losses: tuple[tuple[int, float], ...]
    oracles: tuple[str, ...]
    notes: tuple[str, ...]
    shape: tuple[int, ...]


@contextmanager
def _open(run: Path, name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open the reconstruction `name` below `run` within a `with` block, and yield the file and its metadata, see `read_facts`."""
    with open_tensors(run, name, limit=MAX_BYTES) as file:
        try:
            facts = read_facts(file)
        except ValueError as error:
            raise ValueError(f"is not a reconstruction: {error}; {REPLACE_ADVICE}") from None
        yield file, facts


def read_answer(run: Path, name: str) -> ReconstructionSummary:
    """Read the summary of the file `name` below `run`. Raises DamagedFile if it is not a reconstruction."""
    with _open(run, name) as (file, facts):
        return _summarise_answer(file, facts)


def read_whole(run: Path, name: str) -> WholeReconstruction:
    """Read the file `name` below `run` without its images. Raises DamagedFile if it is not a reconstruction."""
    with _open(run, name) as (file, facts):
        places: dict[int, tuple[int, str, int, int]] = {}
        rounds: dict[int, set[int]] = {}
        for slot in facts["slots"]:
            places.setdefault(slot.example, (slot.round, slot.client[:64], slot.batch, slot.position))
            rounds.setdefault(slot.example, set()).add(slot.round)
        return WholeReconstruction(
            answer=_summarise_answer(file, facts),
            labels=tuple(int(label) for label in _read_values(file, "y").tolist()),
            confidence=tuple(to_number(value) for value in _read_values(file, "confidence").tolist()),
            places=places,
            rounds={example: tuple(sorted(numbers)) for example, numbers in rounds.items()},
            losses=thin_curve(_read_values(file, "loss")),
            oracles=tuple(text[:1000] for text in facts["oracles"][:100]),
            notes=tuple(text[:1000] for text in facts["notes"][:100]),
            shape=tuple(file.get_slice("x").get_shape()),
        )


def read_example(run: Path, name: str, number: int) -> Tensor:
    """Return one reconstructed example in float32, with values that are not clamped.

    number: its index, from 0. Raises DamagedFile if the file is not a reconstruction or an example has more than `MAX_VALUES`
    values, and IndexError if there is no such example.
    """
    with _open(run, name) as (file, _):
        count, *shape = file.get_slice("x").get_shape()
        if not 0 <= number < count:
            raise IndexError(f"the reconstruction {name} has no example {number}: it holds {count} examples, counted from 0")
        if prod(shape) > MAX_VALUES:
            raise ValueError(f"an example of {prod(shape)} values cannot be shown; the limit is {MAX_VALUES} values")
        example: Tensor = file.get_slice("x")[number]
        return example.float()


def read_header(run: Path, name: str) -> dict[str, str]:
    """Return the metadata of a safetensors file below `run`, or {}. Raises DamagedFile for any other or a missing file."""
    with open_tensors(run, name, limit=MAX_BYTES) as file:
        return file.metadata() or {}


def thin_curve(losses: NDArray[np.float64]) -> tuple[tuple[int, float], ...]:
    """Return at most `MAX_CURVE_POINTS` points (iteration, loss), about evenly spaced from a curve's first value to its last.

    losses: the loss after each iteration; iterations are counted from 1. Points with an infinite loss or NaN are left out, also
    the ends.
    """
    if not len(losses):
        return ()
    chosen = np.unique(np.linspace(0, len(losses) - 1, min(MAX_CURVE_POINTS, len(losses))).round().astype(int))
    return tuple((int(at) + 1, float(losses[at])) for at in chosen if np.isfinite(losses[at]))


def _summarise_answer(file: Any, facts: Mapping[str, Any]) -> ReconstructionSummary:
    losses, confidence = _read_values(file, "loss"), _read_values(file, "confidence")
    known = confidence[np.isfinite(confidence)]
    return ReconstructionSummary(
        examples=len(confidence),
        route=facts["route"][:200],
        iterations=facts["iterations"] if is_count(facts["iterations"]) else None,
        seconds=to_number(facts["seconds"]),
        loss=to_number(losses[-1]) if len(losses) else None,
        confidence=float(known.mean().clip(0, 1)) if len(known) else None,
        interrupted=facts["interrupted"],
    )


def _read_values(file: Any, name: str) -> NDArray[np.float64]:
    if (count := file.get_slice(name).get_shape()[0]) > MAX_VALUES:
        raise ValueError(
            f"the tensor {name} of this reconstruction has {count} values, more than the limit of {MAX_VALUES}; {REPLACE_ADVICE}"
        )
    values: NDArray[np.float64] = file.get_tensor(name).double().numpy()
    return values


def read_failure(run: Path, name: str) -> str:
    """Return why a case failed, from the file `name` below `run`. If the file cannot be read, a message says so instead."""
    try:
        content = parse_json(read_bytes(run, name, limit=2**20))
    except ValueError as error:
        reason = error.reason if isinstance(error, DamagedFile) else str(error)
        return f"it failed, and its reason cannot be read: {reason}"
    return str(content.get("reason", "it failed"))[:2000] if isinstance(content, dict) else "it failed"
