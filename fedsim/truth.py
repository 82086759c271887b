"""Truth of a run: the data set indices of the examples that each client trained on, in order of use.

Scoring and audits read it; attacks do not.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedsim.recording.files import MAX_LINES_BYTES, append_json_lines, make_private, read_json_lines, write_json
from fedsim.recording.safe_files import DamagedFile, is_count, read_bytes, read_json, shorten

DATASET_KEYS = {"name": str, "arguments": dict, "content_hash": str}
"""Required keys of `dataset.json`, which describes the data set, and their types."""
CANARIES_SUFFIX = ".canaries.json"
"""End of the name of a client's file of canaries, after its pseudonym."""


@dataclass(frozen=True)
class RoundUsage:
    """The examples that one client used in one attempt at a round.

    steps: for each optimiser step, the data set indices of its examples in order of use.
    """

    steps: tuple[tuple[int, ...], ...]

    @property
    def examples(self) -> tuple[tuple[int, int, int], ...]:
        """Return (step, position in its batch, data set index) of every use of an example; steps from 1, positions from 0."""
        return tuple((b, p, index) for b, step in enumerate(self.steps, start=1) for p, index in enumerate(step))


class TruthWriter:
    """Writer of one client's truth: the data set indices of the examples that it used.

    Each client has a file of its own, so that clients in different processes never write to the same file.
    """

    def __init__(self, folder: Path, client: str) -> None:
        self._path = make_private(folder) / f"{client}.jsonl"

    def write(self, round: int, attempt: int, steps: Sequence[Sequence[int]]) -> None:
        """Append the data set indices of the examples that the client used in one attempt at a round, one row per step.

        attempt: 1 plus the number of times that the server resumed the run. steps: for each step, the indices in order of use.
        """
        about = {"round": round, "attempt": attempt}
        rows = [{**about, "step": step, "indices": list(map(int, used))} for step, used in enumerate(steps, start=1)]
        append_json_lines(self._path, *rows)

    def write_canaries(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Write the client's canary pairs, unless they are written already.

        pairs: data set indices of two examples each, of which the client uses one; an audit guesses which.
        """
        path = self._path.with_suffix(CANARIES_SUFFIX)
        if not path.exists():
            write_json(path, {"pairs": [list(pair) for pair in pairs]})


def describe_dataset(folder: Path, described: Callable[[], dict[str, Any]]) -> None:
    """Write `dataset.json` in `folder` by calling `described`, unless it exists."""
    path = make_private(folder) / "dataset.json"
    if not path.exists():
        write_json(path, described())


def compute_digest(folders: Sequence[Path]) -> str:
    """Return a SHA-256 digest, in hexadecimal, of the used examples (`*.jsonl`) and `dataset.json` in folders of truth.

    It does not depend on the paths of the folders or their order. Files of canaries do not count.
    """
    each = []
    for folder in folders:
        names = sorted(name for name in os.listdir(folder) if name == "dataset.json" or name.endswith(".jsonl"))
        each.append([(name, hashlib.sha256(read_bytes(folder, name, limit=MAX_LINES_BYTES)).hexdigest()) for name in names])
    return hashlib.sha256(json.dumps(sorted(each)).encode()).hexdigest()


class TruthReader:
    """Reader of a folder of truth, which `TruthWriter` and `describe_dataset` write.

    Raises ValueError if the folder has no `dataset.json` with a JSON object, whose fields are checked by `check_described` only.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        path = self.folder / "dataset.json"
        if not os.path.lexists(path):
            raise ValueError(
                f"{self.folder} holds no truth (which examples clients trained on), because it has no dataset.json; give the "
                "whole folder 'truth' that the clients wrote"
            )
        self.dataset: dict[str, Any] = read_json(path)
        if not isinstance(self.dataset, dict):
            raise DamagedFile(path, "is not a JSON object; copy the file that the clients wrote")
        self._steps = lru_cache(maxsize=None)(self._read_steps)

    def check_described(self) -> None:
        """Raise DamagedFile if `dataset.json` lacks the data set's name, arguments or content hash, or one has a wrong type."""
        if wrong := [key for key, kind in DATASET_KEYS.items() if not isinstance(self.dataset.get(key), kind)]:
            problem = f"does not give the {wrong[0]} of the data set; copy the file that the clients wrote"
            raise DamagedFile(self.folder / "dataset.json", problem)

    def read_used(self, round: int, attempt: int, client: str) -> RoundUsage:
        """Return the examples that a client used in one attempt at a round.

        Raises KeyError if none are written, and DamagedFile if the client's file is invalid.
        """
        steps = self._steps(client).get((round, attempt))
        if not steps:
            raise KeyError(f"{self.folder}: no truth of client {client} in round {round}, attempt {attempt}")
        return RoundUsage(tuple(steps[step] for step in sorted(steps)))

    def read_canaries(self, client: str) -> tuple[tuple[int, int], ...]:
        """Return a client's canary pairs: data set indices of two examples each, of which it used one. Empty if it has none.

        Raises DamagedFile if the client's file of canaries is invalid.
        """
        path = self.folder / f"{os.path.basename(client)}{CANARIES_SUFFIX}"
        if not os.path.lexists(path):
            return ()
        content = read_json(path)
        pairs = content.get("pairs") if isinstance(content, dict) else None
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(map(is_count, pair)) for pair in pairs
        ):
            raise DamagedFile(path, "holds no pairs of examples; copy the file that the client wrote")
        return tuple((a, b) for a, b in pairs)

    def _read_steps(self, client: str) -> dict[tuple[int, int], dict[int, tuple[int, ...]]]:
        """Return a client's used examples as {(round, attempt): {step, from 1: indices in order of use}}.

        If a step is written twice, because a message was delivered twice, the last one counts.
        """
        steps: dict[tuple[int, int], dict[int, tuple[int, ...]]] = {}
        path = self.folder / f"{os.path.basename(client)}.jsonl"
        for number, row in enumerate(read_json_lines(path, "copy the file that the client wrote"), start=1):
            indices = row.get("indices")
            counts = all(is_count(row.get(key)) for key in ("round", "attempt", "step"))
            if not (counts and isinstance(indices, list) and all(map(is_count, indices))):
                raise DamagedFile(path, f"row {number} is not valid truth: {shorten(row)}; copy the file that the client wrote")
            steps.setdefault((row["round"], row["attempt"]), {})[row["step"]] = tuple(row["indices"])
        return steps
