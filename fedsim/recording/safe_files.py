"""Opens files of a recording that may come from anywhere: no links, no devices, nothing of absurd size."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

SPARSE_BYTES = 1 << 20
"""Files of fewer bytes may be as hollow as they like."""
HOLLOW = 64
"""How many times larger than its space on disk a file may be; a compressing file system does not get there with weights."""
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What no name in a recording holds: it could forge lines, or steer the terminal that shows it."""


class DamagedFile(ValueError):
    """A file of a recording that is missing, not what its index says, or nothing that a recorder writes.

    path: of the file. reason: in a few words.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(str(path), reason)
        self.path, self.reason = Path(path), reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@contextmanager
def opened(folder: Path, name: str, *, limit: int) -> Iterator[FileIO]:
    """Open the regular file `name`, with '/' between folders, below `folder` for reading.

    No link is followed below `folder`, which itself may be reached through one, and no '..' out of it.
    Raises DamagedFile where there is no such file, where it has more than `limit` bytes, or consists of holes.
    """
    path = folder / name
    try:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ValueError("is no plain path below its folder")
        with ExitStack() as stack:
            at = _descriptor(stack, folder, os.O_DIRECTORY)
            *outer, last = name.split("/")
            for part in outer:
                at = _descriptor(stack, part, os.O_DIRECTORY | os.O_NOFOLLOW, at)
            descriptor = _descriptor(stack, last, os.O_NOFOLLOW | os.O_NONBLOCK, at)
            _check(descriptor, limit)
            yield FileIO(descriptor, closefd=False)
    except OSError as error:
        raise DamagedFile(path, _words(error)) from None
    except DamagedFile:
        raise
    except ValueError as error:
        raise DamagedFile(path, str(error)) from None


def read_bytes(folder: Path, name: str, *, limit: int) -> bytes:
    """The content of a small file, at most `limit` bytes. Raises DamagedFile as `opened` does."""
    with opened(folder, name, limit=limit) as file:
        content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"has more than {limit} bytes, and none that was written by a recorder has")
        return content


def read_exactly(file: FileIO, into: memoryview) -> None:
    """Fill `into`. Raises ValueError where the file ends before."""
    while into:
        done = file.readinto(into)
        if not done:
            raise ValueError("ends before its end")
        into = into[done:]


def parse_json(text: str | bytes) -> Any:
    """Plain JSON. Raises ValueError for anything else: a key given twice, NaN, an infinity, or absurd nesting."""
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested beyond any reason") from None


def shorten(value: object, length: int = 80) -> str:
    """`value` as Python writes it, cut off where it is long: what comes from a file must not fill the screen."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def _descriptor(stack: ExitStack, path: Path | str, flags: int, at: int | None = None) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=at)
    stack.callback(os.close, descriptor)
    return descriptor


def _check(descriptor: int, limit: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is no regular file")
    if status.st_size > limit:
        raise ValueError(f"has {status.st_size} bytes, and at most {limit} are read")
    stored = 512 * status.st_blocks
    if status.st_size > max(SPARSE_BYTES, HOLLOW * stored) and _has_holes(descriptor, status.st_size):
        raise ValueError(f"is hollow: {status.st_size} bytes, of which {stored} are on disk")


def _has_holes(descriptor: int, size: int) -> bool:
    """Asked beside the blocks, which some network file systems do not count."""
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return hole < size


def _words(error: OSError) -> str:
    match error.errno:
        case errno.ELOOP:
            return "is a symbolic link, which is not followed"
        case errno.ENOTDIR:
            return "does not lie in folders of its own; symbolic links are not followed"
    return error.strerror or str(error)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise ValueError(f"{shorten(text)} is too large a number")
    return value
