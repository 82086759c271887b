"""Access to the files of a run that is not trusted: no links, no devices, no files of absurd size.

Folders are opened one after the other through descriptors, so that none can be exchanged for a link between check and use.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path, PurePath
from typing import Any

from safetensors import safe_open

SPARSE_BYTES = 1 << 20
"""Files of fewer bytes may be as hollow as they like."""
MAX_SPARSE_RATIO = 64
"""How many times larger than its space on disk a file may be; a compressing file system does not get there with weights."""
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What no name in a recording holds: it could forge lines, or steer the terminal that shows it."""
MAX_JSON_BYTES = 64 * 2**20
"""Bytes of the largest JSON document that is read where no other limit is given."""
COPY_ADVICE = "copy the run without its links, with cp -rL, if you trust what they lead to"
"""The mend for links of both kinds."""


class DamagedFile(ValueError):
    """A file of a recording that is missing, differs from its index, or was not written by a recorder.

    path: of the file. reason: a short message.
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
    Raises DamagedFile if there is no such file, where it has more than `limit` bytes, other names, or consists of holes.
    """
    path = folder / name
    try:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ValueError("is no plain path below its folder")
        with opened_folder(path.parent, below=folder) as at, ExitStack() as stack:
            descriptor = _descriptor(stack, path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, at)
            _check(descriptor, limit)
            yield FileIO(descriptor, closefd=False)
    except OSError as error:
        raise DamagedFile(path, _words(error)) from None
    except DamagedFile:
        raise
    except ValueError as error:
        raise DamagedFile(path, str(error)) from None


@contextmanager
def opened_folder(folder: Path, *, below: Path | None = None, make: bool = False) -> Iterator[int]:
    """Open `folder` as a descriptor, for functions that take `dir_fd`.

    below: the folder below which no link is followed; it may be reached through one itself. By default `folder`.
    make:  create folders that are missing, closed to everyone but their owner.
    Raises DamagedFile if a link, or anything else that is no folder, is in the way, and OSError as `os.open` does.
    """
    below = folder if below is None else below
    inner = _below(folder, below)
    if make and not below.exists():
        below.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        at, path = _descriptor(stack, below, os.O_RDONLY | os.O_DIRECTORY), below
        for part in inner:
            path /= part
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=at)
            try:
                at = _descriptor(stack, part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, at)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise DamagedFile(path, _words(error)) from None
        yield at


def open_to_write(name: str, at: int, flags: int, path: Path) -> int:
    """Open the regular file `name` in the folder with descriptor `at` for writing, and create it where it is not there.

    path: of the file, for messages. Raises DamagedFile for a link, for a file with another name, and for what is no file.
    """
    try:
        descriptor = os.open(name, os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise DamagedFile(path, "is no regular file" if error.errno != errno.ELOOP else _words(error)) from None
    try:
        check_status(os.fstat(descriptor))
    except ValueError as error:
        os.close(descriptor)
        raise DamagedFile(path, str(error)) from None
    return descriptor


def check_status(status: os.stat_result) -> None:
    """Raise ValueError if a file is not regular, or has a second name, which may lie anywhere."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is no regular file")
    if status.st_nlink > 1:
        raise ValueError(
            f"is a hard link to a file with {status.st_nlink} names, of which others may lie elsewhere; {COPY_ADVICE}"
        )


def read_bytes(folder: Path, name: str, *, limit: int) -> bytes:
    """Return the content of a small file, at most `limit` bytes. Raises what `opened` raises."""
    with opened(folder, name, limit=limit) as file:
        content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"has more than {limit} bytes, and none that was written by a recorder has")
        return content


def read_json(path: Path, *, limit: int = MAX_JSON_BYTES) -> Any:
    """Read a file of plain JSON. Raises DamagedFile, naming the file, as `opened` and `parse_json` do."""
    try:
        return parse_json(read_bytes(path.parent, path.name, limit=limit))
    except DamagedFile:
        raise
    except ValueError as error:
        raise DamagedFile(path, str(error)) from None


@contextmanager
def opened_tensors(path: Path, *, limit: int) -> Iterator[Any]:
    """Open a safetensors file with `safetensors.safe_open`. Raises DamagedFile, naming the file, if it is none."""
    with opened(path.parent, path.name, limit=limit) as file, safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as tensors:
        yield tensors


def read_exactly(file: FileIO, into: memoryview) -> None:
    """Fill `into`. Raises ValueError if the file ends before."""
    while into:
        done = file.readinto(into)
        if not done:
            raise ValueError("ends before its end")
        into = into[done:]


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse plain JSON. Raises ValueError for anything else: a key given twice, absurd nesting, NaN or an infinity.

    finite: False accepts NaN and infinities, as Python writes them.
    """
    try:
        if not finite:
            return json.loads(text, object_pairs_hook=_distinct)
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply; no file of a run has more than a few levels") from None


def shorten(value: object, length: int = 80) -> str:
    """Return the representation of `value`, cut off at `length`: values from a file must not fill the screen."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def _below(folder: Path, below: Path) -> tuple[str, ...]:
    """Return the names of the folders that lead from `below` to `folder`."""
    inner = PurePath(folder).relative_to(below).parts
    if ".." in inner:
        raise ValueError(f"{folder} is no plain path below {below}")
    return inner


def _descriptor(stack: ExitStack, path: Path | str, flags: int, at: int | None = None) -> int:
    descriptor = os.open(path, os.O_CLOEXEC | flags, dir_fd=at)
    stack.callback(os.close, descriptor)
    return descriptor


def _check(descriptor: int, limit: int) -> None:
    status = os.fstat(descriptor)
    check_status(status)
    if status.st_size > limit:
        raise ValueError(f"has {status.st_size} bytes, and at most {limit} are read")
    stored = 512 * status.st_blocks
    if status.st_size > max(SPARSE_BYTES, MAX_SPARSE_RATIO * stored) and _has_holes(descriptor, status.st_size):
        raise ValueError(f"is hollow: {status.st_size} bytes, of which {stored} are on disk")


def _has_holes(descriptor: int, size: int) -> bool:
    """Return whether a file is sparse, from its map of holes; some network file systems report wrong numbers of blocks."""
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return hole < size


def _words(error: OSError) -> str:
    match error.errno:
        case errno.ELOOP:
            return f"is a symbolic link, which is not followed; {COPY_ADVICE}"
        case errno.ENOTDIR:
            return f"is no folder, or a symbolic link, which is not followed; {COPY_ADVICE}"
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
