"""Files that are either there as a whole or not at all, readable by their owner only."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, contiguous_format


def make_private(folder: Path) -> Path:
    """Create `folder`, closed to everyone but its owner; one that is there already stays as its owner wants it."""
    if not folder.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write beside `path`; flushed and renamed to it when the block ends well, removed otherwise."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        descriptor = os.open(beside, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.chmod(beside, 0o600)
        os.replace(beside, path)
        _flush_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` at once."""
    with replacing(path) as beside:
        beside.write_bytes(content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON to `path` at once."""
    write_bytes(path, json.dumps(value, indent=2, allow_nan=False).encode() + b"\n")


def append_json_line(path: Path, value: Any) -> None:
    """Add one JSON line to `path` and flush it; a last line that was cut off by a crash gives way."""
    new = not path.exists()
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(value, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        path.chmod(0o600)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that `append_json_line` wrote; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


def tensors_to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Tensors by name in the safetensors format, which refuses tensors that share memory: each is copied."""
    copies = {name: t.detach().cpu().clone(memory_format=contiguous_format) for name, t in tensors.items()}
    return save(copies, metadata=dict(metadata or {}))
