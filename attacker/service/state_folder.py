"""The service's state folder, by default `.attacker`, with token, sessions and queue, and the check whether to trust it.

Runs come from archives and from other users of the machine. A `.attacker` folder among them could hold a token that somebody
else knows, or jobs that somebody else wrote. The folder must therefore belong to this user, be closed to everyone else, contain
neither links nor special files, and contain the marker file that the service writes into a new or empty folder. The marker holds
the folder's inode number, which differs in a copy or an unpacked archive. `--adopt-state` marks a folder that the user declares
to be trustworthy. Systems without POSIX owners and modes are not checked.
"""

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path

MARK_FILE = "made-by-the-service.json"
OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
STATE_ADVICE = (
    "delete the state folder, which loses the token, the sessions, the queue and the verdicts of audits, or give another one "
    "with --state"
)
"""Advice for a state folder that is not trusted, used in error messages."""
MAX_MARK_BYTES = 1000
"""Largest size in bytes of a marker file that is read."""


def claim_folder(folder: Path, *, adopt: bool = False) -> Path:
    """Create `folder`, or check that the service created it before or that it is empty, and return it.

    adopt: replace a missing or wrong marker, because the user says that the folder is trustworthy: an earlier version wrote it,
           or they moved it.
    Raises ValueError, with a remedy, for a folder that somebody else may have created, filled or replaced. Systems without POSIX
    owners and modes are not checked.
    """
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name != "posix":  # other systems have no POSIX owners and modes
        return folder
    _check_parent(folder.parent)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | OPEN_FLAGS)
    except OSError as error:
        raise ValueError(
            f"{folder} is not trusted, since it must be a folder and no link, and cannot be opened: {error.strerror}; "
            f"{STATE_ADVICE}"
        ) from None
    try:
        _check_entry(folder, os.fstat(descriptor))
        is_marked = _read_mark(descriptor) == os.fstat(descriptor).st_ino
        if adopt and not is_marked:
            _check_tree(folder)
            with suppress(FileNotFoundError):
                os.unlink(MARK_FILE, dir_fd=descriptor)
            _write_mark(descriptor)
        elif not os.listdir(descriptor):
            _write_mark(descriptor)
        if _read_mark(descriptor) != os.fstat(descriptor).st_ino:
            raise ValueError(
                f"{folder} is not trusted, since it was copied, unpacked or made by an earlier version; if it is your own, add "
                f"--adopt-state, and otherwise {STATE_ADVICE}"
            )
        _check_tree(folder)
    finally:
        os.close(descriptor)
    return folder


def read_private(path: Path, limit: int) -> bytes:
    """Return the first `limit` bytes of a regular file, or all if it is shorter. Links are not followed.

    Raises FileNotFoundError if there is no such file, and ValueError if it cannot be opened, is a link, has a second name (a hard
    link), is no regular file or, on POSIX systems, belongs to another user or is accessible to others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ValueError(f"{path} cannot be opened: {reason}; move it away, and the service writes a new one") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is a folder or a device, not a regular file; move it away, and the service writes a new file")
    if status.st_nlink > 1:
        os.close(descriptor)
        raise ValueError(
            f"{path} is not trusted, since this file has {status.st_nlink} names (hard links); move it away, and the service "
            "writes a new one"
        )
    with os.fdopen(descriptor, "rb") as file:
        if os.name == "posix" and status.st_mode & 0o077:
            raise ValueError(
                f"{path} is open to other users; run chmod 600 {path}, or delete it, and the service writes a new one"
            )
        if os.name == "posix" and status.st_uid != os.geteuid():
            raise ValueError(
                f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}; delete it, and the service writes a new one"
            )
        return file.read(limit)


def _check_parent(parent: Path) -> None:
    mode = os.stat(parent).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ValueError(f"{parent} can be changed by every user of this machine: chmod o-w {parent}, or give --state elsewhere")


def _check_entry(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ValueError(
            f"{path} is not trusted, since it belongs to user {status.st_uid}, and the service runs as user {os.geteuid()}; "
            f"{STATE_ADVICE}"
        )
    if stat.S_ISDIR(status.st_mode):
        if status.st_mode & 0o077:
            raise ValueError(
                f"{path} is not trusted, since its mode {stat.S_IMODE(status.st_mode):o} lets other users into this folder; "
                f"{STATE_ADVICE}"
            )
    elif not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not trusted, since it is a link or a device, not a file or folder; {STATE_ADVICE}")
    elif status.st_nlink > 1:
        raise ValueError(f"{path} is not trusted, since this file has {status.st_nlink} names (hard links); {STATE_ADVICE}")


def _check_tree(folder: Path) -> None:
    for where, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            path = Path(where) / name
            try:
                status = os.lstat(path)
            except FileNotFoundError:  # a service that is ending removes its files
                continue
            _check_entry(path, status)


def _write_mark(folder: int) -> None:
    try:
        descriptor = os.open(MARK_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600, dir_fd=folder)
    except FileExistsError:  # another service starts at the same time
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps({"inode": os.fstat(folder).st_ino}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _read_mark(folder: int) -> int | None:
    try:
        descriptor = os.open(MARK_FILE, os.O_RDONLY | OPEN_FLAGS, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            inode = json.loads(file.read(MAX_MARK_BYTES))["inode"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    return inode if isinstance(inode, int) else None
