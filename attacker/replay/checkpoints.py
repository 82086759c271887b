"""Checkpoints of a replay, from which it resumes after it was killed: one file per running task, next to the reconstructions.

A task is the cases that are attacked at once.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from attacker.attacks.base import Look
from attacker.replay.results import get_run_folder
from fedsim.recording.files import remove, write_tensors
from fedsim.recording.safe_files import open_tensors, parse_json

CHECKPOINT_SUFFIX = ".checkpoint"
CHECKPOINT_FORMAT = 4
"""Format version of the stored tensors; increased whenever their meaning changes."""
MAX_BYTES = 16 * 2**30
"""Largest size in bytes of a checkpoint that is read; histories of L-BFGS are many times as large as the images."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The settings under which a checkpoint is written. A replay with other settings does not resume from the checkpoint.

    attack: the specification of the attack, as text. device: cpu or cuda. torch, fedleak: versions. form: format version of the
    file.
    """

    attack: str
    seed: int
    device: str
    torch: str = field(default_factory=lambda: torch.__version__)
    fedleak: str = field(default_factory=lambda: version("fedleak"))
    form: int = CHECKPOINT_FORMAT

    def to_json(self) -> str:
        return json.dumps([self.attack, self.seed, self.device, self.torch, self.fedleak, self.form])

    def describe_difference(self, other: str) -> str:
        """Return as text why a replay of this origin cannot resume from a checkpoint of another one; "" if it can.

        other: the other origin as written by `to_json`.
        """
        try:
            theirs = parse_json(other)
            pairs = zip(("attack", "seed", "device", "torch", "fedleak", "form"), theirs, json.loads(self.to_json()), strict=True)
            return ", ".join(f"is of {what} {them}, and this is {me}" for what, them, me in pairs if them != me)
        except (ValueError, TypeError):
            return "cannot be read"


@dataclass
class FileMemory:
    """The checkpoint of one task in one file. Every call of `keep` replaces the file atomically; `forget` deletes it.

    cases: keys of the task's cases in the order of the attack.
    origin: settings of this replay; a file that was written with other settings is not used.
    every: seconds that the attack waits between two calls of `keep`; this class does not enforce them.
    look:  callback that the attack calls with intermediate results, or None; see `Memory`.
    """

    folder: Path
    cases: tuple[str, ...]
    origin: Origin
    every: float = 60.0
    look: Look | None = None
    _kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / (hashlib.sha256("\n".join(self.cases).encode()).hexdigest()[:12] + CHECKPOINT_SUFFIX)

    @property
    def _below(self) -> Path:
        return get_run_folder(self.folder)

    def begin(self) -> None:
        """Load the state that an earlier process saved for these cases, if `origin` allows to resume from it.

        If there is no such state, write a file without any state.
        """
        self._kept = {}
        if (
            os.path.lexists(self.path)
            and (checkpoint := _read(self.path))
            and checkpoint.cases == self.cases
            and not self.origin.describe_difference(checkpoint.origin)
        ):
            self._kept = checkpoint.kept
        else:
            self._write()

    def recall(self, key: str) -> dict[str, Tensor] | None:
        state = self._kept.get(key)
        return None if state is None else {name: tensor.clone() for name, tensor in state.items()}

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        for gone in (key, drop):  # free the old state before copying: histories of L-BFGS may be most of the memory
            self._kept.pop(gone, None)
        self._kept[key] = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
        self._write()

    def forget(self) -> None:
        """Delete the checkpoint file. To be called when the task is done."""
        self._kept = {}
        remove(self.path, below=self._below)

    def _write(self) -> None:
        names = [(key, name) for key, state in self._kept.items() for name in state]
        tensors = {str(i): self._kept[key][name] for i, (key, name) in enumerate(names)}
        empty = [key for key, state in self._kept.items() if not state]
        facts = {"origin": self.origin.to_json(), "cases": json.dumps(self.cases)}
        write_tensors(self.path, tensors, {**facts, "names": json.dumps(names), "empty": json.dumps(empty)}, below=self._below)


@dataclass(frozen=True, kw_only=True)
class ReplayCheckpoint:
    """The content of a checkpoint file.

    cases:  keys of the cases of its task.
    origin: the settings of the replay that wrote the file (attack, seed, device and versions): an `Origin` as JSON.
    kept:   dict from each name under which `FileMemory.keep` stored a state to the state, a dict of tensors by name.
    """

    cases: tuple[str, ...]
    origin: str
    kept: dict[str, dict[str, Tensor]]


def _read(path: Path, *, tensors: bool = True) -> ReplayCheckpoint | None:
    """Read a checkpoint; return None if it is not a checkpoint or does not exist.

    tensors: whether to read the saved states; if False, `kept` holds only states without any tensor.
    """
    try:
        with open_tensors(path.parent, path.name, limit=MAX_BYTES) as file:
            facts = file.metadata() or {}
            kept: dict[str, dict[str, Tensor]] = {key: {} for key in parse_json(facts["empty"])}
            for i, (key, name) in enumerate(parse_json(facts["names"]) if tensors else ()):
                kept.setdefault(key, {})[name] = file.get_tensor(str(i))
            cases = parse_json(facts["cases"])
            if not isinstance(cases, list) or not all(isinstance(case, str) for case in cases):
                return None
            return ReplayCheckpoint(cases=tuple(cases), origin=facts["origin"], kept=kept)
    except (OSError, KeyError, TypeError, ValueError):
        return None


def find_unfinished(
    folder: Path, origin: Origin, keys: Iterable[str], *, max_cases: int | None = None
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Find the checkpoints of an earlier replay. Return the case keys of each, and notes on checkpoints that cannot be used.

    origin: settings of this replay; a checkpoint whose `origin` does not fit is left out, with a note.
    keys: keys of the cases of this replay; a checkpoint that holds any other case is ignored, without a note.
    max_cases: largest number of cases of a task; a checkpoint of more is left out, with a note. None for no limit.

    No case is returned twice: checkpoints are taken in descending order of their numbers of cases, and in alphabetical order of
    file names among equals, and one that shares a case with a checkpoint taken before is left out.
    """
    keys, tasks, notes = set(keys), [], []
    for path in sorted(folder.glob(f"*{CHECKPOINT_SUFFIX}")):
        checkpoint = _read(path, tensors=False)
        if checkpoint is None:
            notes.append(f"{path.name} cannot be read as a checkpoint: its cases start again")
        elif not keys.issuperset(checkpoint.cases):
            continue
        elif difference := origin.describe_difference(checkpoint.origin):
            notes.append(f"the checkpoint of {_describe_cases(checkpoint.cases)} {difference}: they start again")
        elif max_cases is not None and len(checkpoint.cases) > max_cases:
            notes.append(
                f"the checkpoint of {_describe_cases(checkpoint.cases)} holds more cases than the chosen chunk of {max_cases}: "
                "they start again"
            )
        else:
            tasks.append(checkpoint.cases)
    chosen: list[tuple[str, ...]] = []
    for task in sorted(tasks, key=len, reverse=True):
        if all(set(task).isdisjoint(other) for other in chosen):
            chosen.append(task)
    return chosen, notes


def _describe_cases(cases: Sequence[str]) -> str:
    """Return the key of a single case, or the number of cases and the first key, as text."""
    return cases[0] if len(cases) == 1 else f"{len(cases)} cases, the first {cases[0]},"


def remove_finished(folder: Path, done: Iterable[str]) -> None:
    """Delete the checkpoints in `folder` whose cases are all in `done`, and those that cannot be read. done: keys of cases."""
    done = set(done)
    for path in folder.glob(f"*{CHECKPOINT_SUFFIX}"):
        checkpoint = _read(path, tensors=False)
        if checkpoint is None or done.issuperset(checkpoint.cases):
            remove(path, below=get_run_folder(folder))
