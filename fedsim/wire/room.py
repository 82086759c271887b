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
        raise DiskFull(f"{folder}: {what} about {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free; make room, or {mend}")


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Turn the system's words for a full disk, and SQLite's, into ours."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT) and "disk is full" not in str(error):
            raise
        raise DiskFull(f"{folder}: the disk is full; whole rounds are kept: make room, and go on with --resume") from error
