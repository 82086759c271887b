"""Safe access to files of a run from an untrusted source: links are not followed, devices refused, and sizes limited.

Folders are opened one by one through descriptors, so that a folder cannot be replaced by a link between a check and its use.
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

from safetensors import SafetensorError, safe_open

SPARSE_BYTES = 1 << 20
"""Size in bytes below which files may be sparse to any degree."""
MAX_SPARSE_RATIO = 64
"""Largest ratio of a file's size to its space on disk; compressing file systems stay below it for weights."""
UNPRINTABLE_PATTERN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that names in a recording must not contain: they could forge lines or control the terminal."""
MAX_NUMBER = 2**53
"""Largest whole number that is accepted from a file; as a float, it is exact, too."""
MAX_JSON_BYTES = 64 * 2**20
"""Default limit of the size of a JSON document, in bytes."""
WHOLE_ADVICE = "copy the run again"
"""Advice for files that are missing or cut off, used in error messages."""
COPY_ADVICE = "copy the run without its links, with cp -rL, if you trust what they lead to"
"""Advice for symbolic links, used in error messages."""
SIZE_ADVICE = "check that fedleak wrote this file, or copy it again"
"""Advice for a file that is too large, used in error messages."""


class DamagedFile(ValueError):
    """Error for a file of a run or recording that is missing, damaged, or refused, such as a link.

    path: path of the file. reason: what is wrong, as the rest of a sentence that begins with the path.
    """

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(str(path), reason)
        self.path, self.reason = Path(path), reason

    def __str__(self) -> str:
        return f"{to_printable(str(self.path))}: {self.reason}"


def to_printable(text: str) -> str:
    """Return `text`, such as the name of a file, with a question mark for each control character that could steer a terminal."""
    return UNPRINTABLE_PATTERN.sub("?", text)


@contextmanager
def name_errors(path: Path | str) -> Iterator[None]:
    """Set the file name of OSErrors raised within the `with` block to `path`, unless they name an absolute path.

    Errors of descriptors name no file, and errors of functions with `dir_fd` name only the last part of the path.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and not (isinstance(error.filename, str) and os.path.isabs(error.filename)):
            error.filename = str(path)
        raise


@contextmanager
def open_file(folder: Path, name: str, *, limit: int) -> Iterator[FileIO]:
    """Open a regular file for reading bytes within a `with` block. name: path relative to `folder`, with '/' between folders.

    Links below `folder` are not followed, and '..' is not allowed; `folder` itself may be reached through a link.
    Raises DamagedFile if there is no such file, or it has more than `limit` bytes or several names (hard links), or is mostly
    holes: sparse, above `SPARSE_BYTES`, and above `MAX_SPARSE_RATIO` times its space on disk. A ValueError or OSError that is
    raised within the block becomes a DamagedFile for this file, unless it is a DamagedFile already.
    """
    path = folder / name
    try:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ValueError("is not a plain path below its folder: it must not contain '.', '..' or empty parts")
        with open_folder(path.parent, below=folder) as at, ExitStack() as stack:
            descriptor = _open_descriptor(stack, path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, at)
            _check(descriptor, limit)
            yield FileIO(descriptor, closefd=False)
    except OSError as error:
        raise DamagedFile(path, _describe_reason(error)) from None
    except DamagedFile:
        raise
    except ValueError as error:
        raise DamagedFile(path, str(error)) from None


@contextmanager
def open_folder(folder: Path, *, below: Path | None = None, make: bool = False) -> Iterator[int]:
    """Open `folder` as a descriptor, for functions that take `dir_fd`, within a `with` block.

    below: folder below which links are not followed; `folder` or one above it, by default `folder`. `below` itself may be a link.
    make:  whether to create `below`, `folder` and folders between them, if missing, with access for their owner only. Missing
           folders above `below` are created with usual permissions.
    Raises DamagedFile if a part of the path below `below` is a link or not a folder, ValueError if `folder` is not below `below`
    or contains '..' there, and OSError as `os.open` does.
    """
    below = folder if below is None else below
    inner = _split_below(folder, below)
    if make and not below.exists():
        below.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        at, path = _open_descriptor(stack, below, os.O_RDONLY | os.O_DIRECTORY), below
        for part in inner:
            path /= part
            if make:
                with suppress(FileExistsError), name_errors(path):
                    os.mkdir(part, 0o700, dir_fd=at)
            try:
                with name_errors(path):
                    at = _open_descriptor(stack, part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, at)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                raise DamagedFile(path, _describe_reason(error)) from None
        yield at


def open_to_write(name: str, at: int, flags: int, path: Path) -> int:
    """Open the file `name` in the folder with descriptor `at`, create it if it does not exist, and return a descriptor.

    flags: flags of `os.open` that are added, with at least os.O_RDWR or os.O_WRONLY. path: path of the file, for messages.
    Raises DamagedFile for a symbolic or hard link, and for anything but a regular file.
    """
    try:
        with name_errors(path):
            descriptor = os.open(name, os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise DamagedFile(path, "is not a regular file" if error.errno != errno.ELOOP else _describe_reason(error)) from None
    try:
        check_status(os.fstat(descriptor))
    except ValueError as error:
        os.close(descriptor)
        raise DamagedFile(path, str(error)) from None
    return descriptor


def check_status(status: os.stat_result) -> None:
    """Raise ValueError if the file with this status is not a regular file, or has several names (hard links)."""
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is not a regular file")
    if status.st_nlink > 1:
        raise ValueError(
            f"is a hard link to a file with {status.st_nlink} names, some of which may be outside the run; if you trust it, copy "
            "the run with cp -r, which makes separate files"
        )


def read_bytes(folder: Path, name: str, *, limit: int) -> bytes:
    """Return the content of the file `name` in `folder`.

    Raises DamagedFile if it has more than `limit` bytes, or if `open_file` refuses it.
    """
    with open_file(folder, name, limit=limit) as file:
        content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"has more than {limit} bytes, the limit for this file; {SIZE_ADVICE}")
        return content


def read_json(path: Path, *, below: Path | None = None, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the parsed content of a JSON file.

    below: folder below which symbolic links on the way to `path` are not followed; by default the folder of `path`.
    Raises DamagedFile, naming the file, if it is missing, a link, larger than `limit` bytes, or not valid JSON; NaN and infinity
    are not valid.
    """
    try:
        below = below or path.parent
        return parse_json(read_bytes(below, path.relative_to(below).as_posix(), limit=limit))
    except DamagedFile:
        raise
    except json.JSONDecodeError as error:
        raise DamagedFile(path, f"is cut off or no valid JSON ({error}); {WHOLE_ADVICE}") from None
    except ValueError as error:
        raise DamagedFile(path, str(error)) from None


@contextmanager
def open_tensors(folder: Path, name: str, *, limit: int) -> Iterator[Any]:
    """Open a safetensors file within a `with` block, as `safetensors.safe_open` does, after the checks of `open_file`.

    folder, name, limit: as for `open_file`. Raises DamagedFile also if it is not a safetensors file, or if a tensor that is read
    within the block is not in it.
    """
    with open_file(folder, name, limit=limit) as file:
        try:
            with safe_open(f"/dev/fd/{file.fileno()}", framework="pt") as tensors:
                yield tensors
        except SafetensorError as error:
            raise ValueError(f"cannot be read as a safetensors file: {error}") from None


def is_count(value: object, minimum: int = 0) -> bool:
    """Return whether a value of a file is a whole number from `minimum` to `MAX_NUMBER`. True and False are none."""
    return type(value) is int and minimum <= value <= MAX_NUMBER


def read_exactly(file: FileIO, into: memoryview) -> None:
    """Read from a file until `into` is full. Raises ValueError if the file ends before that."""
    while into:
        done = file.readinto(into)
        if not done:
            raise ValueError("ends too early: it is truncated")
        into = into[done:]


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value that a JSON text stands for. Raises ValueError for invalid JSON, duplicate keys and deep nesting.

    finite: whether to raise ValueError also for NaN and infinity, which Python's JSON writes as NaN and Infinity, and for numbers
            too large for a float.
    """
    try:
        if not finite:
            return json.loads(text, object_pairs_hook=_check_distinct)
        return json.loads(text, object_pairs_hook=_check_distinct, parse_constant=_refuse_number, parse_float=_parse_finite)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply; no file of a run has more than a few levels") from None


def shorten(value: object, length: int = 80) -> str:
    """Return the repr of a value for error messages; after `length` characters the rest is replaced by "..."."""
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."


def _split_below(folder: Path, below: Path) -> tuple[str, ...]:
    """Return the names of the folders from `below` to `folder`. Raises ValueError if it is not below, or has '..'."""
    inner = PurePath(folder).relative_to(below).parts
    if ".." in inner:
        raise ValueError(f"{folder} is not a plain path below {below}: it must not contain '..'")
    return inner


def _open_descriptor(stack: ExitStack, path: Path | str, flags: int, at: int | None = None) -> int:
    """Open a path as a descriptor that `stack` closes. at: descriptor of the folder that a relative path starts from."""
    descriptor = os.open(path, os.O_CLOEXEC | flags, dir_fd=at)
    stack.callback(os.close, descriptor)
    return descriptor


def _check(descriptor: int, limit: int) -> None:
    """Raise ValueError if a file is not regular, has several names (hard links) or over `limit` bytes, or is mostly holes.

    Mostly holes: see `open_file`.
    """
    status = os.fstat(descriptor)
    check_status(status)
    if status.st_size > limit:
        raise ValueError(f"has {status.st_size} bytes, more than the limit of {limit}; {SIZE_ADVICE}")
    stored = 512 * status.st_blocks
    if status.st_size > max(SPARSE_BYTES, MAX_SPARSE_RATIO * stored) and _has_holes(descriptor, status.st_size):
        raise ValueError(
            f"has holes: of its {status.st_size} bytes, only {stored} are on disk, so that it may be incomplete; copy it again"
        )


def _has_holes(descriptor: int, size: int) -> bool:
    """Return whether SEEK_HOLE finds holes in a file of `size` bytes. Some network file systems do not count its blocks."""
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return hole < size


def _describe_reason(error: OSError) -> str:
    """Return why a file could not be opened, as text; if it is missing or a link, with advice what to do."""
    match error.errno:
        case errno.ENOENT:
            return f"is missing; {WHOLE_ADVICE}"
        case errno.ELOOP:
            return f"is a symbolic link, which is not followed; {COPY_ADVICE}"
        case errno.ENOTDIR:
            return f"is not a folder, or is a symbolic link, which is not followed; {COPY_ADVICE}"
    return error.strerror or str(error)


def _check_distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the JSON pairs. Raises ValueError for a duplicate key."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shorten(repeated)} occurs twice in one JSON object; give each key once")
    return values


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text} in a JSON text is not a valid number; give a finite number")


def _parse_finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise ValueError(f"{shorten(text)} is too large for a floating point number")
    return value
