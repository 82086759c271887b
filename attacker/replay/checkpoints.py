"""What a replay needs to go on where it was killed: one file for each task under way, beside its reconstructions."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from attacker.attacks.base import Look
from fedsim.recording.files import remove, write_tensors
from fedsim.recording.safe_files import opened_tensors, parse_json

SUFFIX = ".checkpoint"
FORM = 4
"""Grows when what searches keep changes its meaning."""
FORMS = (3, 4)
"""Forms that are gone on from: in form 3 searches kept all that they keep now but the losses of their starts."""
MAX_BYTES = 16 * 2**30
"""Size of the largest checkpoint that is read: histories of L-BFGS are many times the images."""


def run_of(folder: Path) -> Path:
    """The folder below which no link is followed for what is written of an attack: it holds that of all reconstructions."""
    return folder.parent.parent


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a checkpoint must agree in to be gone on from. attack: its printed specification. device: cpu or cuda."""

    attack: str
    seed: int
    device: str
    torch: str = field(default_factory=lambda: torch.__version__)
    fedleak: str = field(default_factory=lambda: version("fedleak"))
    form: int = FORM

    def as_json(self) -> str:
        return json.dumps([self.attack, self.seed, self.device, self.torch, self.fedleak, self.form])

    def differs(self, other: str) -> str:
        """How `other`, written by `as_json`, differs, in words; empty where it does not."""
        try:
            theirs = parse_json(other)
            pairs = zip(("attack", "seed", "device", "torch", "fedleak", "form"), theirs, json.loads(self.as_json()), strict=True)
            different = [(what, them, me) for what, them, me in pairs if them != me]
        except (ValueError, TypeError):
            return "cannot be read"
        return ", ".join(
            f"is of {what} {them}, and this is {me}" for what, them, me in different if what != "form" or them not in FORMS
        )


@dataclass
class FileMemory:
    """The memory of one task, in one file that is replaced at once. Also an empty one says that the task is not done.

    cases: their keys, in the order in which they are attacked. every: seconds between two calls of `keep`. look: see `Memory`.
    """

    folder: Path
    cases: tuple[str, ...]
    origin: Origin
    every: float = 60.0
    look: Look | None = None
    _kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / (hashlib.sha256("\n".join(self.cases).encode()).hexdigest()[:12] + SUFFIX)

    @property
    def _below(self) -> Path:
        return run_of(self.folder)

    def begin(self) -> None:
        """Take up what an earlier process kept for these cases, or else write down that they are under way."""
        self._kept = {}
        if (
            os.path.lexists(self.path)
            and (found := _read(self.path))
            and found.cases == self.cases
            and not self.origin.differs(found.origin)
        ):
            self._kept = found.kept
        else:
            self._write()

    def recall(self, key: str) -> dict[str, Tensor] | None:
        found = self._kept.get(key)
        return None if found is None else {name: tensor.clone() for name, tensor in found.items()}

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        for gone in (key, drop):  # before there are two of them: histories of L-BFGS may be most of the memory
            self._kept.pop(gone, None)
        self._kept[key] = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        self._write()

    def forget(self) -> None:
        """The task is done."""
        self._kept = {}
        remove(self.path, below=self._below)

    def _write(self) -> None:
        names = [(key, name) for key, state in self._kept.items() for name in state]
        tensors = {str(i): self._kept[key][name] for i, (key, name) in enumerate(names)}
        empty = [key for key, state in self._kept.items() if not state]
        facts = {"origin": self.origin.as_json(), "cases": json.dumps(self.cases)}
        write_tensors(self.path, tensors, {**facts, "names": json.dumps(names), "empty": json.dumps(empty)}, below=self._below)


@dataclass(frozen=True, kw_only=True)
class ReplayCheckpoint:
    """What a file holds: keys of the cases, what wrote it, and what was kept, by key and by name."""

    cases: tuple[str, ...]
    origin: str
    kept: dict[str, dict[str, Tensor]]


def _read(path: Path, *, tensors: bool = True) -> ReplayCheckpoint | None:
    """What `FileMemory` wrote; None where it is something else, or gone meanwhile. tensors: whether to read these, too."""
    try:
        with opened_tensors(path, limit=MAX_BYTES) as file:
            facts = file.metadata() or {}
            kept: dict[str, dict[str, Tensor]] = {key: {} for key in parse_json(facts["empty"])}
            for i, (key, name) in enumerate(parse_json(facts["names"]) if tensors else ()):
                kept.setdefault(key, {})[name] = file.get_tensor(str(i))
            cases = parse_json(facts["cases"])
            if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
                return None
            return ReplayCheckpoint(cases=tuple(cases), origin=facts["origin"], kept=kept)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None


def unfinished(
    folder: Path, origin: Origin, wanted: Iterable[str], *, most: int | None = None
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Tasks that were under way when a replay ended, as the keys of their cases, and in words what cannot be gone on from.

    Only those whose cases are all among `wanted`, and no part of a larger one. most: cases that one task may have.
    """
    wanted, tasks, notes = set(wanted), [], []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        found = _read(path, tensors=False)
        if found is None:
            notes.append(f"{path.name} is no checkpoint that can be read: its cases start again")
        elif not wanted.issuperset(found.cases):
            continue
        elif difference := origin.differs(found.origin):
            notes.append(f"the checkpoint of {_some(found.cases)} {difference}: they start again")
        elif most is not None and len(found.cases) > most:
            notes.append(
                f"the checkpoint of {_some(found.cases)} is of more cases than the {most} at once asked for: they start again"
            )
        else:
            tasks.append(found.cases)
    largest = [task for task in tasks if not any(set(task) < set(other) for other in tasks)]
    return [task for i, task in enumerate(largest) if not set(task) & {key for other in largest[:i] for key in other}], notes


def _some(cases: Sequence[str]) -> str:
    return cases[0] if len(cases) == 1 else f"{len(cases)} cases, the first {cases[0]},"


def tidy(folder: Path, done: Iterable[str]) -> None:
    """Remove what is left of tasks whose cases are all done: of other chunks, of another version."""
    done = set(done)
    for path in folder.glob(f"*{SUFFIX}"):
        found = _read(path, tensors=False)
        if found is None or done.issuperset(found.cases):
            remove(path, below=run_of(folder))
