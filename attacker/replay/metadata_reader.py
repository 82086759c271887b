"""Reader of `attack.json`, the metadata of a replay (an attack run on a recording), checked strictly as it may be untrusted.

Its texts are copied into the rows of score tables, and the keys of its cases become names of files.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, ConfigDict, FailFast, Field, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from attacker.attacks.registry import NULL_SUFFIX
from fedsim.recording.manifest import Manifest, check_name
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.safe_files import MAX_NUMBER, UNPRINTABLE_PATTERN, DamagedFile, read_json, shorten
from fedsim.recording.writer import is_plain

MAX_BYTES = 512 * 2**20
"""Largest size of the file in bytes, enough for some million cases."""
MAX_TEXT = 10_000
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
"""Pattern of the names of cases and of attacks' folders, which become names of files."""
REPLAY_ADVICE = "replay the attack again"
"""Advice for an invalid attack.json, which a replay writes anew."""


def _require(check: Callable[[str], object], problem: str) -> AfterValidator:
    """Return the validator that raises ValueError with `problem` for a text that `check` finds false."""

    def validate(text: str) -> str:
        if not check(text):
            raise ValueError(problem)
        return text

    return AfterValidator(validate)


Text = Annotated[
    str, Field(max_length=MAX_TEXT), _require(lambda text: not UNPRINTABLE_PATTERN.search(text), "it must be printable")
]
Key = Annotated[str, _require(SAFE_NAME.fullmatch, "it cannot be the name of a file")]
ClientName = Annotated[str, _require(is_plain, "it cannot be the name of a client")]
Sender = Annotated[str, _require(lambda name: name == SUM_CLIENT or is_plain(name), "it cannot be the name of a client")]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_NUMBER)]


class _TrainingEntry(TypedDict):
    epochs: NotRequired[Count | None]


class _RunEntry(TypedDict):
    """Public settings of the federation, see `describe_run`."""

    name: NotRequired[Annotated[str, AfterValidator(lambda name: check_name(name) or name)]]
    model: NotRequired[Text]
    defense: NotRequired[Text]
    gradient: NotRequired[Text]
    network: NotRequired[Text]
    inputs: NotRequired[Text]
    ranges_from: NotRequired[Text]
    created: NotRequired[Text]
    limits: NotRequired[list[Text]]
    training: NotRequired[_TrainingEntry]


class _CaseEntry(TypedDict):
    """One case, see `metadata.py`: `rounds` are pairs of round and attempt, `left_out` pairs of round and reason."""

    key: Key
    client: Sender
    status: Literal["complete", "masked", "failed", "late"]
    round: PositiveCount
    attempt: PositiveCount
    num_examples: NotRequired[Count | None]
    codec: NotRequired[Annotated[str, Field(max_length=MAX_TEXT)] | None]
    rounds: NotRequired[Annotated[list[Annotated[list[PositiveCount], Field(min_length=2, max_length=2)]], Field(min_length=1)]]
    cohorts: NotRequired[list[list[ClientName]]]
    cohort: NotRequired[list[ClientName]]
    left_out: NotRequired[list[Annotated[tuple[PositiveCount, str], Strict(False)]]]


def _check_cohorts(case: _CaseEntry) -> _CaseEntry:
    if "cohorts" in case and len(case["cohorts"]) != len(case.get("rounds", [()])):
        raise ValueError("cohorts must have one entry for each of the rounds")
    return case


class _Metadata(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    attack: Text
    spec: Text
    null: bool
    knows_defense: bool
    oracles: list[Text]
    asked_oracles: NotRequired[list[Text]]
    withheld: NotRequired[list[Text]]
    code: NotRequired[list[Text]]
    seed: int
    network_code: NotRequired[Text]
    attack_code: NotRequired[Text]
    run: _RunEntry
    cases: Annotated[list[Annotated[_CaseEntry, AfterValidator(_check_cohorts)]], FailFast()]


_METADATA = TypeAdapter(_Metadata)


def read_metadata(path: Path, *, below: Path | None = None) -> dict[str, Any]:
    """Return the content of an `attack.json`.

    below: folder below which symbolic links on the way to `path` are not followed; by default the folder of `path`.
    Raises DamagedFile, naming the file and what to do, if it is missing or invalid, or if the name of its folder does not match
    `SAFE_NAME`.
    """
    if not SAFE_NAME.fullmatch(path.parent.name):
        raise DamagedFile(
            path,
            f"lies in the folder {shorten(path.parent.name)}, but names of attack folders have at most 200 of the characters A-Z "
            "a-z 0-9 _ . - and begin with none of . -; rename the folder",
        )
    try:
        facts = read_json(path, below=below, limit=MAX_BYTES)
    except DamagedFile as error:
        raise DamagedFile(path, f"{error.reason}; {REPLAY_ADVICE}") from None
    try:
        _METADATA.validate_python(facts)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        of, place = "the file", [str(part) for part in problem["loc"]]
        if place[:1] == ["cases"] and len(place) > 1:
            of, place = f"case {int(place[1]) + 1}", place[2:]
        where = f"the entry {'.'.join(place)} of {of}" if place else of
        reason = f"{where} is invalid: {problem['msg'].removeprefix('Value error, ')}, got {shorten(problem['input'])}"
        raise DamagedFile(path, f"{reason}; {REPLAY_ADVICE}") from None
    return dict(facts)


def make_attack_key(get: Callable[[str], Any]) -> tuple[Any, ...]:
    """Return a key that is equal for an attack on a recording and for its null, and differs between attacks.

    get: function from the name of an entry of `attack.json`, which score rows have as well, to its value. The entries
    `network_code` and `attack_code` are digests of code that is not part of this project; None counts as "", no such code.
    """
    codes = (get(name) or "" for name in ("network_code", "attack_code"))
    return str(get("spec")).removesuffix(NULL_SUFFIX), get("seed"), get("knows_defense"), *codes


def find_other_recording(metadata: Mapping[str, Any], manifest: Manifest) -> str:
    """Return the setting, "name" or "created", that shows that an attack was on another recording; "" if none does.

    metadata: content of its `attack.json`. manifest: manifest of the recording.
    """
    run = metadata["run"]
    return next((key for key in ("name", "created") if key in run and run[key] != getattr(manifest, key)), "")
