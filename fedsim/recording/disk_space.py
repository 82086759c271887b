"""Checks of free disk space before each round, and the message when a disk is full."""

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPARE_BYTES = 20_000_000
"""Bytes that are left to everything else on the disk."""


class DiskFull(RuntimeError):
    """Raised where the disk has no room for what a federation would write."""


def check_room(folder: Path, needed: int, what: str, mend: str) -> None:
    """Raise DiskFull, with `what` and `mend` in the message, where `needed` bytes do not fit on the disk of `folder`."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed + SPARE_BYTES:
        raise DiskFull(
            f"{folder}: {what} about {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free, of which "
            f"{SPARE_BYTES / 1e6:,.0f} MB are left to others; make room, or {mend}"
        )


def is_full_disk(words: str) -> bool:
    """Return whether an error message, which may come from a client, is about a full disk or an exceeded quota."""
    return any(f"[Errno {code}]" in words for code in (errno.ENOSPC, errno.EDQUOT)) or "disk is full" in words


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Turn the system's words for a full disk, and SQLite's, into ours."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if not is_full_disk(str(error)):
            raise
        raise DiskFull(f"{folder}: the disk is full; whole rounds are kept: make room, and go on with --resume") from error
