"""Files of a run: locks, atomic writes with access for the owner only, JSON lines and safetensors.

`below` is the folder below which symbolic links are not followed, usually that of the run.
"""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedsim.recording.safe_files import (
    DamagedFile,
    name_errors,
    open_file,
    open_folder,
    open_to_write,
    parse_json,
    read_bytes,
    shorten,
)

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Tensor types that can be written, with their names in the safetensors format."""
LARGE_BYTES = 1_000_000
"""Size in bytes above which a written file is dropped from the page cache, which makes writing many updates faster."""
CHUNK_BYTES = 1 << 16
MAX_LINES_BYTES = 2 * 2**30
"""Largest size in bytes of a file of JSON lines that is read."""
MAX_LINE_BYTES = 2**24
"""Largest length in bytes of one JSON line."""


@contextmanager
def hold_lock(path: Path, *, below: Path | None = None, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, which is created if needed, within a `with` block.

    below: folder below which symbolic links on the way to `path` are not followed; by default the folder of `path`.
    wait: whether to wait while another process holds the lock. If it is False, ValueError is raised then.
    On Windows, nothing is locked.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open_folder(path.parent, below=below) as folder:
        descriptor = open_to_write(path.name, folder, os.O_RDWR, path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise ValueError(f"{path.parent}: another process is working there; wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(descriptor)


def make_private(folder: Path, *, below: Path | None = None) -> Path:
    """Create `folder` with access for its owner only, and return its path. An existing folder keeps its permissions.

    below: folder below which symbolic links on the way to `folder` are not followed; by default `folder` itself.
    """
    with open_folder(folder, below=below, make=True):
        return folder


@contextmanager
def open_replacement(path: Path, *, below: Path | None = None, settle: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for writing bytes within a `with` block. At the end it is flushed to disk and renamed to `path`.

    If the block raises an error, the file is removed, and `path` stays as it was. Only the owner can read the file.
    Raises ValueError if `path` is a folder, a link, a device or another special file, such as /dev/null: it is not replaced.

    below:  folder below which symbolic links on the way to `path` are not followed; by default the folder of `path`.
    settle: whether to fsync the folder, too, so that the new file name survives a crash of the machine.
            After writing many files to one folder, call `flush(folder)` once instead.
    """
    beside = f".{path.name}.{os.getpid()}.partial"
    with name_errors(path), open_folder(path.parent, below=below) as folder:
        if not path.name or not _is_replaceable(path.name, folder):
            raise ValueError(f"{path} is a folder, a link or a device, which is not replaced; name another file")
        with suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=folder)
        descriptor = open_to_write(beside, folder, os.O_RDWR | os.O_EXCL, path.with_name(beside))
        try:
            with os.fdopen(descriptor, "w+b") as file:
                os.fchmod(descriptor, 0o600)  # independent of the umask
                yield file
                file.flush()
                _flush_and_drop(descriptor)
            os.replace(beside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if settle:
                os.fsync(folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=folder)


def _is_replaceable(name: str, folder: int) -> bool:
    """Return whether a name in the folder with this descriptor is free, or that of a regular file."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _flush_and_drop(descriptor)
    finally:
        os.close(descriptor)


def _flush_and_drop(descriptor: int) -> None:
    """Flush a file to disk and, if it is larger than `LARGE_BYTES`, drop it from the page cache where the system can."""
    os.fsync(descriptor)
    if os.fstat(descriptor).st_size > LARGE_BYTES and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: Path, *, below: Path | None = None) -> None:
    """Delete a file if it exists. A link is deleted, but not its target. below: as in `hold_lock`."""
    with suppress(FileNotFoundError), name_errors(path), open_folder(path.parent, below=below) as folder:
        os.unlink(path.name, dir_fd=folder)


def write_bytes(path: Path, content: bytes, *, below: Path | None = None, settle: bool = True) -> None:
    """Write `content` to `path` atomically. below, settle: see `open_replacement`."""
    with open_replacement(path, below=below, settle=settle) as file:
        file.write(content)


def write_json(path: Path, value: Any, *, below: Path | None = None) -> None:
    """Write `value` as indented JSON to `path` atomically. below: see `open_replacement`.

    Raises ValueError for NaN and infinity.
    """
    write_bytes(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n", below=below)


def to_json_lines(*values: Any) -> bytes:
    """Return JSON lines as bytes: one line of JSON per value. Raises ValueError for NaN and infinity."""
    return b"".join(json.dumps(value, allow_nan=False).encode() + b"\n" for value in values)


def append_json_lines(path: Path, *values: Any, below: Path | None = None) -> None:
    """Append one line of JSON per value to the file `path`, which is created if needed, and flush it to disk.

    An incomplete last line, left by a crash, is removed first. below: as in `hold_lock`.
    """
    with open_folder(path.parent, below=below) as folder:
        descriptor = open_to_write(path.name, folder, os.O_RDWR | os.O_APPEND, path)
    with name_errors(path), os.fdopen(descriptor, "ab+") as file:
        if (size := file.seek(0, os.SEEK_END)) == 0:
            os.fchmod(descriptor, 0o600)  # independent of the umask
        elif (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.truncate(_find_last_break(file, size))
        file.write(to_json_lines(*values))
        file.flush()
        os.fsync(descriptor)


def update_json_lines(path: Path, is_stale: Callable[[bytes], bool], *values: Any, below: Path | None = None) -> None:
    """Replace the stale lines of a file of JSON lines by one line per value, and keep all other complete lines byte by byte.

    Without stale lines, the values are appended; without values either, the file stays as it is. is_stale: function from a line,
    with its line break, to whether it is removed. below: as in `hold_lock`.
    """
    content = read_bytes(path.parent, path.name, limit=MAX_LINES_BYTES) if os.path.lexists(path) else b""
    lines = [line + b"\n" for line in content.split(b"\n")[:-1]]
    kept = [line for line in lines if not is_stale(line)]
    if len(kept) < len(lines):
        write_bytes(path, b"".join(kept) + to_json_lines(*values), below=below)
    elif values:
        append_json_lines(path, *values, below=below)


def _find_last_break(file: BinaryIO, size: int) -> int:
    """Return the position after the last line break in a file of `size` bytes; 0 if there is none.

    The file is read from its end, `CHUNK_BYTES` bytes at a time.
    """
    for start in range(size - size % CHUNK_BYTES, -1, -CHUNK_BYTES):
        file.seek(start)
        if (at := file.read(min(CHUNK_BYTES, size - start)).rfind(b"\n")) >= 0:
            return start + at + 1
    return 0


def replace_json_lines(path: Path, *values: Any) -> None:
    """Replace the content of `path` atomically by the values, as JSON with one line per value."""
    write_bytes(path, to_json_lines(*values))


def read_json_lines(path: Path, advice: str = "copy the file again") -> list[dict[str, Any]]:
    """Return the JSON objects in a file of JSON lines as dicts, one per line; [] if the file does not exist.

    An incomplete last line, left by a crash, and empty lines are ignored. Raises DamagedFile, naming the file, if a line is not a
    valid JSON object or has more than `MAX_LINE_BYTES` bytes, or the file is a link or too large.
    advice: end of the message for an invalid line: what the user can do.
    """
    if not os.path.lexists(path):
        return []
    rows: list[dict[str, Any]] = []
    with open_file(path.parent, path.name, limit=MAX_LINES_BYTES) as file:
        lines = BufferedReader(file)
        while (line := lines.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
            if line == b"\n":
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise DamagedFile(path, f"row {len(rows) + 1} cannot be read: {error}; {advice}") from None
            if not isinstance(row, dict):
                raise DamagedFile(path, f"row {len(rows) + 1} must be a JSON object, got {shorten(row)}; {advice}")
            rows.append(row)
        if len(line) > MAX_LINE_BYTES:
            raise DamagedFile(path, f"row {len(rows) + 1} has more than {MAX_LINE_BYTES} bytes; {advice}")
    return rows


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    below: Path | None = None,
    settle: bool = True,
) -> str:
    """Write tensors by name to `path` atomically in the safetensors format. Return the SHA-256 of the file in hexadecimal.

    metadata: texts by name for the header. below, settle: see `open_replacement`.
    Raises ValueError for a tensor of a type that is not in `DTYPES`.
    """
    digest = hashlib.sha256()
    with open_replacement(path, below=below, settle=settle) as file, ThreadPoolExecutor(1) as other:
        for part in _serialise_tensors(tensors, metadata or {}):
            if len(part) < LARGE_BYTES:
                digest.update(part)
                file.write(part)
            else:  # hashing and writing release the GIL, so they run in parallel
                hashed = other.submit(digest.update, part)
                file.write(part)
                hashed.result()
    return digest.hexdigest()


def _serialise_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file: the header with its length, then the bytes of each tensor that is not empty.

    Raises ValueError for a type that is not in `DTYPES`.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"tensor {name!r} has type {tensor.dtype}, which cannot be written; use one of {', '.join(map(str, DTYPES))}"
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    described = json.dumps(header, separators=(",", ":")).encode()
    described += b" " * (-len(described) % 8)
    yield len(described).to_bytes(8, "little") + described
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
