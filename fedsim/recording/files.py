"""Writers of files that appear whole or not at all, and can be read by their owner only.

The argument `below` names the folder below which no symbolic link is followed, by default the folder of the file itself. For
files of a run it is the folder of the run.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fedsim.recording.safe_files import DamagedFile, open_to_write, opened, opened_folder, parse_json

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
"""Types of a tensor that can be written, and their names in the safetensors format."""
LARGE_BYTES = 1_000_000
"""Files of so many bytes are let go from memory once they are on disk: fresh pages for each update cost more than writing it."""
MAX_LINES_BYTES = 2 * 2**30
"""Bytes of the largest file of JSON lines that is read."""
MAX_LINE_BYTES = 2**24
"""Bytes of its longest line."""


@contextmanager
def alone(path: Path, *, below: Path | None = None, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, which lies in a folder of the work that it protects.

    Where another process holds it, that one's end is waited for, or, without `wait`, ValueError raised. On systems without such
    locks, none is held.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with opened_folder(path.parent, below=below) as folder:
        descriptor = open_to_write(path.name, folder, os.O_RDWR, path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise ValueError(f"{path.parent.parent}: another process is at work there; wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(descriptor)


def make_private(folder: Path, *, below: Path | None = None) -> Path:
    """Create `folder`, closed to everyone but its owner; one that is there already stays as its owner wants it."""
    with opened_folder(folder, below=below, make=True):
        return folder


@contextmanager
def replacing(path: Path, *, below: Path | None = None, settle: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file, which replaces `path` when the block ends, and is removed when the block raises.

    settle: whether to flush the folder as well; whoever writes many files calls `flush(folder)` once at the end instead.
    """
    beside = f".{path.name}.{os.getpid()}.partial"
    with _naming(path), opened_folder(path.parent, below=below) as folder:
        with suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=folder)
        descriptor = open_to_write(beside, folder, os.O_RDWR | os.O_EXCL, path.with_name(beside))
        try:
            with os.fdopen(descriptor, "w+b") as file:
                os.fchmod(descriptor, 0o600)  # whatever the umask says
                yield file
                file.flush()
                _settle(descriptor)
            os.replace(beside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if settle:
                os.fsync(folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=folder)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have errors of the system name `path`: those of descriptors name nothing, or the last part of it."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and not os.path.isabs(error.filename or ""):
            error.filename = str(path)
        raise


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on disk and not only on its way there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _settle(descriptor)
    finally:
        os.close(descriptor)


def _settle(descriptor: int) -> None:
    os.fsync(descriptor)
    if os.fstat(descriptor).st_size > LARGE_BYTES and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def remove(path: Path, *, below: Path | None = None) -> None:
    """Delete a file, where it is there. A link is deleted, and what it leads to is not."""
    with suppress(FileNotFoundError), opened_folder(path.parent, below=below) as folder:
        os.unlink(path.name, dir_fd=folder)


def write_bytes(path: Path, content: bytes, *, below: Path | None = None, settle: bool = True) -> None:
    """Write `content` to `path` at once. below, settle: see `replacing`."""
    with replacing(path, below=below, settle=settle) as file:
        file.write(content)


def write_json(path: Path, value: Any, *, below: Path | None = None) -> None:
    """Write `value` as indented JSON to `path` at once."""
    write_bytes(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n", below=below)


def json_lines(*values: Any) -> bytes:
    """Return the values as JSON, one a line."""
    return b"".join(json.dumps(value, allow_nan=False).encode() + b"\n" for value in values)


def append_json_lines(path: Path, *values: Any, below: Path | None = None) -> None:
    """Add a JSON line for each value to `path` at once, and flush it; a last line that was cut off by a crash gives way."""
    with _naming(path), opened_folder(path.parent, below=below) as folder:
        descriptor = open_to_write(path.name, folder, os.O_RDWR | os.O_APPEND, path)
    with _naming(path), os.fdopen(descriptor, "ab+") as file:
        if (size := file.seek(0, os.SEEK_END)) == 0:
            os.fchmod(descriptor, 0o600)  # whatever the umask says
        elif (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.truncate(_last_break(file, size))
        file.write(json_lines(*values))
        file.flush()
        os.fsync(descriptor)


def _last_break(file: BinaryIO, size: int, step: int = 1 << 16) -> int:
    """Return the position at which the last line begins, searched from the end of the file."""
    for start in range(size - size % step, -1, -step):
        file.seek(start)
        if (at := file.read(min(step, size - start)).rfind(b"\n")) >= 0:
            return start + at + 1
    return 0


def replace_json_lines(path: Path, *values: Any) -> None:
    """Write a file of JSON lines anew, at once."""
    write_bytes(path, json_lines(*values))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file that `append_json_lines` wrote; a last line that was cut off by a crash is left out.

    Raises DamagedFile, naming the file and the line, if one is no JSON object.
    """
    if not os.path.lexists(path):
        return []
    rows: list[dict[str, Any]] = []
    with opened(path.parent, path.name, limit=MAX_LINES_BYTES) as file:
        lines = BufferedReader(file)
        while (line := lines.readline(MAX_LINE_BYTES + 1)).endswith(b"\n"):
            if line == b"\n":
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise DamagedFile(path, f"row {len(rows) + 1} cannot be read: {error}") from None
            if not isinstance(row, dict):
                raise DamagedFile(path, f"row {len(rows) + 1} is no JSON object")
            rows.append(row)
        if len(line) > MAX_LINE_BYTES:
            raise DamagedFile(path, f"row {len(rows) + 1} has more than {MAX_LINE_BYTES} bytes")
    return rows


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    below: Path | None = None,
    settle: bool = True,
) -> str:
    """Write tensors by name to `path` at once, in the safetensors format; the SHA-256 of the file, in hexadecimal.

    One tensor after the other straight from its memory: the safetensors package would copy all of them first.
    Raises ValueError for a type that the format does not know.
    """
    digest = hashlib.sha256()
    with replacing(path, below=below, settle=settle) as file, ThreadPoolExecutor(1) as other:
        for part in _safetensors(tensors, metadata or {}):
            if len(part) < LARGE_BYTES:
                digest.update(part)
                file.write(part)
            else:  # neither holds Python's lock: at the same time on two cores
                hashed = other.submit(digest.update, part)
                file.write(part)
                hashed.result()
    return digest.hexdigest()


def _safetensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r} is of type {tensor.dtype}, which cannot be written")
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    described = json.dumps(header, separators=(",", ":")).encode()
    described += b" " * (-len(described) % 8)
    yield len(described).to_bytes(8, "little") + described
    for tensor in tensors.values():
        if tensor.numel():
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
