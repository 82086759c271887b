"""Results of attacks on a run: the folders below `reconstructions/`, and the state of each case."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from attacker.replay.checkpoints import CHECKPOINT_SUFFIX
from attacker.replay.metadata_reader import find_other_recording, make_attack_key, read_metadata
from attacker.service.index.reconstruction_files import ReconstructionSummary, read_answer, read_failure, read_header
from attacker.service.index.recording_index import format_error
from attacker.service.index.run_folders import Mark, read_mark
from fedsim.recording import DamagedFile, Manifest
from fedsim.recording.safe_files import parse_json, shorten

CHECKPOINT_VALID_SECONDS = 180.0
"""Seconds for which a checkpoint, after its last change, shows that a process attacks its cases.

Searches write their checkpoint each minute.
"""

UNREADABLE = "its reconstruction cannot be read: "
"""Beginning of the reason of failure of a case whose reconstruction cannot be read."""
MAX_TROUBLE = 20
"""Largest number of messages about unreadable reconstructions of one attack."""

ShownState = Literal["none", "waiting", "running", "interrupted", "done", "failed"]


class CaseEntry(NamedTuple):
    """A case (observations that are attacked together) as described in attack.json.

    key: name of the case and of its files. rounds: rounds of its observations. examples: number of examples, None if it is not
    known. status, reason: status and reason of the case's first observation, as in the recording.
    """

    key: str
    client: str
    rounds: tuple[int, ...]
    examples: int | None
    status: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """The results of one attack or of its null, in the folder `name` below `reconstructions/`.

    attack, spec, seed: name of the attack, the attack with its arguments as text, and its random seed. null: whether these are
    results of a null. oracles: names of information that no server has and that the attack was given. withheld: names of
    information that the server has and the attack was not given. knows_defense: whether the attack models the clients' defense.
    network_code, attack_code: digests of code that is not part of this project; "" without such code.
    cases, answers, failures: dicts from the key of a case to the case, to the summary of its reconstruction (also an unfinished
    one of an interrupted case), and to the reason of failure.
    running: keys of the cases that are being attacked.
    files: dict from the name of each file of a case to a value that changes when the file changes, and to what it says: the
    summary of a reconstruction, or why there is none. facts: the corresponding value for attack.json.
    """

    name: str
    attack: str
    spec: str
    seed: int
    null: bool
    oracles: tuple[str, ...]
    knows_defense: bool
    cases: Mapping[str, CaseEntry]
    answers: Mapping[str, ReconstructionSummary] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()
    network_code: str = ""
    attack_code: str = ""
    failures: Mapping[str, str] = field(default_factory=dict)
    running: frozenset[str] = frozenset()
    files: Mapping[str, tuple[Mark, ReconstructionSummary | str]] = field(default_factory=dict)
    facts: Mark = ()

    @property
    def trouble(self) -> tuple[str, ...]:
        """Messages about reconstructions that cannot be read, at most MAX_TROUBLE."""
        found = (why.removeprefix(UNREADABLE) for why in self.failures.values() if why.startswith(UNREADABLE))
        return tuple(islice(found, MAX_TROUBLE))

    def get_mark(self, key: str) -> Mark:
        """Return a value that changes when the reconstruction of the case `key` changes; () if there is none."""
        return self.files[f"{key}.safetensors"][0] if f"{key}.safetensors" in self.files else ()

    def find_state(self, key: str) -> ShownState:
        """Return the state of the case `key`, which must be in `cases`.

        "done": it has a finished reconstruction. "failed": it has no finished one, for the reason in `failures`. "none": the
        server received no update that could be attacked. "running": it is being attacked. "interrupted": its search stopped
        before the end, and its best result so far is kept. "waiting": it was not attacked yet, or stopped without any result.
        """
        cut_off = key in self.answers and self.answers[key].interrupted
        if key in self.answers and not cut_off:
            return "done"
        if key in self.failures:
            return "failed"
        if self.cases[key].status != "complete":
            return "none"
        if key in self.running:
            return "running"
        return "interrupted" if cut_off else "waiting"


def find_null(source: Source, sources: Iterable[Source]) -> Source | None:
    """Return the null of an attack among `sources`, of the same seed and arguments; None if missing, or for a null."""
    key = make_attack_key(partial(getattr, source))
    nulls = (other for other in sources if other.null and make_attack_key(partial(getattr, other)) == key)
    return None if source.null else next(nulls, None)


def read_source(run: Path, name: str, manifest: Manifest | None, previous: Source | None = None) -> Source:
    """Read the results in the folder `name` below `reconstructions/` of `run`.

    manifest: manifest of the recording, for a check that the attack is on this recording; None skips the check. previous: the
    results at an earlier time; reconstructions, failures and attack.json are only read again if they have changed since then.
    Raises ValueError with a message for users if attack.json is missing, invalid, or of another recording. A reconstruction that
    cannot be read counts as a failure of its case.
    """
    folder = run / "reconstructions" / name
    mark = read_mark(time.time(), folder / "attack.json")
    description = previous if previous is not None and previous.facts == mark else _read_description(run, name, manifest)
    answers: dict[str, ReconstructionSummary] = {}
    failures: dict[str, str] = {}
    files: dict[str, tuple[Mark, ReconstructionSummary | str]] = {}
    running: set[str] = set()
    for file, at in _list_files(folder):
        path = f"reconstructions/{name}/{file}"
        if file.endswith(CHECKPOINT_SUFFIX):
            running |= _list_under_way(run, path)
            continue
        key, read = _parse_name(file)
        if key not in description.cases:
            continue
        earlier = previous.files.get(file) if previous is not None else None
        files[file] = earlier if earlier is not None and earlier[0] == at else (at, read(run, path))
        result = files[file][1]
        if isinstance(result, str):
            failures[key] = result
        else:
            answers[key] = result
    failures = {key: reason for key, reason in failures.items() if key not in answers or answers[key].interrupted}
    return replace(description, answers=answers, failures=failures, running=frozenset(running), files=files, facts=mark)


def make_file_path(source: str, case: str) -> str:
    """Return the path of a case's reconstruction, relative to its run."""
    return f"reconstructions/{source}/{case}.safetensors"


def _parse_name(file: str) -> tuple[str, Callable[[Path, str], ReconstructionSummary | str]]:
    """Return the key of the case that a file belongs to, and the function that reads the file; the key is "" for another file."""
    if file.endswith(".safetensors"):
        return file.removesuffix(".safetensors"), _read_answer
    return (file.removesuffix(".failed.json") if file.endswith(".failed.json") else ""), read_failure


def _read_answer(run: Path, path: str) -> ReconstructionSummary | str:
    """Return the summary of a reconstruction, or why it cannot be read."""
    try:
        return read_answer(run, path)
    except ValueError as error:
        return f"{UNREADABLE}{format_error(error, run)}"


def _list_files(folder: Path) -> Iterator[tuple[str, Mark]]:
    now = time.time()
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    except OSError:
        return
    for name in names:
        yield name, read_mark(now, folder / name)


def _list_under_way(run: Path, path: str) -> set[str]:
    """Return the keys of the cases in the checkpoint `path`, relative to `run`.

    A process that attacks these cases rewrites the file about once a minute. The set is empty if the file cannot be read, or
    was last written more than `CHECKPOINT_VALID_SECONDS` ago.
    """
    try:
        if time.time() - os.lstat(run / path).st_mtime > CHECKPOINT_VALID_SECONDS:
            return set()
        cases = parse_json(read_header(run, path).get("cases", "[]"))
    except (OSError, ValueError):
        return set()
    return {case for case in cases if isinstance(case, str)} if isinstance(cases, list) else set()


def _read_description(run: Path, name: str, manifest: Manifest | None) -> Source:
    """Return the attack and its cases as described in attack.json, as a `Source` without any result.

    Raises ValueError if the file is missing, invalid, or of another recording than `manifest` describes. The last check is
    skipped if `manifest` is None.
    """
    folder = f"reconstructions/{name}"
    try:
        content = read_metadata(run / folder / "attack.json", below=run)
    except DamagedFile as error:
        raise ValueError(format_error(error, run)) from None
    if manifest is not None and (key := find_other_recording(content, manifest)):
        raise ValueError(
            f"{folder}/attack.json is of an attack on another recording, whose {key} is {shorten(content['run'][key])}, not "
            f"{shorten(getattr(manifest, key))}; move the folder {folder} out of this run"
        )
    cases = [_make_case(case) for case in content["cases"]]
    return Source(
        name=name,
        attack=content["attack"][:100],
        spec=content["spec"][:1000],
        seed=content["seed"],
        null=content["null"],
        oracles=tuple(content["oracles"]),
        withheld=tuple(content.get("withheld", ())),
        knows_defense=content["knows_defense"],
        network_code=content.get("network_code", ""),
        attack_code=content.get("attack_code", ""),
        cases={case.key: case for case in cases},
    )


def _make_case(entry: Mapping[str, Any]) -> CaseEntry:
    rounds = tuple(round for round, _ in entry["rounds"]) if "rounds" in entry else (entry["round"],)
    reason = str(entry.get("reason") or "")[:300]
    return CaseEntry(entry["key"], entry["client"], rounds, entry.get("num_examples"), entry["status"], reason)
