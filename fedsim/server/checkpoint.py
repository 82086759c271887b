"""The server's state between two rounds: what makes a federation that was killed go on as if nothing had happened."""

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
from safetensors import SafetensorError
from torch import Tensor

from fedsim.recording.files import make_private, write_tensors
from fedsim.recording.safe_files import DamagedFile, opened_tensors, parse_json
from fedsim.recording.tensor_files import MAX_BYTES

FILE = "server.safetensors"


@dataclass(frozen=True, kw_only=True)
class StrategyMemory:
    """What a strategy keeps from round to round.

    values:  by the path of an attribute, what kind it is and its plain value, or the keys of its arrays.
    tensors: the arrays, by path and key.
    unsaved: attributes that hold something else, which cannot be written.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unsaved: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServerCheckpoint:
    """All that the server needs to go on after `round`.

    attempt: how often the run was started. arrays: global weights and buffers, by name, in order.
    memory: of the strategy. generators: states of the global ones, from which Flower draws clients,
    and its central privacy the noise. pseudonyms: by node id, as far as they are known.
    """

    round: int
    attempt: int
    arrays: Mapping[str, Tensor]
    memory: StrategyMemory = StrategyMemory()
    generators: Mapping[str, Any] = field(default_factory=dict)
    pseudonyms: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replace the checkpoint in `folder`, at once: this is what commits a round."""
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
        write_tensors(make_private(folder) / FILE, tensors, {"facts": json.dumps(facts)})

    @classmethod
    def read(cls, folder: Path) -> "ServerCheckpoint | None":
        """The checkpoint in `folder`; None where there is none. Raises ValueError, naming the file, for anything else."""
        path = folder / FILE
        if not os.path.lexists(path):
            return None
        try:
            with opened_tensors(path, limit=MAX_BYTES) as file:
                facts = parse_json(file.metadata()["facts"], finite=False)
                arrays = {name: file.get_tensor(f"arrays/{name}") for name in facts["arrays"]}
                tensors = {name: file.get_tensor(f"memory/{name}") for name in facts["tensors"]}
            memory = StrategyMemory(values=facts["values"], tensors=tensors, unsaved=tuple(facts["unsaved"]))
            given = {key: facts[key] for key in ("round", "attempt", "generators", "pseudonyms")}
            return cls(arrays=arrays, memory=memory, **given)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise _not_a_checkpoint(path, error) from None


def rounds_done(folder: Path) -> int | None:
    """How many rounds are committed in `folder`; None where the run never began. Reads no tensor."""
    path = folder / FILE
    if not os.path.lexists(path):
        return None
    try:
        with opened_tensors(path, limit=MAX_BYTES) as file:
            return int(parse_json(file.metadata()["facts"], finite=False)["round"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _not_a_checkpoint(path, error) from None


def _not_a_checkpoint(path: Path, error: Exception) -> ValueError:
    reason = error.reason if isinstance(error, DamagedFile) else str(error)
    return ValueError(f"{path}: not a checkpoint: {reason}; delete the run and start again")


def generators() -> dict[str, Any]:
    """The states of the global generators, as plain data."""
    version, words, gauss = random.getstate()
    state: Any = np.random.get_state()
    return {"random": [version, list(words), gauss], "numpy": [state[0], state[1].tolist(), *state[2:]]}


def restore_generators(states: Mapping[str, Any]) -> None:
    """The inverse of `generators`."""
    version, words, gauss = states["random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def remember(strategy: Strategy) -> StrategyMemory:
    """What `strategy`, and any that it wraps, keeps."""
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    unsaved: list[str] = []
    for path, value in _attributes(strategy):
        arrays = _arrays(value)
        if arrays is not None:
            kind, by_key = arrays
            values[path] = {"kind": kind, "keys": list(by_key)}
            tensors |= {f"{path}/{key}": torch.from_numpy(np.array(array)) for key, array in by_key.items()}
        elif _is_plain(value):
            values[path] = {"kind": "plain", "value": value}
        elif not callable(value) and not _is_empty(value):
            unsaved.append(f"{path}, of type {type(value).__name__},")
    return StrategyMemory(values=values, tensors=tensors, unsaved=tuple(unsaved))


def remind(strategy: Strategy, memory: StrategyMemory) -> None:
    """Give a freshly built strategy what another one kept. Raises ValueError where that could not be saved."""
    if memory.unsaved:
        raise ValueError(f"this strategy cannot be resumed: {memory.unsaved[0]} could not be saved")
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


def _attributes(strategy: Strategy, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _attributes(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _arrays(value: Any) -> tuple[str, dict[str, Any]] | None:
    """The arrays of an attribute by key, and what holds them; None where it holds something else, or nothing."""
    if isinstance(value, ArrayRecord):
        return "record", {key: array.numpy() for key, array in value.items()}
    if isinstance(value, np.ndarray):
        return "array", {"": value}
    if isinstance(value, list) and value and all(isinstance(item, np.ndarray) for item in value):
        return "list", {str(i): array for i, array in enumerate(value)}
    if isinstance(value, dict) and value and all(isinstance(item, (np.ndarray, np.generic)) for item in value.values()):
        return "dict", {str(key): array for key, array in value.items()}
    return None


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list, set, tuple)) and not value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
