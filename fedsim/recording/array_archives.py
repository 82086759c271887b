"""Readers of files that the user names, with checks of size and type: NumPy archives (.npz), text and TOML."""

import os
import stat
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from math import prod
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedsim.recording.safe_files import UNPRINTABLE_PATTERN, shorten

MAX_TEXT_BYTES = 2**24
MAX_BYTES = 16 * 2**30
"""Default limit of the total size in bytes of the arrays that are read from one archive."""
MAX_ARRAYS = 100_000
MAX_RATIO = 300
"""Largest compression ratio of an array, apart from its first `FREE_BYTES`; images of one colour stay below it."""
FREE_BYTES = 2**26
READABLE_KINDS = {"b": "truth values", "i": "integers", "u": "integers", "f": "numbers", "U": "texts"}
"""Types of arrays that are read, by NumPy's letter. Complex numbers, times and objects are refused."""

BROKEN_ARCHIVE_ERRORS = (BadZipFile, EOFError, NotImplementedError, OSError, RuntimeError, TokenError, zlib.error)
"""Errors that Python's zipfile and NumPy's reader of headers raise for damaged archives."""


def read_arrays(
    path: Path, names: Iterable[str] | None = None, *, limit: int = MAX_BYTES, kinds: str = "".join(READABLE_KINDS)
) -> dict[str, NDArray[Any]]:
    """Return a dict from name to array of the arrays called `names` in a NumPy archive (.npz), by default of all.

    limit: largest size of these arrays in bytes, together, when unpacked. kinds: the types that are read, as letters of
    `READABLE_KINDS`.
    Raises ValueError, naming the file, if it is no regular file or no NumPy archive, lacks one of the arrays, or if one of the
    arrays is damaged, too large, or of a type that is refused, such as objects. Raises FileNotFoundError if the file does not
    exist.
    """
    with _open_archive(path) as archive:
        entries = _list_entries(archive)
        chosen = list(entries) if names is None else list(names)
        if missing := [name for name in chosen if name not in entries]:
            raise ValueError(f"no array {missing[0]!r}; it holds {', '.join(entries) or 'none'}")
        _check_sizes([entries[name] for name in chosen], limit)
        return {name: _read(archive, entries[name], name, kinds) for name in chosen}


def read_names(path: Path) -> tuple[str, ...]:
    """Return the names of the arrays in a NumPy archive (.npz).

    Raises ValueError, naming the file, if it is no regular file or no NumPy archive, and FileNotFoundError if it does not exist.
    """
    with _open_archive(path) as archive:
        return tuple(_list_entries(archive))


@contextmanager
def _open_archive(path: Path) -> Iterator[ZipFile]:
    """Open a NumPy archive (.npz), and turn errors in reading it into ValueError or FileNotFoundError that names the file."""
    try:
        with open_regular(path) as file, ZipFile(file) as archive:
            yield archive
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except PermissionError:
        raise
    except BROKEN_ARCHIVE_ERRORS as error:
        raise ValueError(f"{path}: not a NumPy archive (.npz): {error}") from None
    except (ValueError, MemoryError, OverflowError) as error:
        message = str(error) or type(error).__name__
        raise ValueError(message if message.startswith(str(path)) else f"{path}: {message}") from None


def open_regular(path: Path) -> FileIO:
    """Return a regular file opened for reading bytes; links are followed.

    Raises ValueError for a folder, pipe or device, and OSError, such as FileNotFoundError, if the file cannot be opened.
    Pipes are refused because reading them would block, and devices because they may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file; copy its content into one")
    return FileIO(descriptor)


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file that the user named.

    Raises ValueError if it has more than `MAX_TEXT_BYTES` bytes, is not a regular file, or is not valid UTF-8, and OSError if it
    cannot be opened.
    """
    with open_regular(path) as file:
        content = file.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise ValueError(f"{path} has more than {MAX_TEXT_BYTES} bytes, the limit for such files; name another file")
    return content.decode()


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file that the user named, as a dict.

    Raises ValueError, naming the file, if it is not a regular file, too large, or not valid TOML, and OSError, such as
    FileNotFoundError, if it cannot be opened.
    """
    try:
        return tomllib.loads(read_text(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a TOML file: its byte {error.start + 1} is not UTF-8; name a text file") from None
    except RecursionError:
        raise ValueError(f"{path}: not a TOML file: it is nested too deeply; settings have only a few levels") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None


def check_sizes(file: FileIO, path: Path, *, limit: int) -> None:
    """Raise ValueError for a zip archive, such as torch.save writes, whose entries claim over `limit` bytes when unpacked.

    Also raises ValueError if an entry claims more than `FREE_BYTES` plus `MAX_RATIO` times its compressed size. A file that is
    not a zip archive is not checked. path: path of `file`, for messages.
    """
    try:
        with ZipFile(file) as archive:
            _check_sizes(archive.infolist(), limit)
    except BadZipFile:  # an older format of PyTorch, which is no ZIP archive
        return
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _list_entries(archive: ZipFile) -> Mapping[str, ZipInfo]:
    """Return a dict from the name of each array to its entry in the archive.

    Raises ValueError if an entry is not called `NAME.npy`, with a printable NAME of 1 to 512 characters, if two have the same
    name, or if there are more than `MAX_ARRAYS`.
    """
    members = archive.infolist()
    if len(members) > MAX_ARRAYS:
        raise ValueError(f"holds {len(members)} arrays, but at most {MAX_ARRAYS} are read")
    entries: dict[str, ZipInfo] = {}
    for entry in members:
        name = entry.filename.removesuffix(".npy")
        if name == entry.filename or not name or len(name) > 512 or UNPRINTABLE_PATTERN.search(name):
            raise ValueError(f"holds {shorten(entry.filename)}, which is not an array; save it with numpy.savez")
        if name in entries:
            raise ValueError(f"holds two arrays called {shorten(name)}")
        entries[name] = entry
    return entries


def _check_sizes(entries: Iterable[ZipInfo], limit: int) -> None:
    """Raise ValueError if the entries together claim over `limit` bytes when unpacked, or one is compressed too much.

    Too much: it claims more than `FREE_BYTES` plus `MAX_RATIO` times its compressed size.
    """
    total = 0
    for entry in entries:
        total += entry.file_size
        if entry.file_size > FREE_BYTES + MAX_RATIO * entry.compress_size:
            raise ValueError(
                f"{entry.filename} claims {entry.file_size} bytes, packed into {entry.compress_size}, a compression ratio that "
                "is refused; save it uncompressed, as numpy.savez does"
            )
    if total > limit:
        raise ValueError(f"its arrays claim {total} bytes, more than the limit of {limit}; save fewer or smaller ones")


def _read(archive: ZipFile, entry: ZipInfo, name: str, kinds: str) -> NDArray[Any]:
    """Return a copy of one array of the archive. entry: its entry in the archive. name: its name, for messages.

    kinds: as in `read_arrays`.
    Raises ValueError if its type or version of NumPy's format is refused, or its size differs from what its header says.
    """
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(
                f"array {name!r} has version {'.'.join(map(str, version))} of NumPy's format, but only versions 1.0 and 2.0 are "
                "read; save it without named fields (structured type)"
            )
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject or dtype.kind not in kinds:
            expected = dict.fromkeys(READABLE_KINDS[kind] for kind in kinds)
            raise ValueError(f"array {name!r} has type {dtype}; give {', '.join(expected)}")
        needed, there = prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if any(length < 0 for length in shape) or needed != there:
            raise ValueError(
                f"array {name!r} of shape {shorten(shape)} and type {dtype} takes {needed} bytes, but its entry in the archive "
                f"has {there}; save the archive again with numpy.savez"
            )
        # reads at most the size that the entry states, whatever the archive contains
        values = np.frombuffer(file.read(needed), dtype=dtype)
        if file.read(1) or len(values) != prod(shape):
            raise ValueError(f"array {name!r} is truncated")
        return values.reshape(shape, order="F" if fortran else "C").copy()
