"""Reader of NumPy archives (.npz) that are not trusted: declared sizes and types are checked before anything is decompressed."""

import os
import stat
from collections.abc import Iterable, Mapping
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedsim.recording.safe_files import UNPRINTABLE, shorten

MAX_BYTES = 16 * 2**30
"""Of all arrays that are read from one archive."""
MAX_ARRAYS = 100_000
MAX_RATIO = 300
"""How many times larger than in the archive an array may be, beyond `FREE_BYTES`: images of one colour do not get there."""
FREE_BYTES = 2**26
KINDS = {"b": "truth values", "i": "integers", "u": "integers", "f": "numbers", "U": "texts"}
"""Types that are read, by NumPy's letter. Complex numbers, times and objects are none of them."""


def read_arrays(path: Path, names: Iterable[str] | None = None, *, limit: int = MAX_BYTES) -> dict[str, NDArray[Any]]:
    """Read the arrays called `names` from an archive, by default all of them.

    Raises ValueError, naming the file, for what is no archive, is no regular file, lacks an array, claims sizes that the file
    does not have, or has more than `limit` bytes of arrays. FileNotFoundError where there is no file.
    """
    try:
        with open_regular(path) as file, ZipFile(file) as archive:
            entries = _entries(archive)
            chosen = list(entries) if names is None else list(names)
            if missing := [name for name in chosen if name not in entries]:
                raise ValueError(f"no array {missing[0]!r}; it holds {', '.join(entries) or 'none'}")
            _check_sizes([entries[name] for name in chosen], limit)
            return {name: _read(archive, entries[name], name) for name in chosen}
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except (BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:  # what zipfile makes of broken archives
        raise ValueError(f"{path}: not a NumPy archive (.npz): {error}") from None
    except (ValueError, MemoryError, OverflowError) as error:
        raise ValueError(_named(path, error)) from None


def names_of(path: Path) -> tuple[str, ...]:
    """Return the names of the arrays in an archive. Raises what `read_arrays` raises."""
    try:
        with open_regular(path) as file, ZipFile(file) as archive:
            return tuple(_entries(archive))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except (BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path}: not a NumPy archive (.npz): {error}") from None
    except ValueError as error:
        raise ValueError(_named(path, error)) from None


def _named(path: Path, error: Exception) -> str:
    words = str(error) or type(error).__name__
    return words if words.startswith(str(path)) else f"{path}: {words}"


def open_regular(path: Path) -> FileIO:
    """Open a file that the user named for reading; links are followed. Raises ValueError if it is no regular file.

    A pipe would be waited for, and a device may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is no regular file; copy its content into one")
    return FileIO(descriptor)


def read_text(path: Path, *, limit: int = 2**24) -> str:
    """The text of a small file that the user named, in UTF-8. Raises ValueError if it is larger or no regular file."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} has more than {limit} bytes, and no file of its kind has")
    return content.decode()


def check_sizes(file: FileIO, path: Path, *, limit: int = MAX_BYTES) -> None:
    """Raise ValueError where `file` is a zip archive, as PyTorch writes them, that claims more than it may; else do nothing."""
    try:
        with ZipFile(file) as archive:
            _check_sizes(archive.infolist(), limit)
    except BadZipFile:  # an older format of PyTorch's, not packed
        return
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _entries(archive: ZipFile) -> Mapping[str, ZipInfo]:
    found = archive.infolist()
    if len(found) > MAX_ARRAYS:
        raise ValueError(f"holds {len(found)} arrays, and at most {MAX_ARRAYS} are read")
    entries: dict[str, ZipInfo] = {}
    for entry in found:
        name = entry.filename.removesuffix(".npy")
        if name == entry.filename or not name or len(name) > 512 or UNPRINTABLE.search(name):
            raise ValueError(f"holds {shorten(entry.filename)}, which is no array; save it with numpy.savez")
        if name in entries:
            raise ValueError(f"holds two arrays called {shorten(name)}")
        entries[name] = entry
    return entries


def _check_sizes(entries: Iterable[ZipInfo], limit: int) -> None:
    total = 0
    for entry in entries:
        total += entry.file_size
        if entry.file_size > FREE_BYTES + MAX_RATIO * entry.compress_size:
            raise ValueError(
                f"{entry.filename} claims {entry.file_size} bytes, packed into {entry.compress_size}; save it with numpy.savez"
            )
    if total > limit:
        raise ValueError(f"its arrays claim {total} bytes, and at most {limit} are read")


def _read(archive: ZipFile, entry: ZipInfo, name: str) -> NDArray[Any]:
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"array {name!r} is of version {version} of NumPy's format, and 1 and 2 are read")
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if dtype.hasobject or dtype.kind not in KINDS:
            raise ValueError(f"array {name!r} is of {dtype}; give {', '.join(dict.fromkeys(KINDS.values()))}")
        needed, there = prod(shape) * dtype.itemsize, entry.file_size - file.tell()
        if any(length < 0 for length in shape) or needed != there:
            raise ValueError(
                f"array {name!r} of shape {shorten(shape)} and {dtype} takes {needed} bytes, and the file has {there}"
            )
        values = np.frombuffer(file.read(needed), dtype=dtype)  # no more than the entry's size, whatever is packed
        if file.read(1) or len(values) != prod(shape):
            raise ValueError(f"array {name!r} ends before its end")
        return values.reshape(shape, order="F" if fortran else "C").copy()
