"""Catalogue of the recordings below the root folder, as of its last scan. It only reads files.

Names in requests are looked up in lists and never used as paths.
"""

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from attacker.replay.metadata_reader import SAFE_NAME
from attacker.service.index import views
from attacker.service.index.attack_folders import CHECKPOINT_VALID_SECONDS, Source, find_null, read_source
from attacker.service.index.cache import LRUCache
from attacker.service.index.json_lines import Scores, read_scores, read_training
from attacker.service.index.recording_index import Index, IndexedRows, format_error, hash_manifest, read_index, read_rows
from attacker.service.index.run_folders import Mark, find_runs, is_run, list_subfolders, read_mark, read_work_mark
from attacker.service.index.verdicts import RunVerdicts, read_verdicts
from attacker.service.schemas.recordings import RecordingSummary
from attacker.service.settings import ServiceSettings
from fedsim.recording import Manifest, Row

MAX_CACHED_RUNS = 8
"""Largest number of runs whose rows, scores and attacks are cached in memory."""
MAX_CACHED_SOURCES = 64
RECORDING_SECONDS = 60.0
"""Seconds from the arrival of a run's last reply in which the run counts as being recorded."""
INDEX_FILE = "recording/index.sqlite"


class UnknownName(LookupError):
    """Raised for the name of a recording, an attack or a case that does not exist, and of an attack that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class CatalogueRun:
    """One run at the time of its last scan.

    identity: text that differs between two recordings that had the same id at different times; empty if the manifest cannot be
    read.
    marks: dict from "manifest", "index", "training" and "scores" to a value that changes when the file changes.
    sources: dict from the name of each folder of an attack or a null to a value that changes when its files change. summary: the
    run as the API returns it.
    version: hash of `marks`, `sources` and whether truth is given; also after a restart of the service, it differs between any
    two states of these files.
    """

    id: str
    folder: Path
    identity: str
    manifest: Manifest | None
    index: Index
    marks: Mapping[str, Mark]
    sources: Mapping[str, Mark]
    summary: RecordingSummary
    version: str


class ArrivedRound(NamedTuple):
    """A round that is new since the last scan, or was recorded again after a resume or in a new recording.

    All rounds of a recording are new in its first scan. recording: id of the recording. lag: seconds from the arrival of the
    round's last reply at the server to the scan that found the round; None if unknown.
    """

    recording: str
    round: int
    lag: float | None


@dataclass
class Changes:
    """Differences between two scans. changed: changed and new runs. removed: ids of runs that are gone. arrived: new rounds."""

    changed: list[CatalogueRun] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    arrived: list[ArrivedRound] = field(default_factory=list)


class Catalogue:
    """The recordings below `settings.root`, as of the last scan. All methods may be called from several threads."""

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.trouble: tuple[str, ...] = ()
        self.version = ""
        self._runs: dict[str, CatalogueRun] = {}
        self._looking = threading.Lock()
        self._rows: LRUCache[IndexedRows] = LRUCache(MAX_CACHED_RUNS)
        self._scores: LRUCache[tuple[Scores, list[str]]] = LRUCache(MAX_CACHED_RUNS)
        self._verdicts: LRUCache[RunVerdicts] = LRUCache(MAX_CACHED_RUNS)
        self._training: LRUCache[tuple[list[dict[str, Any]], list[str]]] = LRUCache(MAX_CACHED_RUNS)
        self._sources: LRUCache[Source | str] = LRUCache(MAX_CACHED_SOURCES)

    def scan(self) -> Changes:
        """Find changes on disk since the last scan, and return them."""
        with self._looking:
            listing, changes = find_runs(self.settings.folder), Changes()
            runs: dict[str, CatalogueRun] = {}
            for id, folder in listing.runs.items():
                previous = self._runs.get(id)
                run = runs[id] = self._scan_folder(id, folder, previous)
                if run is not previous:
                    changes.changed.append(run)
                    changes.arrived += _find_arrived(run, previous)
            changes.removed = sorted(self._runs.keys() - runs.keys())
            self._keep(runs, tuple(listing.trouble))
            return changes

    def scan_run(self, id: str) -> Changes:
        """Find changes of the run `id` since its last scan, and return them; no changes if it is unknown or no longer exists."""
        with self._looking:
            changes, previous = Changes(), self._runs.get(id)
            if previous is None or not is_run(previous.folder):
                return changes
            run = self._scan_folder(id, previous.folder, previous)
            if run is not previous:
                changes.changed.append(run)
                changes.arrived += _find_arrived(run, previous)
                self._keep({**self._runs, id: run}, self.trouble)
            return changes

    def list_changed(self) -> list[str]:
        """Return the ids of runs that are being recorded and whose index has changed since the last scan.

        A run counts as being recorded if its last known reply is less than `RECORDING_SECONDS` old. The call is cheap enough to
        be made several times a second.
        """
        now = time.time()
        lively = [run for run in self._runs.values() if now - (run.index.updated or 0.0) < RECORDING_SECONDS]
        return [run.id for run in lively if read_mark(now, run.folder / INDEX_FILE)[:1] != run.marks["index"][:1]]

    def _keep(self, runs: dict[str, CatalogueRun], trouble: tuple[str, ...]) -> None:
        self._runs, self.trouble = runs, trouble
        self.version = _hash_parts([(id, run.version) for id, run in runs.items()], trouble)

    def list_runs(self) -> list[CatalogueRun]:
        """Return all runs, sorted by id."""
        return list(self._runs.values())

    def get_run(self, id: str) -> CatalogueRun:
        """Return the run with that id. Raises UnknownName."""
        try:
            return self._runs[id]
        except KeyError:
            raise UnknownName(f"there is no recording {id!r}") from None

    def get_rows(self, run: CatalogueRun) -> Mapping[int, Sequence[Row]]:
        """Return a dict from each round, ascending, to the rows of the recording's index for this round.

        A row is about the reply of one client, or about the sum over clients under secure aggregation. The dict is empty if the
        index cannot be read.
        """

        def read(previous: IndexedRows | None) -> IndexedRows:
            try:
                return read_rows(run.folder, run.index.rounds, previous)
            except ValueError:  # damaged since the last scan; the next one will report it
                return IndexedRows({}, {})

        return self._rows.get(run.id, run.marks["index"], read).by_round

    def list_sources(self, run: CatalogueRun) -> list[Source]:
        """Return all attacks and nulls on the run by folder name, without those that `list_trouble` reports as unreadable."""
        return [source for source in self._read_sources(run) if isinstance(source, Source)]

    def get_source(self, run: CatalogueRun, name: str) -> Source:
        """Return the attack or null in the folder `name`. Raises UnknownName if it does not exist or cannot be read."""
        if name not in run.sources:
            raise UnknownName(f"there is no attack {name[:100]!r} on {run.id}")
        source = self._load_source(run, name)
        if isinstance(source, str):
            raise UnknownName(f"the attack {name!r} on {run.id} cannot be shown: {source}")
        return source

    def get_scores(self, run: CatalogueRun) -> Scores:
        """Return the scores as a dict from the folder of an attack to a dict from case to the scores of its examples.

        Nulls have folders and scores of their own. The dict is empty if nothing is scored, or if the service was given no truth
        of this run.
        """
        return self._read_scores(run)[0] if run.summary["truth"] else {}

    def get_verdicts(self, run: CatalogueRun) -> RunVerdicts:
        """Return as text what the comparison of each attack with its null shows.

        The result holds no verdict if the service was given no truth (which examples each client trained on) of this run, or if
        the score rows are too many or cannot be read.
        """
        if not run.summary["truth"]:
            return RunVerdicts()
        marks = run.marks["scores"], run.marks["manifest"]
        return self._verdicts.get(run.id, marks, lambda before: read_verdicts(run.folder, run.manifest))

    def find_null(self, run: CatalogueRun, source: Source) -> Source | None:
        """Return the null of the attack `source`; None if it was not run, and if `source` is a null itself."""
        return find_null(source, self.list_sources(run))

    def get_training(self, run: CatalogueRun) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, the server's log of the rounds, sorted by round; rows without a round are missing."""
        return self._read_training(run)[0]

    def list_trouble(self, run: CatalogueRun) -> list[str]:
        """Return messages about files of a run that cannot be read or used.

        Scores are only checked if the service was given the truth of this run (which examples each client trained on).
        """
        messages = [*run.summary["trouble"], *self._read_training(run)[1]]
        if run.summary["truth"]:
            messages += self._read_scores(run)[1]
        for source in self._read_sources(run):
            messages += [source] if isinstance(source, str) else source.trouble
        return list(dict.fromkeys(messages))

    def _read_scores(self, run: CatalogueRun) -> tuple[Scores, list[str]]:
        return self._scores.get(run.id, run.marks["scores"], lambda before: read_scores(run.folder))

    def _read_training(self, run: CatalogueRun) -> tuple[list[dict[str, Any]], list[str]]:
        return self._training.get(run.id, run.marks["training"], lambda before: read_training(run.folder))

    def _read_sources(self, run: CatalogueRun) -> list[Source | str]:
        return [self._load_source(run, name) for name in run.sources]

    def _load_source(self, run: CatalogueRun, name: str) -> Source | str:
        def read(previous: Source | str | None) -> Source | str:
            try:
                return read_source(run.folder, name, run.manifest, previous if isinstance(previous, Source) else None)
            except ValueError as error:
                return format_error(error, run.folder)

        return self._sources.get((run.id, name), (run.marks["manifest"], run.sources[name]), read)

    def _scan_folder(self, id: str, folder: Path, previous: CatalogueRun | None) -> CatalogueRun:
        now = time.time()
        at = {"manifest": "recording/manifest.json", "index": INDEX_FILE}
        at |= {"training": "metrics.jsonl", "scores": "scores.jsonl"}
        marks = {name: read_mark(now, folder / file) for name, file in at.items()}
        sources = {
            path.name: read_work_mark(now, path, path / "attack.json", alive=CHECKPOINT_VALID_SECONDS)
            for path in list_subfolders(folder / "reconstructions")
            if SAFE_NAME.fullmatch(path.name)
        }
        truth = bool(self.settings.list_truth(folder))
        if previous and (previous.marks, previous.sources, previous.summary["truth"]) == (marks, sources, truth):
            return previous
        identity, manifest, wrong = previous.identity if previous else "", previous.manifest if previous else None, ""
        if previous is None or previous.marks["manifest"] != marks["manifest"]:
            identity, manifest, wrong = _read_manifest(folder)
        elif manifest is None:
            wrong = previous.summary["trouble"][0]
        index = Index()
        if manifest is not None:
            same = previous is not None and previous.manifest is manifest and previous.marks["index"] == marks["index"]
            index = previous.index if previous is not None and same else read_index(folder, previous.index if previous else None)
        trouble = [wrong] if wrong else list(index.trouble)
        summary = views.describe_recording(id, manifest, index, truth=truth, trouble=trouble)
        version = _hash_parts(marks, sources, truth)
        return CatalogueRun(
            id=id,
            folder=folder,
            identity=identity,
            manifest=manifest,
            index=index,
            marks=marks,
            sources=sources,
            summary=summary,
            version=version,
        )


def _hash_parts(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _read_manifest(folder: Path) -> tuple[str, Manifest | None, str]:
    try:
        return hash_manifest(folder), Manifest.read(folder / "recording" / "manifest.json"), ""
    except ValueError as error:
        return "", None, format_error(error, folder)


def _find_arrived(run: CatalogueRun, previous: CatalogueRun | None) -> list[ArrivedRound]:
    known = previous.index.attempts if previous and previous.identity == run.identity else {}
    now, attempts = time.time(), run.index.attempts
    return [
        ArrivedRound(run.id, number, now - marks[-1] if isinstance(marks[-1], float) else None)
        for number, marks in run.index.rounds.items()
        if known.get(number) != attempts[number]
    ]
