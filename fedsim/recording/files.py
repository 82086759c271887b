"""Files that are either there as a whole or not at all, readable by their owner only."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
LARGE = 1_000_000
"""Files of so many bytes are let go from memory once they are on disk: fresh pages for each update cost more than writing it."""


@contextmanager
def alone(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, which lies in a folder of the work that it protects.

    Where another process holds it, that one's end is waited for, or, without `wait`, ValueError raised. On systems without such
    locks, none is held.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.open("a") as file:
        path.chmod(0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            raise ValueError(f"{path.parent.parent}: another process is at work there; wait for it, or stop it") from None
        yield


def make_private(folder: Path) -> Path:
    """Create `folder`, closed to everyone but its owner; one that is there already stays as its owner wants it."""
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def replacing(path: Path, *, settle: bool = True) -> Iterator[Path]:
    """A path to write beside `path`; flushed and renamed to it when the block ends well, removed otherwise.

    settle: flush the new name as well; who writes many files into one folder calls `flush(folder)` once after them.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        os.chmod(beside, 0o600)
        flush(beside)
        os.replace(beside, path)
        if settle:
            flush(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, on disk and not only on its way there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if os.fstat(descriptor).st_size > LARGE and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` at once."""
    with replacing(path) as beside:
        beside.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` at once."""
    write_bytes(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def json_lines(*values: Any) -> bytes:
    """Each value as a line."""
    return b"".join(json.dumps(value, allow_nan=False).encode() + b"\n" for value in values)


def append_json_lines(path: Path, *values: Any) -> None:
    """Add a JSON line for each value to `path` at once, and flush it; a last line that was cut off by a crash gives way."""
    new = not path.exists()
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json_lines(*values))
        file.flush()
        os.fsync(file.fileno())
    if new:
        path.chmod(0o600)


def replace_json_lines(path: Path, *values: Any) -> None:
    """Write a file of JSON lines anew, at once."""
    write_bytes(path, json_lines(*values))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `append_json_lines` wrote; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, settle: bool = True
) -> str:
    """Write tensors by name to `path` at once, in the safetensors format; the SHA-256 of the file, in hexadecimal.

    One tensor after the other straight from its memory: the safetensors package would copy all of them first.
    Raises ValueError for a type that the format does not know.
    """
    digest = hashlib.sha256()
    with replacing(path, settle=settle) as beside, beside.open("wb") as file, ThreadPoolExecutor(1) as other:
        for part in _safetensors(tensors, metadata or {}):
            if len(part) < LARGE:
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
