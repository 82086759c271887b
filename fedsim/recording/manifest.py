"""Manifest of a recording: one JSON file with the public settings of the run."""

import json
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec
from defenses.registry.references import NotAdmitted
from defenses.spec import DefenseSpec
from fedsim.recording.files import write_json
from fedsim.recording.observation import DataSpec, ModelSpec
from fedsim.recording.safe_files import (
    MAX_NUMBER,
    UNPRINTABLE_PATTERN,
    WHOLE_ADVICE,
    DamagedFile,
    parse_json,
    read_bytes,
    shorten,
)
from fedsim.recording.training import Training

FORMAT_VERSION = 3
MAX_BYTES = 1_000_000
"""Largest size of a manifest in bytes; the columns of a table may need much of it."""
MAX_TEXT = 10_000
"""Largest length of a text in a manifest, in characters."""
MAX_VALUES = 10**8
"""Largest number of values of one example."""
MAX_CLASSES = 10**7
RUN_NAME_PATTERN = re.compile(r"[\w .,:()+=@-]{1,200}")
"""Pattern of names of runs, which appear in score rows, files and command lines."""
CREATED_PATTERN = re.compile(r"[0-9T:.Z+-]{1,40}")
SOFTWARE_PATTERN = re.compile(r"[\w.+-]{1,200}")
"""Pattern of names and versions of software."""
MODEL_PATTERN = re.compile(r"[\w.:-]{1,200}")
"""Pattern of names of models, and of `module:function`."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The public settings of a run, which the server knows before the first message.

    name:     name of the run. created: time in ISO 8601, UTC. software: versions by package.
    model, data, training: the network, the data and the local training of the clients.
    defense:  defense that clients apply to their updates. codec: name of the codec that packs updates for the wire.
    gradient: specification of the defense that changes how clients compute gradients; "plain" for none.
    inputs:   specification of the defense that changes how clients prepare examples; "" for none.
    secure_aggregation: the parameters of secure aggregation that all parties agreed on; False without secure aggregation.

    Raises ValueError if a name, version or time has a wrong form, or if `gradient` or `inputs` is not a valid specification.
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
        if not MODEL_PATTERN.fullmatch(self.model.name):
            raise ValueError(
                f"{shorten(self.model.name)} is not a valid name of a model, because a name has 1 to 200 letters, digits, _ . : "
                "-; use another name, or copy the recording again"
            )
        if invalid := [text for pair in self.software.items() for text in pair if not SOFTWARE_PATTERN.fullmatch(text)]:
            raise ValueError(
                f"the table 'software', in which fedleak notes installed packages, has {shorten(invalid[0])}, which is not a "
                "valid name or version (1 to 200 letters, digits, _ . + -); copy the recording again"
            )
        if self.created and not CREATED_PATTERN.fullmatch(self.created):
            raise ValueError(f"{shorten(self.created)} is not a valid time of creation: write it as 2026-01-31T12:00:00Z")
        GradientSpec.parse(self.gradient)
        InputsSpec.parse(self.inputs)

    @property
    def network(self) -> str:
        """Return the specification of the defense that changes the network; "" for none."""
        return self.model.network

    def write(self, path: Path) -> None:
        """Write the manifest to `path` as JSON, atomically."""
        write_json(path, {"format_version": FORMAT_VERSION, **asdict(self), "defense": str(self.defense)})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a manifest. Raises ValueError, naming the file, if it is not a manifest of this format version.

        Raises NotAdmitted, a ValueError, if it names a user's own code (`module:function`) that this user has not allowed to run.
        """
        try:
            raw = parse_json(read_bytes(path.parent, path.name, limit=MAX_BYTES))
            if not isinstance(raw, dict):
                raise ValueError(
                    f"its JSON must be an object of settings by name, got {shorten(raw)}; copy the file again, or run the "
                    "federation again"
                )
            version = raw.pop("format_version", None)
            if version != FORMAT_VERSION or type(version) is not int:
                newer = type(version) is int and version > FORMAT_VERSION
                advice = "install a newer one" if newer else "run the federation again"
                raise ValueError(f"format version {shorten(version)}, but this program reads version {FORMAT_VERSION}; {advice}")
            return _from_json(cls, raw, "Manifest")
        except DamagedFile as error:
            if not path.exists() and not path.is_symlink():
                reason = f"it has no {path.name}" if path.parent.exists() else "the folder does not exist"
                raise ValueError(f"{path.parent} is not a recording: {reason}") from None
            raise ValueError(str(error)) from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: is cut off or no valid JSON ({error}); {WHOLE_ADVICE}") from None
        except RecursionError:
            raise ValueError(f"{path}: the JSON is nested too deeply for a manifest; copy the recording again") from None
        except NotAdmitted as error:
            raise NotAdmitted(f"{path}: {error}", reference=error.reference) from None
        except (ValueError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{path}: {error}") from None


def check_name(name: str) -> None:
    """Raise ValueError if `name` is not a valid name of a run: 1 to 200 letters, digits, spaces and . , : ( ) + = @ - _."""
    if not RUN_NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{shorten(name)} is not a valid name of a run: use 1 to 200 letters, digits, spaces and . , : ( ) + = @ - _"
        )


def make_name(text: str) -> str:
    """Return a valid name of a run, made of a text such as the name of a folder.

    Each character that is not allowed becomes "_", and the text is cut to 200 characters. An empty text gives "run".
    """
    return re.sub(r"[^\w .,:()+=@-]", "_", text)[:200] or "run"


def _from_json(cls: type[T], raw: Mapping[str, Any], where: str) -> T:
    """Build a dataclass from a parsed JSON object, checking names and types of all fields.

    where: name of the object, such as "Manifest.model", for messages.
    Raises ValueError if they do not fit, or if data exceed `MAX_VALUES` per example or `MAX_CLASSES`.
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(raw.keys() - known.keys()):
        raise ValueError(
            f"{where} has unknown keys, {shorten(unknown)}; install a newer fedleak if a newer one wrote the file, or copy the "
            "file again"
        )
    required = {name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING}
    if missing := sorted(required - raw.keys()):
        raise ValueError(
            f"missing keys {missing} for {cls.__name__}; the file is damaged: copy it again, or run the federation again"
        )
    hints = get_type_hints(cls)
    instance = cls(**{name: _convert_value(f"{cls.__name__}.{name}", value, hints[name]) for name, value in raw.items()})
    if isinstance(instance, DataSpec) and (prod(instance.shape) > MAX_VALUES or instance.num_classes > MAX_CLASSES):
        raise ValueError(
            f"data of shape {shorten(instance.shape)} with {instance.num_classes} classes exceed the limits of {MAX_VALUES} "
            f"values per example and {MAX_CLASSES} classes"
        )
    return instance


def _convert_value(where: str, value: Any, hint: Any) -> Any:
    """Convert a value of parsed JSON to the type of the annotation `hint`. Raises ValueError, naming the field `where`."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint is DefenseSpec:
        return DefenseSpec.parse(_convert_value(where, value, str))
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a JSON object, got {shorten(value)}; copy the file again")
        return _from_json(hint, value, where)  # type: ignore[arg-type]
    if kind is Literal:  # the dataclass itself checks which values are known
        return _convert_value(where, value, str)
    if kind is types.UnionType:
        absent = value is None if type(None) in inner else value is False
        return value if absent else _convert_value(where, value, inner[0])
    if kind is tuple and isinstance(value, list):
        return tuple(_convert_value(where, item, inner[0]) for item in value)
    if kind is Mapping and isinstance(value, dict):
        return {_convert_value(where, key, str): _convert_value(where, item, inner[1]) for key, item in value.items()}
    if hint is Any:
        return check_plain(where, value)
    if type(value) is not hint and not (hint is float and type(value) is int):
        raise ValueError(f"{where} must be of type {getattr(hint, '__name__', hint)}, got {shorten(value)}")
    return check_plain(where, value)


def check_plain(where: str, value: Any) -> Any:
    """Return a value of parsed JSON unchanged, after checking all integers and texts in it, also keys and nested ones.

    where: name of the whole value, for messages; the message shows the integer or text inside it that is wrong.
    Raises ValueError if an integer is above `MAX_NUMBER` in magnitude, or a text has over `MAX_TEXT` characters or one that is
    not printable (`UNPRINTABLE_PATTERN`).
    """
    if isinstance(value, str) and (len(value) > MAX_TEXT or UNPRINTABLE_PATTERN.search(value)):
        raise ValueError(
            f"{where} has a text with over {MAX_TEXT} characters, or with characters that are not printable: {shorten(value)}"
        )
    if type(value) is int and abs(value) > MAX_NUMBER:
        raise ValueError(f"{where}: an integer must be at most {MAX_NUMBER} in magnitude, got {shorten(value)}")
    if isinstance(value, list | dict):
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            check_plain(where, item)
    return value
