"""Room on the disk: asked for before a round, explained when it runs out in the middle of one."""

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPARE = 20_000_000
"""Bytes that are left to everything else on the disk."""


class DiskFull(RuntimeError):
    """No room for what a federation would write."""


def check_room(folder: Path, needed: int, what: str, mend: str) -> None:
    """Raises DiskFull, saying `what` needs so many bytes, where they do not fit beside `folder`."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed + SPARE:
        raise DiskFull(
            f"{folder}: {what} about {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free, of which "
            f"{SPARE / 1e6:,.0f} MB are left to others; make room, or {mend}"
        )


def is_full_disk(words: str) -> bool:
    """Whether an error's words, as they also come back from a client, are those of a full disk or a used-up quota."""
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
