"""Search for runs below a folder, and marks that change with their files. Opens no file and follows no link."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attacker.service.jobs.run_names import MAX_FOLDER_DEPTH, find_id
from fedsim.recording.safe_files import shorten

MAX_FOLDERS = 10_000
"""Largest number of folders that are searched, since the root may hold anything."""
CLOCK_RESOLUTION_SECONDS = 2.0
"""Seconds after a change in which a second change may give the same mark, since clocks of file systems are coarse."""
CLOCK_SKEW_SECONDS = 5.0
"""Seconds that the clock of a file server may be ahead."""

Mark = tuple[object, ...]
"""A value that changes whenever certain files change."""


@dataclass
class RunListing:
    """The result of a search for runs. runs: folders by id, sorted. trouble: messages about folders that cannot be served."""

    runs: dict[str, Path] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)


def find_runs(root: Path) -> RunListing:
    """Return the runs below `root`: folders with `recording/manifest.json`, at most `MAX_FOLDER_DEPTH` folders deep.

    A run in a folder whose path has characters that ids cannot have is only reported in `trouble`. Hidden folders, links, and
    folders inside a run are not searched, and not more than `MAX_FOLDERS` in total.
    """
    listing, looked = RunListing(), 0
    for folder in _walk_folders(root, MAX_FOLDER_DEPTH):
        looked += 1
        if looked > MAX_FOLDERS:
            listing.trouble.append(f"there are more than {MAX_FOLDERS} folders below the root: the rest is not looked at")
            break
        if not is_run(folder):
            continue
        if (name := find_id(root, folder)) is None:
            listing.trouble.append(f"{shorten(folder.name)}: a run's folder is named by letters, digits, '-', '_' and '.' only")
        else:
            listing.runs[name] = folder
    listing.runs = dict(sorted(listing.runs.items()))
    return listing


def is_run(folder: Path) -> bool:
    """Return whether `folder/recording/manifest.json` exists, and `folder/recording` is not a symbolic link."""
    recording = folder / "recording"
    return os.path.lexists(recording / "manifest.json") and not recording.is_symlink()


def _walk_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below `folder`, without itself, parents first, at most `depth` levels deep.

    Folders of runs are yielded but not entered; hidden folders and links are left out.
    """
    try:
        with os.scandir(folder) as entries:
            inner = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in inner:
        path = folder / name
        yield path
        if depth > 1 and not is_run(path):
            yield from _walk_folders(path, depth - 1)


def read_mark(now: float, *paths: Path) -> Mark:
    """Return a value to compare with an earlier one; it differs if a file was changed, replaced, created or deleted in between.

    Files are compared by time stamp, size and inode number. In a folder, only added, removed and renamed entries are noticed.
    now: the present Unix time in seconds. If a file was changed in the last `CLOCK_RESOLUTION_SECONDS`, another change may leave
    its time stamp as it is; `now` is then part of the value, so that values read at different times differ.
    """
    marks: list[object] = []
    for path in paths:
        try:
            status = os.lstat(path)
        except OSError:
            marks.append(None)
            continue
        marks.append((status.st_mtime_ns, status.st_size, status.st_ino))
        if -CLOCK_SKEW_SECONDS < now - status.st_mtime < CLOCK_RESOLUTION_SECONDS:
            marks.append(now)
    return tuple(marks)


def read_work_mark(now: float, folder: Path, *files: Path, alive: float) -> Mark:
    """Return one value to compare with an earlier one, as `read_mark` does for `folder` and `files`.

    The value also differs if an attack may have been writing into `folder` at one of the two times and not at the other. An
    attack may be writing if an entry of `folder` was added, removed or renamed in the last `alive` seconds.
    now: as in `read_mark`.
    """
    try:
        still = now - os.lstat(folder).st_mtime < alive
    except OSError:
        still = False
    return (*read_mark(now, folder, *files), still)


def list_subfolders(folder: Path) -> list[Path]:
    """Return the paths of the folders in `folder`, sorted by name, without links to folders.

    The list is empty if `folder` is missing, is not a folder, is a link, or cannot be read.
    """
    if folder.is_symlink():
        return []
    try:
        with os.scandir(folder) as entries:
            return [folder / name for name in sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))]
    except OSError:
        return []
