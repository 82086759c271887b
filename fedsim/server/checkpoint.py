"""Checkpoints: the server's state after a round, from which a killed federation resumes."""

import json
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim.recording.files import make_private, write_tensors
from fedsim.recording.safe_files import DamagedFile, open_tensors, parse_json
from fedsim.recording.tensor_files import MAX_BYTES

CHECKPOINT_FILE = "server.safetensors"


@dataclass(frozen=True, kw_only=True)
class StrategyMemory:
    """The attributes of a strategy, and of the strategies that it wraps, as they are saved between two rounds.

    values:  dict from the path of an attribute, such as "inner.name", to its value. A number, text, None, or a list of these has
             the entry {"kind": "plain", "value": ...}; arrays have {"kind": their container, "keys": keys of the arrays}, where
             the container is "record" (of Flower), "array" (one NumPy array, with the key ""), "list" or "dict".
    tensors: dict from "path/key" of an array to the array.
    unsaved: attributes of other types, which cannot be saved: texts with path and type. If there are any, a run cannot be
             resumed. Functions and empty dicts, sets and tuples are left out everywhere.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServerCheckpoint:
    """State from which the server continues after `round`.

    attempt:    number of times that the run was started, 1 without resuming. arrays: global weights and buffers by name, in the
                order in which they are sent.
    memory:     state of the strategy. pseudonyms: dict from node id, as text, to the pseudonym that the client sent.
    generators: states of the global random generators of Python and NumPy, from which Flower draws clients and central noise.
    """

    round: int
    attempt: int
    arrays: Mapping[str, Tensor]
    memory: StrategyMemory = StrategyMemory()
    generators: Mapping[str, Any] = field(default_factory=dict)
    pseudonyms: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the checkpoint to `folder`, atomically in place of the previous one. Its round is then committed."""
        tensors = {f"arrays/{name}": t for name, t in self.arrays.items()}
        tensors |= {f"memory/{name}": t for name, t in self.memory.tensors.items()}
        facts = {
            "round": self.round,
            "attempt": self.attempt,
            "arrays": list(self.arrays),
            "values": self.memory.values,
            "tensors": list(self.memory.tensors),
            "unsaved": self.memory.unsaved,
            "generators": self.generators,
            "pseudonyms": self.pseudonyms,
        }
        write_tensors(make_private(folder) / CHECKPOINT_FILE, tensors, {"facts": json.dumps(facts)})

    @classmethod
    def read(cls, folder: Path) -> "ServerCheckpoint | None":
        """Return the checkpoint in `folder`; None if there is none. Raises ValueError, naming the file, if it is invalid."""
        path = folder / CHECKPOINT_FILE
        if not os.path.lexists(path):
            return None
        try:
            with open_tensors(folder, CHECKPOINT_FILE, limit=MAX_BYTES) as file:
                facts = parse_json(file.metadata()["facts"], finite=False)
                arrays = {name: file.get_tensor(f"arrays/{name}") for name in facts["arrays"]}
                tensors = {name: file.get_tensor(f"memory/{name}") for name in facts["tensors"]}
            memory = StrategyMemory(values=facts["values"], tensors=tensors, unsaved=tuple(facts["unsaved"]))
            given = {key: facts[key] for key in ("round", "attempt", "generators", "pseudonyms")}
            return cls(arrays=arrays, memory=memory, **given)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise _make_error(path, error) from None


def count_rounds(folder: Path) -> int | None:
    """Return the number of committed rounds according to the checkpoint in `folder`; None if there is none. It reads no tensors.

    Raises ValueError, naming the file, if the checkpoint is invalid.
    """
    path = folder / CHECKPOINT_FILE
    if not os.path.lexists(path):
        return None
    try:
        with open_tensors(folder, CHECKPOINT_FILE, limit=MAX_BYTES) as file:
            return int(parse_json(file.metadata()["facts"], finite=False)["round"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _make_error(path, error) from None


def _make_error(path: Path, error: Exception) -> ValueError:
    reason = error.reason if isinstance(error, DamagedFile) else str(error)
    return ValueError(f"{path}: not a checkpoint: {reason}; delete the run and start again")


def read_generators() -> dict[str, Any]:
    """Return the states of the global random generators of Python (`random`) and NumPy, in a form that JSON can represent."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state()
    return {"random": [version, list(words), gauss], "numpy": [state[0], state[1].tolist(), *state[2:]]}


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set the global random generators to the states that `read_generators` returned."""
    version, words, gauss = states["random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def read_strategy(strategy: Strategy) -> StrategyMemory:
    """Return the attributes of `strategy` and of the strategies that it wraps, with a list of those that cannot be saved."""
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    unsaved: list[str] = []
    for path, value in _list_attributes(strategy):
        arrays = _find_arrays(value)
        if arrays is not None:
            kind, by_key = arrays
            values[path] = {"kind": kind, "keys": list(by_key)}
            tensors |= {f"{path}/{key}": torch.from_numpy(np.array(array)) for key, array in by_key.items()}
        elif _is_plain(value):
            values[path] = {"kind": "plain", "value": value}
        elif not callable(value) and (value or not isinstance(value, (dict, list, set, tuple))):
            unsaved.append(f"{path}, of type {type(value).__name__},")
    return StrategyMemory(values=values, tensors=tensors, unsaved=tuple(unsaved))


def restore_strategy(strategy: Strategy, memory: StrategyMemory) -> None:
    """Set the attributes of a newly built strategy, and of the strategies that it wraps, to those in `memory`.

    Raises ValueError if an attribute could not be saved (`memory.unsaved` is not empty).
    """
    if memory.unsaved:
        raise ValueError(
            f"this strategy cannot be resumed: its attribute {memory.unsaved[0]} could not be saved; start a new run"
        )
    for path, stored in memory.values.items():
        *owners, name = path.split(".")
        owner = strategy
        for inside in owners:
            owner = getattr(owner, inside)
        arrays = {key: memory.tensors[f"{path}/{key}"].numpy() for key in stored.get("keys", ())}
        match stored["kind"]:
            case "plain":
                setattr(owner, name, stored["value"])
            case "list":
                setattr(owner, name, list(arrays.values()))
            case "array":
                setattr(owner, name, arrays[""])
            case "record":
                setattr(owner, name, ArrayRecord({key: Array(array) for key, array in arrays.items()}))
            case _:
                setattr(owner, name, arrays)


def _list_attributes(strategy: Strategy, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _list_attributes(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _find_arrays(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the container of the arrays in an attribute, as in `StrategyMemory.values`, and a dict from key to NumPy array.

    Returns None unless the attribute is an ArrayRecord, a NumPy array, or a list or dict that is not empty and holds only arrays
    (a dict may also hold NumPy scalars).
    """
    if isinstance(value, ArrayRecord):
        return "record", {key: array.numpy() for key, array in value.items()}
    if isinstance(value, np.ndarray):
        return "array", {"": value}
    if isinstance(value, list) and value and all(isinstance(item, np.ndarray) for item in value):
        return "list", {str(i): array for i, array in enumerate(value)}
    if isinstance(value, dict) and value and all(isinstance(item, (np.ndarray, np.generic)) for item in value.values()):
        return "dict", {str(key): array for key, array in value.items()}
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
