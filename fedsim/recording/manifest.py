"""The manifest of a recording: public facts about the federation in one JSON file."""

import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec
from defenses.spec import DefenseSpec
from fedsim.recording.files import write_json
from fedsim.recording.observation import DataSpec, ModelSpec, Training
from fedsim.recording.safe_files import UNPRINTABLE, DamagedFile, parse_json, read_bytes, shorten

FORMAT_VERSION = 3
MAX_BYTES = 1_000_000
"""Size of the largest manifest that is read: the columns of a table may fill a good part of it."""
MAX_TEXT = 10_000
"""Characters of the longest text in it."""
MAX_VALUES = 10**8
"""Values of the largest example."""
MAX_CLASSES = 10**7
MAX_NUMBER = 2**53
NAME = re.compile(r"[\w .,:()+=@-]{1,200}")
"""Names of runs: they end up in rows, files and command lines."""
CREATED = re.compile(r"[0-9T:.Z+-]{1,40}")
WORD = re.compile(r"[\w.+-]{1,200}")
"""Names and versions of software."""
REFERENCE = re.compile(r"[\w.:-]{1,200}")
"""Names of models, and `module:function`."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Public facts that hold for the whole run, known to the server before the first message.

    gradient, inputs: specifications of how clients compute gradients and change their examples, beside `defense`.
    secure_aggregation: false, or its settings.
    name: of the run; created: ISO 8601, UTC; software: versions by package.
    """

    name: str
    model: ModelSpec
    data: DataSpec
    training: Training
    defense: DefenseSpec
    gradient: str = "plain"
    inputs: str = ""
    secure_aggregation: Mapping[str, Any] | bool = False
    codec: str = "dense"
    created: str = ""
    software: Mapping[str, str]

    def __post_init__(self) -> None:
        check_name(self.name)
        if not REFERENCE.fullmatch(self.model.name):
            raise ValueError(f"{shorten(self.model.name)} is no name of a model: give letters, digits and _ . : - only")
        if wrong := [text for pair in self.software.items() for text in pair if not WORD.fullmatch(text)]:
            raise ValueError(f"{shorten(wrong[0])} is neither name nor version of software")
        if self.created and not CREATED.fullmatch(self.created):
            raise ValueError(f"{shorten(self.created)} is no time of creation: give it as 2026-01-31T12:00:00Z")
        GradientSpec.parse(self.gradient)
        InputsSpec.parse(self.inputs)

    @property
    def network(self) -> str:
        """Specification of a defense that changes the model; "" for none."""
        return self.model.network

    def write(self, path: Path) -> None:
        """Write to `path` as JSON."""
        write_json(path, {"format_version": FORMAT_VERSION, **asdict(self), "defense": str(self.defense)})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read from `path`. Raises ValueError, naming the file, where it is not a manifest that this version understands."""
        try:
            raw = parse_json(read_bytes(path.parent, path.name, limit=MAX_BYTES))
            if not isinstance(raw, dict):
                raise ValueError("not a JSON object")
            version = raw.pop("format_version", None)
            if version != FORMAT_VERSION or type(version) is not int:
                newer = type(version) is int and version > FORMAT_VERSION
                mend = "install a newer one" if newer else "run the federation again"
                raise ValueError(f"format version {shorten(version)}, and this program reads version {FORMAT_VERSION}; {mend}")
            return _from_json(cls, raw)
        except DamagedFile as error:
            if not path.exists() and not path.is_symlink():
                raise ValueError(f"{path.parent} is not a recording: it has no {path.name}") from None
            raise ValueError(str(error)) from None
        except RecursionError:
            raise ValueError(f"{path}: nested beyond any reason") from None
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{path}: {error}") from None


def check_name(name: str) -> None:
    """Raise ValueError where a run must not be called `name`."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{shorten(name)} is no name of a run: give letters, digits, spaces and . , : ( ) + = @ - _ only")


def make_name(text: str) -> str:
    """Return `text`, such as the name of a folder, as a name that a run may have."""
    return re.sub(r"[^\w .,:()+=@-]", "_", text)[:200] or "run"


def _from_json(cls: type[T], raw: Any) -> T:
    if not isinstance(raw, dict):
        raise ValueError(f"{shorten(raw)} is no {cls.__name__}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(raw.keys() - known.keys()):
        raise ValueError(f"unknown keys {shorten(unknown)} for {cls.__name__}")
    required = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := sorted(required - raw.keys()):
        raise ValueError(f"missing keys {missing} for {cls.__name__}")
    hints = get_type_hints(cls)
    made = cls(**{name: _value(f"{cls.__name__}.{name}", value, hints[name]) for name, value in raw.items()})
    if isinstance(made, DataSpec) and (prod(made.shape) > MAX_VALUES or made.num_classes > MAX_CLASSES):
        raise ValueError(f"data of shape {shorten(made.shape)} and {made.num_classes} classes are larger than any that are read")
    return made


def _value(where: str, value: Any, hint: Any) -> Any:
    """Return `value` if it has the type of the annotation `hint`, else raise ValueError, naming the field `where`."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is DefenseSpec:
        return DefenseSpec.parse(_value(where, value, str))
    if is_dataclass(hint):
        return _from_json(hint, value)  # type: ignore[arg-type]
    if kind is Literal:  # the class itself says which ones it knows
        return _value(where, value, str)
    if kind is types.UnionType:
        absent = value is None if type(None) in inner else value is False
        return value if absent else _value(where, value, inner[0])
    if kind is tuple and isinstance(value, list):
        return tuple(_value(where, item, inner[0]) for item in value)
    if kind is Mapping and isinstance(value, dict):
        return {_value(where, key, str): _value(where, item, inner[1]) for key, item in value.items()}
    if hint is Any:
        return _plain(where, value)
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise ValueError(f"{where} is to be {getattr(hint, '__name__', hint)}, got {shorten(value)}")
    return _plain(where, value)


def _plain(where: str, value: Any) -> Any:
    """Return `value`. Raises ValueError where it holds a number too large to compute with, or text that cannot be shown."""
    if isinstance(value, str) and (len(value) > MAX_TEXT or UNPRINTABLE.search(value)):
        raise ValueError(f"{where} is too long, or holds characters that cannot be shown: {shorten(value)}")
    if type(value) is int and abs(value) > MAX_NUMBER:
        raise ValueError(f"{where} is too large a number: {shorten(value)}")
    if isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _plain(where, item)
    return value
