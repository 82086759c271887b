"""Looks after what lies on disk: reads all of a recording to find damage, and deletes runs and nothing else."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedsim.recording import DamagedFile, Recording, Row
from fedsim.recording.index import ask, path_of
from fedsim.recording.index_database import INDEX
from fedsim.recording.manifest import MAX_BYTES
from fedsim.recording.masked_vectors import MASKED, SUM
from fedsim.recording.run_check import RECORDING_ENTRIES, RUN_ENTRIES, find_foreign
from fedsim.recording.safe_files import UNPRINTABLE, read_bytes
from fedsim.truth import TruthReader

MANIFEST, EXPERIMENT, RECORDING = "manifest.json", "experiment.toml", "recording"


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What is whole in a recording, and what is not.

    rounds: in its index, and weights: those of them whose global weights are intact.
    observations: complete ones in its index, and intact: those that can be read, weights included.
    damaged: files, relative to the folder that was asked about, each with its reason.
    unexpected: files that are no part of the recording, such as those of a round that a crash, or now the writer, left undone.
    """

    folder: str
    rounds: int = 0
    weights: int = 0
    observations: int = 0
    intact: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    unexpected: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Deleted:
    """How much there was."""

    files: int
    bytes: int


@dataclass
class _Damage:
    """The first reason for each damaged file."""

    folder: Path
    found: dict[str, str] = field(default_factory=dict)

    def add(self, error: DamagedFile) -> None:
        self.found.setdefault(_named(error.path, self.folder), error.reason)


def verify(folder: Path) -> Verified:
    """Read every file of a recording, or of the recording of a run, against its index.

    Where a folder `truth` lies beside the recording, every client whose update came, masked or not, must have its rows there.
    Nothing is changed.
    Raises ValueError where `folder` is neither a run nor a recording.
    """
    at = folder if os.path.lexists(folder / MANIFEST) else folder / RECORDING
    if not os.path.lexists(at / MANIFEST):
        raise ValueError(f"{folder} is neither a run nor a recording: it has no {MANIFEST} and no {RECORDING}/{MANIFEST}")
    damage = _Damage(folder)
    for foreign in find_foreign(folder):
        damage.add(foreign)
    if damage.found:  # what is no file of a recorder's may be anything: nothing is read
        return Verified(folder=str(folder), damaged=tuple(damage.found.items()))
    try:
        recording = Recording(at)
    except ValueError as error:
        reason = str(error).removeprefix(f"{at / MANIFEST}: ")
        return Verified(folder=str(folder), damaged=((_named(at / MANIFEST, folder), reason),))
    rows, rounds = _indexed(recording, damage)
    weights = sum(_is_intact(recording, number, damage) for number in rounds)
    complete = [row for row in rows if row.status == "complete"]
    intact = sum(_is_intact(recording, row, damage) for row in complete)
    masked = [row for row in rows if row.codec == MASKED]
    for row in masked:
        _is_intact(recording, row, damage)
    trained = [row for row in rows if row.status in ("complete", "masked") and row.client != SUM]
    _check_truth(Path(os.path.abspath(at)).parent / "truth", trained, damage)
    known = {row.file for row in rows} | {path_of(number, "global") for number in rounds}
    return Verified(
        folder=str(folder),
        rounds=len(rounds),
        weights=weights,
        observations=len(complete),
        intact=intact,
        damaged=tuple(damage.found.items()),
        unexpected=() if INDEX in {Path(name).name for name in damage.found} else tuple(_unexpected(at, known, folder)),
    )


def _indexed(recording: Recording, damage: _Damage) -> tuple[list[Row], list[int]]:
    """Rows and rounds, so far as the index can be read."""
    rows: list[Row] = []
    rounds: list[int] = []
    try:
        for (words,) in ask(recording.folder, "PRAGMA integrity_check(1)"):
            if words != "ok":
                damage.add(DamagedFile(recording.folder / INDEX, UNPRINTABLE.sub(" ", str(words))[:200]))
        rows = recording.rows(on_damage=damage.add)
        rounds = recording.rounds()
    except DamagedFile as error:
        damage.add(error)
    return rows, rounds


def _is_intact(recording: Recording, what: Row | int, damage: _Damage) -> bool:
    try:
        if not isinstance(what, Row):
            recording.sent(what)
        elif what.codec == MASKED:
            recording.masked(what)
        else:
            recording.observation(what)
    except DamagedFile as error:
        damage.add(error)
        return False
    return True


def _check_truth(truth: Path, rows: list[Row], damage: _Damage) -> None:
    if not truth.is_dir():
        return
    try:
        reader = TruthReader(truth)
    except ValueError as error:
        damage.add(error if isinstance(error, DamagedFile) else DamagedFile(truth / "dataset.json", str(error)))
        return
    for row in rows:
        path = truth / f"{row.client}.jsonl"
        try:
            reader.used(row.round, row.attempt, row.client)
        except KeyError:
            damage.add(DamagedFile(path, f"has no rows of round {row.round}, attempt {row.attempt}"))
        except (ValueError, TypeError, OSError) as error:
            damage.add(DamagedFile(path, f"cannot be read: {error}"))


def _unexpected(recording: Path, known: set[str | None], folder: Path) -> Iterator[str]:
    known = known | {MANIFEST, INDEX, f"{INDEX}-journal"}
    for path in _files(recording):
        if path.relative_to(recording).as_posix() not in known:
            yield _named(path, folder)


def _files(folder: Path) -> Iterator[Path]:
    """All that is no folder below `folder`, in order; links count as files and are not followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        else:
            yield path


def _named(path: Path, folder: Path) -> str:
    return UNPRINTABLE.sub("?", Path(os.path.relpath(path, folder)).as_posix())


def delete(folder: Path) -> Deleted:
    """Delete a run, or a recording. What tells that it is one goes last: half deleted, it can be deleted again.

    Links are deleted, and what they lead to is not. Raises ValueError, and leaves all as it is, where `folder` is neither a run
    nor a recording, or holds anything that `fedsim` and `attacker` do not write there.
    """
    folder = Path(os.path.abspath(folder))
    kind = kind_of(folder)
    sizes = [path.lstat().st_size for path in _files(folder)]
    (_delete_run if kind == "run" else _delete_recording)(folder)
    return Deleted(files=len(sizes), bytes=sum(sizes))


def kind_of(folder: Path) -> str:
    """Whether `folder` is a "run" or a "recording". Raises ValueError where `delete` would refuse it."""
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link; name the folder itself")
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    inner = folder / RECORDING
    if _is_recording(folder):
        kind, own = "recording", RECORDING_ENTRIES
    elif _is_file(folder / EXPERIMENT) or (_is_recording(inner) and not inner.is_symlink()):
        kind, own = "run", RUN_ENTRIES
    else:
        raise ValueError(f"{folder} is neither a run nor a recording: it has no {EXPERIMENT} and no {MANIFEST}")
    if others := sorted(path.name for path in folder.iterdir() if path.name not in own and path.suffix != ".partial"):
        raise ValueError(f"{folder} holds {others[0]!r}, which is no part of a {kind}; move it elsewhere first")
    return kind


def _is_recording(folder: Path) -> bool:
    """Of any version, and however damaged otherwise."""
    try:
        return b'"format_version"' in read_bytes(folder, MANIFEST, limit=MAX_BYTES)
    except DamagedFile:
        return False


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _delete_run(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name not in (RECORDING, EXPERIMENT):
            _remove(path)
    recording = folder / RECORDING
    if _is_recording(recording) and not recording.is_symlink():
        _delete_recording(recording)
    elif os.path.lexists(recording):
        _remove(recording)
    (folder / EXPERIMENT).unlink(missing_ok=True)
    folder.rmdir()


def _delete_recording(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            _remove(path)
    (folder / MANIFEST).unlink()
    folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
