"""Check of the files of a run for links, pipes and devices, which a run from an untrusted source may contain.

Files are also opened without following links, see `safe_files`. This check runs first, so that a command stops before it does
anything.
"""

import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from fedsim.recording.safe_files import COPY_ADVICE, DamagedFile, check_status, open_folder

MAX_DEPTH = 16
"""Largest depth of nested folders; regular runs have four levels."""
RECORDING_ENTRIES = frozenset({"manifest.json", "index.sqlite", "index.sqlite-journal", "rounds"})
RUN_ENTRIES = frozenset(
    {
        *("experiment.toml", "recording", "metrics.jsonl", "state", "clients", "truth"),
        *("reconstructions", "scores.jsonl", "growth.jsonl", "pairs", "report.html", "audit.html"),
    }
)
"""Names of all files and folders that fedsim and attacker write into a run, besides partial files left by a crash."""
SHARED_FOLDERS = ("recording", "reconstructions")
"""Names of links that `fedsim prepare` makes in the folders of server and scorer, to folders of the attacker."""
SETTLED_SECONDS = 3.0
"""Age in seconds from which the time of a folder's last change proves that nothing was added since; file systems round it."""
MAX_KNOWN_FOLDERS = 100_000
"""Largest number of folders that are remembered."""
SPECIAL_FILES = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

_plain_folders: set[tuple[int, int, int]] = set()
"""Device, inode and time of the last change of folders that hold only plain files.

A service checks a run of a thousand replays for every job. Whatever is put into a folder changes this time, which no program can
set. A hard link to one of its files in another folder does not change it; such a file is refused when it is opened.
"""


def check_run(folder: Path) -> None:
    """Raise the first error that `find_foreign` yields for a run, if it yields one: a DamagedFile that names path and reason.

    The reason also says what to do about a link, pipe, socket or device, or a folder that is too deep. If a folder cannot be
    opened, the reason is the system's message, such as "Permission denied".
    """
    for error in find_foreign(folder):
        raise error


def find_foreign(folder: Path) -> Iterator[DamagedFile]:
    """Yield an error for each foreign entry, a symbolic link, hard link, pipe, socket or device, in a run or a recording.

    Also yields an error for a folder that is too deep or cannot be opened. The links that `fedsim prepare` makes between the
    folders of server, attacker and scorer on one machine are allowed, see `_find_link_target`. All entries are checked if the
    folder holds `recording`, `manifest.json` or `attack.json`; otherwise only entries with the names of `RUN_ENTRIES` and
    `RECORDING_ENTRIES`. A folder that is missing, or a path that is not a folder, gives no error.
    """
    try:
        with open_folder(folder) as at:
            names = os.listdir(at)
            if not {"recording", "manifest.json", "attack.json"}.intersection(names):
                names = [name for name in names if name in RUN_ENTRIES | RECORDING_ENTRIES]
            for name in sorted(names):
                target = _find_link_target(folder, name, at)
                yield from _check_entry(folder / name, name, at, 1) if target is None else _check_folder(*target)
    except (FileNotFoundError, NotADirectoryError):  # the caller reports that this is not a run
        return
    except OSError as error:
        yield DamagedFile(folder, error.strerror or str(error))


def _find_link_target(folder: Path, name: str, dir_fd: int) -> tuple[Path, Path] | None:
    """Return the folder that an entry leads to, and the root, if it is a link made by `fedsim prepare`; None otherwise.

    `fedsim prepare` makes one folder of the run for each of server, attacker and scorer, two levels below a common root. The
    server's folder holds a link `recording`, and the scorer's a link `reconstructions`. Both lead to the folder of the same name
    in `attacks/RUN` below the root, which belongs to the attacker.
    folder: the run's folder. name: name of the entry. dir_fd: descriptor of the opened `folder`.
    """
    try:
        led = os.readlink(name, dir_fd=dir_fd) if name in SHARED_FOLDERS else None
    except OSError:
        return None
    inner = Path("attacks", folder.resolve().name, name)
    root = folder.resolve().parent.parent
    return (root / inner, root) if led == f"../../{inner.as_posix()}" else None


def _check_folder(folder: Path, below: Path, depth: int = 1) -> Iterator[DamagedFile]:
    """Yield an error for each link, pipe, socket or device in `folder` and its subfolders.

    Also yields an error for a folder that is deeper than `MAX_DEPTH` or cannot be opened. A missing folder gives no error.
    below: `folder` or a folder above it; links on the way from it to `folder` are not followed.
    depth: depth of `folder` itself: 0 for the run's folder, 1 for the entries of the run's folder, and so on.
    """
    try:
        with open_folder(folder, below=below) as at:
            yield from _check_entries(folder, at, depth)
    except FileNotFoundError:
        return
    except DamagedFile as error:
        yield error
    except OSError as error:
        yield DamagedFile(folder, error.strerror or str(error))


def _check_entries(folder: Path, dir_fd: int, depth: int) -> Iterator[DamagedFile]:
    """Yield an error for each link, pipe, socket or device in the opened folder with descriptor `dir_fd` and its subfolders.

    Also yields an error for a subfolder that is deeper than `MAX_DEPTH` or cannot be opened.
    folder: path of the folder, for messages. depth: depth of this folder itself, counted as in `_check_folder`.
    """
    status, is_plain = os.fstat(dir_fd), True
    for name in sorted(os.listdir(dir_fd)):
        if not _is_plain_file(name, dir_fd):  # a check by name and descriptor is faster than building thousands of paths
            is_plain = False
            yield from _check_entry(folder / name, name, dir_fd, depth + 1)
    if is_plain and time.time() - status.st_ctime > SETTLED_SECONDS:
        if len(_plain_folders) >= MAX_KNOWN_FOLDERS:
            _plain_folders.clear()
        _plain_folders.add((status.st_dev, status.st_ino, status.st_ctime_ns))


def _is_plain_file(name: str, dir_fd: int) -> bool:
    """Return whether an entry of the folder with descriptor `dir_fd` is a regular file without further hard links."""
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= 1


def _check_entry(path: Path, name: str, dir_fd: int, depth: int) -> Iterator[DamagedFile]:
    """Yield an error if an entry of a folder is a symbolic link, hard link, pipe, socket or device.

    If the entry is a folder, yield an error for each link, pipe, socket or device in it and its subfolders. Also yields an error
    for a folder that is deeper than `MAX_DEPTH` or cannot be opened.
    name: name of the entry in the folder with descriptor `dir_fd`. path: path of the entry, for messages.
    depth: depth of the entry, counted as in `_check_folder`.
    """
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:  # another process may have removed it
        return
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        if depth > MAX_DEPTH:
            yield DamagedFile(path, f"lies more than {MAX_DEPTH} folders deep, where no command writes; remove it")
            return
        if (status.st_dev, status.st_ino, status.st_ctime_ns) in _plain_folders:
            return
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        except OSError as error:
            yield DamagedFile(path, error.strerror or str(error))
            return
        try:
            yield from _check_entries(path, inner, depth)
        finally:
            os.close(inner)
    elif kind == stat.S_IFLNK:
        yield DamagedFile(path, f"is a symbolic link, which is not followed; {COPY_ADVICE}")
    elif kind != stat.S_IFREG:
        yield DamagedFile(path, f"is {SPECIAL_FILES.get(kind, 'not a regular file')}, which no command creates; remove it")
    else:
        try:
            check_status(status)
        except ValueError as error:
            yield DamagedFile(path, str(error))
