"""Checks of free disk space before a federation writes, and readable errors if the disk becomes full."""

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPARE_BYTES = 20_000_000
"""Bytes that must stay free for other programs."""


class DiskFull(RuntimeError):
    """Error for a disk with too little space for what a federation writes."""


def check_room(folder: Path, needed: int, what: str, mend: str) -> None:
    """Raise DiskFull if writing `needed` bytes to the disk of `folder` would leave less than `SPARE_BYTES` free.

    what: beginning of the message, subject and verb, such as "the run writes". mend: end of the message: what the user can do
          instead of freeing space.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed + SPARE_BYTES:
        raise DiskFull(
            f"{folder}: {what} about {needed / 1e6:,.1f} MB, but only {free / 1e6:,.1f} MB are free, of which "
            f"{SPARE_BYTES / 1e6:,.0f} MB are reserved for other programs; free disk space, or {mend}"
        )


def is_full_disk(message: str) -> bool:
    """Return whether the text of an error, possibly sent by a client, is about a full disk or an exceeded quota."""
    return any(f"[Errno {code}]" in message for code in (errno.ENOSPC, errno.EDQUOT)) or "disk is full" in message


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    """Replace errors of the operating system or SQLite about a full disk, raised in a `with` block, by DiskFull with advice."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if not is_full_disk(str(error)):
            raise
        raise DiskFull(
            f"{folder}: the disk is full; complete rounds are kept: free disk space, and continue with --resume"
        ) from error
