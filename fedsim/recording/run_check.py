"""Check of all entries of a run before it is used: a foreign run may hold links that lead out of it, pipes and devices.

Files are also opened without following links, see `safe_files`. This check runs first, so that a command ends before it has
changed anything, and covers files that libraries such as SQLite open by path.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fedsim.recording.safe_files import COPY_ADVICE, DamagedFile, check_status, opened_folder

MAX_DEPTH = 16
"""Folders within folders; a recorder, a client and an attack make four."""
RECORDING_ENTRIES = frozenset({"manifest.json", "index.sqlite", "index.sqlite-journal", "rounds"})
RUN_ENTRIES = frozenset(
    {
        *("experiment.toml", "recording", "metrics.jsonl", "state", "clients", "truth"),
        *("reconstructions", "scores.jsonl", "pairs", "report.html"),
    }
)
"""All that fedsim and attacker write into a run, beside files that a crash left half written."""
SHARED_FOLDERS = ("recording", "reconstructions")
"""What the server and the scorer of a deployment on one machine share with the attacker's folder, through links."""
KINDS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_run(folder: Path) -> None:
    """Raise DamagedFile, naming the path and the mend, for the first thing in a run that `find_foreign` finds."""
    for error in find_foreign(folder):
        raise error


def find_foreign(folder: Path) -> Iterator[DamagedFile]:
    """Yield an error for each link, pipe, socket, device and file with several names in a run or a recording.

    The links that `fedsim prepare` makes between the folders of a deployment are none of them. In a folder that is neither a run
    nor a recording, such as one that reconstructions were written to, only what commands read or write is looked at.
    """
    try:
        with opened_folder(folder) as at:
            names = os.listdir(at)
            if not {"recording", "manifest.json", "attack.json"}.intersection(names):
                names = [name for name in names if name in RUN_ENTRIES | RECORDING_ENTRIES]
            for name in sorted(names):
                target = _shared(folder, name, at)
                yield from _look(folder / name, name, at, 1) if target is None else _in_folder(*target)
    except (FileNotFoundError, NotADirectoryError):  # no run, as whoever reads it will say
        return
    except OSError as error:
        yield DamagedFile(folder, error.strerror or str(error))


def _shared(folder: Path, name: str, at: int) -> tuple[Path, Path] | None:
    """Return the target of a link that a deployment makes, and the deployment's folder; None for any other link."""
    try:
        led = os.readlink(name, dir_fd=at) if name in SHARED_FOLDERS else None
    except OSError:
        return None
    inner = Path("attacks", folder.resolve().name, name)
    root = folder.resolve().parent.parent
    return (root / inner, root) if led == f"../../{inner.as_posix()}" else None


def _in_folder(folder: Path, below: Path, depth: int = 1) -> Iterator[DamagedFile]:
    try:
        with opened_folder(folder, below=below) as at:
            yield from _inside(folder, at, depth)
    except FileNotFoundError:
        return
    except DamagedFile as error:
        yield error
    except OSError as error:
        yield DamagedFile(folder, error.strerror or str(error))


def _inside(folder: Path, at: int, depth: int) -> Iterator[DamagedFile]:
    for name in sorted(os.listdir(at)):
        yield from _look(folder / name, name, at, depth + 1)


def _look(path: Path, name: str, at: int, depth: int) -> Iterator[DamagedFile]:
    """Yield errors about one entry of the folder with descriptor `at`, and about all entries below it."""
    try:
        status = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:  # another process may write here
        return
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        if depth > MAX_DEPTH:
            yield DamagedFile(path, f"lies more than {MAX_DEPTH} folders deep, and no command writes there; remove it")
            return
        try:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        except OSError as error:
            yield DamagedFile(path, error.strerror or str(error))
            return
        try:
            yield from _inside(path, inner, depth)
        finally:
            os.close(inner)
    elif kind == stat.S_IFLNK:
        yield DamagedFile(path, f"is a symbolic link, which is not followed; {COPY_ADVICE}")
    elif kind != stat.S_IFREG:
        yield DamagedFile(path, f"is {KINDS.get(kind, 'no file')}, and no command makes one; remove it")
    else:
        try:
            check_status(status)
        except ValueError as error:
            yield DamagedFile(path, str(error))
