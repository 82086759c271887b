"""The public facts of a recording: one JSON file that says how to read the rest."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from defenses.spec import DefenseSpec
from fedsim.wire.files import write_json
from fedsim.wire.observation import Column, DataSpec, ModelSpec, Training

FORMAT_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the server knows of the whole run before the first message.

    gradient, network, inputs, secure_aggregation: how clients compute, beside `defense`; only the plain ways exist so far.
    name: of the run; created: ISO 8601, UTC; software: versions by package.
    """

    name: str
    model: ModelSpec
    data: DataSpec
    training: Training
    defense: DefenseSpec
    gradient: str = "plain"
    network: str = ""
    inputs: str = ""
    secure_aggregation: bool = False
    codec: str = "dense"
    created: str = ""
    software: Mapping[str, str]

    def write(self, path: Path) -> None:
        """Write to `path` as JSON."""
        write_json(path, {"format_version": FORMAT_VERSION, **asdict(self), "defense": str(self.defense)})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read from `path`. Raises ValueError, naming the file, where it is not a manifest that this version understands."""
        try:
            raw = json.loads(path.read_text())
            if not isinstance(raw, dict):
                raise ValueError("not a JSON object")
            version = raw.pop("format_version", None)
            if version != FORMAT_VERSION:
                raise ValueError(
                    f"format version {version}, and this program reads version {FORMAT_VERSION}; install a newer one"
                )
            return _from_json(cls, raw)
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"{path.parent} is not a recording: it has no {path.name}") from None
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None


def _from_json(cls: type[T], raw: Mapping[str, Any]) -> T:
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(raw) - set(known)):
        raise ValueError(f"unknown keys {unknown} for {cls.__name__}")
    required = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := sorted(required - set(raw)):
        raise ValueError(f"missing keys {missing} for {cls.__name__}")
    return cls(**{name: _value(name, value) for name, value in raw.items()})


def _value(name: str, value: Any) -> Any:
    match name:
        case "model":
            return _from_json(ModelSpec, value)
        case "data":
            return _from_json(DataSpec, value)
        case "training":
            return _from_json(Training, value)
        case "defense":
            return DefenseSpec.parse(str(value))
        case "columns":
            return tuple(_from_json(Column, column) for column in value)
        case _:
            return tuple(value) if isinstance(value, list) else value
