"""Reconstructions, the results of attacks, and their file format."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedsim.recording.files import write_tensors
from fedsim.recording.safe_files import DamagedFile, is_count, open_tensors, parse_json, shorten
from fedsim.recording.tensor_files import DTYPES_BY_NAME

MAX_BYTES = 8 * 2**30
"""Size of the largest file of a reconstruction that is read."""
MAX_RECOVERED_MSE = 0.009
"""Largest mean squared error of an image in [0, 1] that counts as recovered. It is consistent with all success rates in tables 7
and 8 of the paper of the attack CPL (Wei et al. 2020).

One constant image for the whole data set passes this threshold on 0.1 % of CIFAR-10 and 0.4 % of CIFAR-100. A constant image of
each original's own mean colour passes on 3.1 % of both, 0.3 % of LFW and none of MNIST (1,500, 1,500, 400 and 1,500 images of the
tuning parts of benchmarks/support/splits.py). Such originals are nearly flat, see `attacker.scoring.metrics.is_flat`, and
verdicts count them separately.
"""
TENSOR_NAMES = ("x", "y", "confidence", "explained", "loss")
METADATA_TYPES = {
    "case": str,
    "route": str,
    "attack": str,
    "seconds": float,
    "interrupted": bool,
    **dict.fromkeys(("iterations", "evaluations", "restarts", "seed"), int),
}
"""Keys of a file's metadata besides slots, oracles, notes and evidence, with their types."""


@dataclass(frozen=True)
class Slot:
    """A place in the recording that a reconstructed example fills: round, client, local step and position in the step's batch.

    round, batch: numbers of the round and of the local step, counted from 1. position: counted from 0. Which reconstructed
    example of a batch has which position is arbitrary; scoring decides which original each is compared with.
    example: index of the example in the reconstruction.
    """

    round: int
    client: str
    batch: int
    position: int
    example: int


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """The result of an attack for one case: one observation (a client's update in a round), or several attacked together.

    case:       key of the case.
    x:          reconstructed examples, (N, *shape), not clamped to [0, 1]. y: labels, (N,) int64.
    confidence: (N,) in [0, 1], the estimated probability that scoring counts the example as recovered; NaN if the attack gives no
                estimate. See `attacker.attacks.confidence`.
    slots:      the places in the client's batches that the examples fill; an example used in several epochs has several.
    loss:       (T,) the attack's own loss after each iteration, of the restart that was kept; a method without iterations has a
                single value.
    iterations: number of iterations of all restarts. evaluations: number of evaluations of the simulated gradient.
    restarts:   number of restarts of the search. seed: seed of the attack's random numbers.
    seconds:    wall time; a search of several cases at once counts in equal shares.
    route:      the method that produced the examples, such as a closed form or a search. attack: the attack's name.
    oracles:    names of the oracles that the attack was given: knowledge beyond the threat model.
    interrupted: whether the search was stopped early; this is then the best result so far, and replay attacks the case again.
    notes:      the attack's remarks on this result, one sentence each.
    explained:  (N,) in [0, 1], the share of the observed gradient's squared norm that the gradient of this result explains; NaN
                or None if the attack does not compute it.
    evidence:   dict from the name of each feature from which confidence was estimated to its N values.
    """

    case: str
    x: Tensor
    y: Tensor
    confidence: Tensor
    slots: tuple[Slot, ...]
    loss: Tensor
    iterations: int
    evaluations: int
    restarts: int
    seconds: float
    route: str
    attack: str
    oracles: tuple[str, ...]
    seed: int
    interrupted: bool = False
    notes: tuple[str, ...] = ()
    explained: Tensor | None = None
    evidence: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def list_rounds(self) -> list[set[int]]:
        """Return for each example the set of rounds in which it fills a slot; empty if it fills none."""
        rounds: list[set[int]] = [set() for _ in range(len(self.x))]
        for slot in self.slots:
            rounds[slot.example].add(slot.round)
        return rounds

    def select(self, kept: Sequence[int]) -> "Reconstruction":
        """Return the reconstruction of the examples with the indices `kept` only, in this order; slots of others are dropped."""
        rows, numbers = list(kept), {example: number for number, example in enumerate(kept)}
        return replace(
            self,
            x=self.x[rows],
            y=self.y[rows],
            confidence=self.confidence[rows],
            explained=None if self.explained is None else self.explained[rows],
            evidence={name: tuple(values[i] for i in rows) for name, values in self.evidence.items()},
            slots=tuple(replace(slot, example=numbers[slot.example]) for slot in self.slots if slot.example in numbers),
        )

    def write(self, path: Path, *, below: Path | None = None, settle: bool = True) -> None:
        """Write the reconstruction as one safetensors file, atomically.

        below:  folder below which no folder on the way to `path` may be a symbolic link; by default the folder of `path`. Raises
                ValueError if one is.
        settle: whether to fsync the folder, so that the new file name survives a crash of the machine. After many files, call
                `fedsim.recording.files.flush` on their folder once instead.
        """
        tensors = {"x": self.x, "y": self.y, "confidence": self.confidence, "loss": self.loss}
        tensors["explained"] = torch.full_like(self.confidence, torch.nan) if self.explained is None else self.explained
        facts: dict[str, Any] = {
            **{key: getattr(self, key) for key in METADATA_TYPES},
            "slots": [[s.round, s.client, s.batch, s.position, s.example] for s in self.slots],
            "oracles": list(self.oracles),
            "notes": list(self.notes),
            "evidence": {name: list(values) for name, values in self.evidence.items()},
        }
        write_tensors(path, tensors, {"facts": json.dumps(facts)}, below=below, settle=settle)

    @classmethod
    def read(cls, path: Path) -> "Reconstruction":
        """Read a file that `write` wrote. Raises ValueError, naming the file, if it cannot be read as a reconstruction."""
        try:
            with open_tensors(path.parent, path.name, limit=MAX_BYTES) as file:
                facts = read_facts(file)
                return cls(**{name: file.get_tensor(name) for name in TENSOR_NAMES}, **facts)
        except DamagedFile as error:
            raise ValueError(f"{path}: not a reconstruction: {error.reason}; replay the attack again") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: not a reconstruction: {error}; replay the attack again") from None


def read_facts(file: Any) -> dict[str, Any]:
    """Return the metadata in an open file of a reconstruction as arguments of `Reconstruction`, without reading its tensors.

    Raises ValueError if a tensor or an entry of the metadata is missing or has a wrong type, or if tensors, slots and evidence do
    not fit the number of examples.
    """
    if missing := [name for name in TENSOR_NAMES if name not in file.keys()]:  # noqa: SIM118 - the file is no dict
        raise ValueError(f"the tensor {missing[0]} is missing")
    headers = {name: file.get_slice(name) for name in TENSOR_NAMES}
    shapes = {name: tuple(header.get_shape()) for name, header in headers.items()}
    for name, header in headers.items():
        dtype = DTYPES_BY_NAME.get(header.get_dtype())
        good = dtype == torch.int64 if name == "y" else dtype is not None and dtype.is_floating_point
        if not good or (not shapes[name] if name == "x" else len(shapes[name]) != 1):
            wanted = f"{'int64' if name == 'y' else 'floats'} with {'at least one axis' if name == 'x' else 'one axis'}"
            raise ValueError(f"tensor {name} must be {wanted}, got {header.get_dtype()} of shape {shorten(shapes[name])}")
    (examples, *_) = shapes["x"]
    if wrong := [name for name in ("y", "confidence", "explained") if shapes[name] != (examples,)]:
        raise ValueError(f"tensor {wrong[0]} must have one value for each of {examples} examples, got {shapes[wrong[0]][0]}")
    try:
        return _check_metadata(parse_json((file.metadata() or {})["facts"], finite=False), examples)
    except KeyError as error:
        raise ValueError(f"its metadata lacks the entry {error}") from None
    except TypeError as error:
        raise ValueError(f"its metadata is not valid: {error}") from None


def _check_metadata(facts: Any, examples: int) -> dict[str, Any]:
    """Return the metadata of a file of `examples` examples as arguments of a `Reconstruction`.

    Raises KeyError if an entry is missing, and ValueError or TypeError if a value has the wrong type, or if slots or evidence do
    not fit the number of examples.
    """
    for key, kind in METADATA_TYPES.items():
        value = facts[key]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{key} must be of type {kind.__name__}, got {shorten(value)}")
    slots = tuple(Slot(*slot) for slot in facts["slots"])
    for slot in slots:
        numbers = (slot.round, slot.batch, slot.position, slot.example)
        if not isinstance(slot.client, str) or not all(map(is_count, numbers)):
            raise ValueError(
                f"in {shorten(slot)}, client must be a text, and round, batch, position and example whole numbers from 0 on"
            )
    texts = {key: tuple(map(str, facts[key])) for key in ("oracles", "notes")}
    evidence = {str(name): tuple(map(float, values)) for name, values in facts["evidence"].items()}
    if beyond := [slot.example for slot in slots if slot.example >= examples]:
        raise ValueError(
            f"the list of slots, which says where each example occurred, names example {beyond[0]}, but the file has only "
            f"{examples} examples, numbered from 0"
        )
    if wrong := [name for name, values in evidence.items() if len(values) != examples]:
        raise ValueError(
            f"evidence {shorten(wrong[0])} has {len(evidence[wrong[0]])} values instead of one for each of {examples} examples"
        )
    return {**{key: facts[key] for key in METADATA_TYPES}, **texts, "slots": slots, "evidence": evidence}


def list_slots(round: int, client: str, batch_sizes: Sequence[int], examples: int | None = None) -> tuple[Slot, ...]:
    """Return the slots of one observation in the order in which local training uses them, epoch after epoch.

    A slot is the place of one example in the batch of one local step.
    batch_sizes: number of examples of each local step. examples: number n of distinct examples; slot i, counted from 0, holds
    example i mod n. By default each slot has an example of its own.
    """
    count = examples or sum(batch_sizes)
    at = [(b, p) for b, size in enumerate(batch_sizes, start=1) for p in range(size)]
    return tuple(Slot(round, client, b, p, example % count) for example, (b, p) in enumerate(at))
