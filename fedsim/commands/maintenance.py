"""Maintenance of runs on disk: verification of recordings, and deletion of runs."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from defenses.registry.references import NotAdmitted
from fedsim.recording import DamagedFile, Recording, Row, find_recording
from fedsim.recording.index import COPY_ADVICE, make_path, query_index
from fedsim.recording.index_database import INDEX_FILE
from fedsim.recording.manifest import MAX_BYTES
from fedsim.recording.masked_vectors import MASKED_CODEC, SUM_CLIENT
from fedsim.recording.run_check import RECORDING_ENTRIES, RUN_ENTRIES, find_foreign
from fedsim.recording.safe_files import UNPRINTABLE_PATTERN, name_errors, read_bytes
from fedsim.truth import TruthReader

MANIFEST_FILE, EXPERIMENT_FILE, RECORDING_FOLDER = "manifest.json", "experiment.toml", "recording"


@dataclass(frozen=True, kw_only=True)
class VerificationResult:
    """The result of verifying the run or recording in `folder`.

    rounds: number of rounds in its index. weights: number of rounds whose global weights are intact.
    observations: number of updates in its index. With secure aggregation, the clients' masked updates do not count, and their sum
                  in each round counts as one update.
    intact: number of these updates that can be read, together with the global weights of their round.
    damaged: damaged files, as paths relative to `folder`, each with the first reason that was found.
    unexpected: files in the recording's folder that do not belong to it, such as those of a round that was not finished. They are
                not looked for if the index is damaged.

    If the folder holds links, pipes or devices, only these are listed, as damaged, and nothing is counted. If it holds none, and
    the manifest is invalid, only the manifest is listed.
    """

    folder: str
    rounds: int = 0
    weights: int = 0
    observations: int = 0
    intact: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    unexpected: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as a dict of plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class DeletionResult:
    """The number of deleted files, and their total size in bytes."""

    files: int
    bytes: int


@dataclass
class _Damage:
    """A dict `found` from each damaged file, as a path relative to `folder`, to the first reason that was added for it."""

    folder: Path
    found: dict[str, str] = field(default_factory=dict)

    def add(self, error: DamagedFile) -> None:
        self.found.setdefault(_format_path(error.path, self.folder), error.reason)


def verify(folder: Path) -> VerificationResult:
    """Check that the files of a recording, or of a run's recording, agree with its index. Nothing is changed.

    If there is a folder `truth` beside the recording, where clients note which examples they used, a client that sent an update
    without noting this counts as damage. Links, pipes and devices count as damage too; nothing is read if there are any.
    Raises ValueError if `folder` is neither a run nor a recording, or if its manifest names code as `module:function` that the
    user has not allowed with --code.
    """
    at = find_recording(folder)
    damage = _Damage(folder)
    for foreign in find_foreign(folder):
        damage.add(foreign)
    if damage.found:  # links, pipes or devices: reading them may be unsafe
        return VerificationResult(folder=str(folder), damaged=tuple(damage.found.items()))
    try:
        recording = Recording(at)
    except NotAdmitted as error:
        raise ValueError(
            f"{folder} is not verified: its manifest names the code {error.reference!r}, which is only imported if you ask for "
            f"it; put --code {error.reference} before the command, as in: fedsim --code {error.reference} verify {folder}"
        ) from None
    except ValueError as error:
        reason = str(error).removeprefix(f"{at / MANIFEST_FILE}: ")
        return VerificationResult(folder=str(folder), damaged=((_format_path(at / MANIFEST_FILE, folder), reason),))
    rows, rounds = _read_index(recording, damage)
    weights = sum(_is_intact(recording, number, damage) for number in rounds)
    complete = [row for row in rows if row.status == "complete"]
    intact = sum(_is_intact(recording, row, damage) for row in complete)
    masked = [row for row in rows if row.codec == MASKED_CODEC]
    for row in masked:
        _is_intact(recording, row, damage)
    trained = [row for row in rows if row.status in ("complete", "masked") and row.client != SUM_CLIENT]
    _check_truth(Path(os.path.abspath(at)).parent / "truth", trained, damage)
    known = {row.file for row in rows} | {make_path(number, "global") for number in rounds}
    return VerificationResult(
        folder=str(folder),
        rounds=len(rounds),
        weights=weights,
        observations=len(complete),
        intact=intact,
        damaged=tuple(damage.found.items()),
        unexpected=() if INDEX_FILE in {Path(name).name for name in damage.found} else tuple(_find_unexpected(at, known, folder)),
    )


def _read_index(recording: Recording, damage: _Damage) -> tuple[list[Row], list[int]]:
    """Return the rows of the index and its round numbers, as far as they can be read; add errors of the index to `damage`."""
    rows: list[Row] = []
    rounds: list[int] = []
    try:
        for (problem,) in query_index(recording.folder, "PRAGMA integrity_check(1)"):
            if problem != "ok":
                reason = UNPRINTABLE_PATTERN.sub(" ", str(problem))[:200]
                damage.add(DamagedFile(recording.folder / INDEX_FILE, f"{reason}; {COPY_ADVICE}"))
        rows = recording.read_rows(on_damage=damage.add)
        rounds = recording.list_rounds()
    except DamagedFile as error:
        damage.add(error)
    return rows, rounds


def _is_intact(recording: Recording, row_or_round: Row | int, damage: _Damage) -> bool:
    """Return whether a row's update, or the global weights of a round, can be read; if not, add the error to `damage`.

    row_or_round: the row, or the number of the round.
    """
    try:
        if not isinstance(row_or_round, Row):
            recording.read_sent(row_or_round)
        elif row_or_round.codec == MASKED_CODEC:
            recording.read_masked(row_or_round)
        else:
            recording.read_observation(row_or_round)
    except DamagedFile as error:
        damage.add(error)
        return False
    return True


def _check_truth(truth: Path, rows: list[Row], damage: _Damage) -> None:
    """Add an error to `damage` for each of `rows` (observations) whose true examples are not noted in the folder `truth`.

    The error names the client's file in that folder. The file has no entry for the round and attempt, or cannot be read. If the
    folder does not describe the data set, that is the only error. If the folder does not exist, nothing is checked.
    """
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
            reader.read_used(row.round, row.attempt, row.client)
        except KeyError:
            damage.add(DamagedFile(path, f"has no rows of round {row.round}, attempt {row.attempt}"))
        except (ValueError, TypeError, OSError) as error:
            damage.add(DamagedFile(path, f"cannot be read: {error}"))


def _find_unexpected(recording: Path, known: set[str | None], folder: Path) -> Iterator[str]:
    """Yield the files of a recording that are not in `known`, as printable paths relative to `folder`."""
    known = known | {MANIFEST_FILE, INDEX_FILE, f"{INDEX_FILE}-journal"}
    for path in _find_files(recording):
        if path.relative_to(recording).as_posix() not in known:
            yield _format_path(path, folder)


def _find_files(folder: Path) -> Iterator[Path]:
    """Yield all files below `folder`, sorted. Links count as files and are not followed."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _find_files(path)
        else:
            yield path


def _format_path(path: Path, folder: Path) -> str:
    """Return the path relative to `folder`, with unprintable characters replaced."""
    return UNPRINTABLE_PATTERN.sub("?", Path(os.path.relpath(path, folder)).as_posix())


def delete(folder: Path) -> DeletionResult:
    """Delete a run or a recording, with everything in its folder, and return how much was deleted.

    The files by which the run or recording is recognised are deleted last, so that an interrupted deletion can be repeated. Links
    are deleted, but not their targets. Raises the errors of `identify_kind`, and then deletes nothing.
    """
    folder = Path(os.path.abspath(folder))
    kind = identify_kind(folder)
    sizes = [path.lstat().st_size for path in _find_files(folder)]
    (_delete_run if kind == "run" else _delete_recording)(folder)
    return DeletionResult(files=len(sizes), bytes=sum(sizes))


def identify_kind(folder: Path) -> str:
    """Return the kind of `folder`: "run" or "recording".

    Raises ValueError if it is neither, or a link, or holds an entry that `fedsim` and `attacker` do not write there. Entries of
    its subfolders are not checked.
    """
    if folder.is_symlink():
        raise ValueError(f"{folder} is a symbolic link and is not deleted; name the folder to which it leads")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    inner = folder / RECORDING_FOLDER
    if _is_recording(folder):
        kind, own = "recording", RECORDING_ENTRIES
    elif ((file := folder / EXPERIMENT_FILE).is_file() and not file.is_symlink()) or (
        _is_recording(inner) and not inner.is_symlink()
    ):
        kind, own = "run", RUN_ENTRIES
    else:
        raise ValueError(
            f"{folder} is neither a run nor a recording: it has no file {EXPERIMENT_FILE}, and neither it nor its folder "
            f"{RECORDING_FOLDER} has a valid {MANIFEST_FILE}; name the folder of a run or of a recording"
        )
    if others := sorted(path.name for path in folder.iterdir() if path.name not in own and path.suffix != ".partial"):
        raise ValueError(f"{folder} holds {others[0]!r}, which is not part of a {kind}; move it elsewhere first")
    return kind


def _is_recording(folder: Path) -> bool:
    """Return whether `folder` holds the manifest of a recording, of any version. Nothing else is checked."""
    try:
        return b'"format_version"' in read_bytes(folder, MANIFEST_FILE, limit=MAX_BYTES)
    except DamagedFile:
        return False


def _delete_run(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name not in (RECORDING_FOLDER, EXPERIMENT_FILE):
            _remove(path)
    recording = folder / RECORDING_FOLDER
    if _is_recording(recording) and not recording.is_symlink():
        _delete_recording(recording)
    elif os.path.lexists(recording):
        _remove(recording)
    (folder / EXPERIMENT_FILE).unlink(missing_ok=True)
    folder.rmdir()


def _delete_recording(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST_FILE:
            _remove(path)
    (folder / MANIFEST_FILE).unlink()
    folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        with name_errors(path):
            shutil.rmtree(path)
    else:
        path.unlink()
