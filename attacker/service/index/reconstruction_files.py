"""Readers of parts of a reconstruction file, such as its summary or one example, that do not read the rest.

A page shows the summaries of thousands of files, and one image at a time.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attacker.service.index.json_lines import to_number
from fedsim.recording import DamagedFile
from fedsim.recording.safe_files import open_tensors, parse_json, read_bytes, shorten

MAX_BYTES = 8 * 2**30
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


def read_answer(run: Path, name: str) -> ReconstructionSummary:
    """Read the summary of the file `name` below `run`. Raises DamagedFile if it is not a reconstruction."""
    with open_tensors(run, name, limit=MAX_BYTES) as file:
        return _summarise_answer(file, _read_facts(file))


def read_whole(run: Path, name: str) -> WholeReconstruction:
    """Read the file `name` below `run` without its images. Raises DamagedFile if it is not a reconstruction."""
    with open_tensors(run, name, limit=MAX_BYTES) as file:
        facts = _read_facts(file)
        places: dict[int, tuple[int, str, int, int]] = {}
        rounds: dict[int, set[int]] = {}
        for round, client, batch, position, example in map(_parse_slot, _get_list(facts, "slots")):
            places.setdefault(example, (round, client, batch, position))
            rounds.setdefault(example, set()).add(round)
        labels = _read_values(file, "y")
        if not np.isfinite(labels).all():
            raise ValueError(f"the labels of this reconstruction must be finite, but some are NaN or infinite; {REPLACE_ADVICE}")
        return WholeReconstruction(
            answer=_summarise_answer(file, facts),
            labels=tuple(int(label) for label in labels.tolist()),
            confidence=tuple(to_number(value) for value in _read_values(file, "confidence").tolist()),
            places=places,
            rounds={example: tuple(sorted(numbers)) for example, numbers in rounds.items()},
            losses=thin_curve(_read_values(file, "loss")),
            oracles=_parse_texts(facts, "oracles"),
            notes=_parse_texts(facts, "notes"),
            shape=_get_shape(file, "x"),
        )


def read_example(run: Path, name: str, number: int) -> Tensor:
    """Return one reconstructed example in float32, with values that are not clamped.

    number: its index, from 0. Raises DamagedFile if the file is not a reconstruction or an example has more than `MAX_VALUES`
    values, and IndexError if there is no such example.
    """
    with open_tensors(run, name, limit=MAX_BYTES) as file:
        _read_facts(file)
        count, *shape = _get_shape(file, "x")
        if not 0 <= number < count:
            raise IndexError(f"the reconstruction {name} has no example {number}: it holds {count} examples, counted from 0")
        if prod(shape) > MAX_VALUES:
            raise ValueError(f"an example of {prod(shape)} values cannot be shown; the limit is {MAX_VALUES} values")
        example: Tensor = file.get_slice("x")[number]
        return example.float()


def read_header(run: Path, name: str) -> dict[str, str]:
    """Return the metadata in the header of the safetensors file `name` below `run`; {} if the header has none.

    Raises DamagedFile if the file is missing or is not a safetensors file.
    """
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
    iterations = facts.get("iterations")
    return ReconstructionSummary(
        examples=len(confidence),
        route=str(facts.get("route", ""))[:200],
        iterations=iterations if type(iterations) is int and 0 <= iterations < 2**53 else None,
        seconds=to_number(facts.get("seconds")),
        loss=to_number(losses[-1]) if len(losses) else None,
        confidence=float(known.mean().clip(0, 1)) if len(known) else None,
        interrupted=bool(facts.get("interrupted", False)),
    )


def _read_facts(file: Any) -> dict[str, Any]:
    """Return the metadata of an open reconstruction. Raises ValueError if a tensor is missing or has a wrong shape."""
    facts = parse_json((file.metadata() or {}).get("facts", "null"))
    if not isinstance(facts, dict):
        raise ValueError(f"the metadata of a reconstruction must be a JSON object, got {shorten(facts)}; {REPLACE_ADVICE}")
    if missing := [name for name in ("x", "y", "confidence", "explained", "loss") if name not in file.keys()]:  # noqa: SIM118
        raise ValueError(f"this file is not a reconstruction, since it lacks the tensor {missing[0]}; {REPLACE_ADVICE}")
    x, y, confidence, loss = (_get_shape(file, name) for name in ("x", "y", "confidence", "loss"))
    if not x or not x[:1] == y == confidence or len(loss) != 1:
        raise ValueError(
            "the tensors x, y and confidence of a reconstruction must be of one length, and y, confidence and loss "
            f"one-dimensional, got shapes {shorten(x)}, {shorten(y)}, {shorten(confidence)} and {shorten(loss)}; {REPLACE_ADVICE}"
        )
    return facts


def _get_shape(file: Any, name: str) -> tuple[int, ...]:
    return tuple(file.get_slice(name).get_shape())


def _read_values(file: Any, name: str) -> NDArray[np.float64]:
    if (count := prod(_get_shape(file, name))) > MAX_VALUES:
        raise ValueError(
            f"the tensor {name} of this reconstruction has {count} values, more than the limit of {MAX_VALUES}; {REPLACE_ADVICE}"
        )
    values: NDArray[np.float64] = file.get_tensor(name).double().numpy()
    return values


def _parse_slot(slot: Any) -> tuple[int, str, int, int, int]:
    if not isinstance(slot, list) or len(slot) != 5:
        raise ValueError(
            f"an entry of slots in the metadata must be a list [round, client, batch, position, example], got {shorten(slot)}; "
            f"{REPLACE_ADVICE}"
        )
    round, client, batch, position, example = slot
    if not isinstance(client, str) or not all(type(n) is int and 0 <= n < 2**53 for n in (round, batch, position, example)):
        raise ValueError(
            "an entry [round, client, batch, position, example] of slots in the metadata must hold a name and four whole numbers "
            f"below 2**53, got {shorten(slot)}; {REPLACE_ADVICE}"
        )
    return round, client[:64], batch, position, example


def _get_list(facts: Mapping[str, Any], key: str) -> list[Any]:
    found = facts.get(key, [])
    if not isinstance(found, list):
        raise ValueError(f"the entry {key} of the metadata must be a list, got {shorten(found)}; {REPLACE_ADVICE}")
    return found


def _parse_texts(facts: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(str(text)[:1000] for text in _get_list(facts, key)[:100])


def read_failure(run: Path, name: str) -> str:
    """Return why a case failed, from the file `name` below `run`. If the file cannot be read, a message says so instead."""
    try:
        content = parse_json(read_bytes(run, name, limit=2**20))
    except ValueError as error:
        reason = error.reason if isinstance(error, DamagedFile) else str(error)
        return f"it failed, and its reason cannot be read: {reason}"
    return str(content.get("reason", "it failed"))[:2000] if isinstance(content, dict) else "it failed"
