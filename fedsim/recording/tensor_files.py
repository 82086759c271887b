"""Reader of safetensors files from untrusted sources: the header is checked before memory for tensors is allocated."""

import hashlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedsim.recording.files import DTYPES
from fedsim.recording.safe_files import UNPRINTABLE_PATTERN, open_file, parse_json, read_exactly, shorten

MAX_BYTES = 16 * 2**30
"""Largest size of a file in bytes, enough for four billion parameters."""
MAX_HEADER = 4 * 2**20
"""Largest size of a header in bytes, enough for some forty thousand tensors."""
MAX_DIMENSIONS = 16
CHUNK_BYTES = 1 << 20
"""Number of bytes that are read and hashed at a time, so that they are still in the processor's cache for hashing."""

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
COPY_AGAIN = "copy the recording again"
"""Advice for a damaged file, used in error messages."""


class TensorEntry(NamedTuple):
    """The description of a tensor in a file's header: its type, its shape, and where its bytes lie.

    start, end: range of the tensor's bytes, counted from the end of the header; `end` is exclusive.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


TensorEntries = Mapping[str, TensorEntry]


def read_tensors(folder: Path, name: str, sha256: str, fits: Callable[[TensorEntries], None] | None = None) -> dict[str, Tensor]:
    """Return a dict from name to tensor of the safetensors file `name` below `folder`, in the order of its header.

    sha256: expected digest of the file, in hexadecimal. fits: function that is given the descriptions of the tensors by name, and
    raises ValueError if they are not as expected; it is called before memory for the tensors is allocated.

    The tensors may share memory. Raises DamagedFile unless the file is a complete safetensors file with this digest that `fits`
    accepts.
    """
    with open_file(folder, name, limit=MAX_BYTES) as file:
        size = file.seek(0, 2)
        file.seek(0)
        header = _make_header_buffer(file.read(8), size)
        read_exactly(file, memoryview(header)[8:])
        layout = _parse_header(bytes(header[8:]), size - len(header))
        if fits is not None:
            fits(layout)
        digest = hashlib.sha256(header)
        data = _allocate(size - len(header))
        content = data.numpy().data
        for start in range(0, len(content), CHUNK_BYTES):
            part = content[start : start + CHUNK_BYTES]
            read_exactly(file, part)
            digest.update(part)
        if digest.hexdigest() != sha256:
            raise ValueError("its SHA-256 checksum differs from the one in the recording's index; copy the recording again")
        return {tensor_name: _view_tensor(tensor_name, entry, data) for tensor_name, entry in layout.items()}


def _allocate(size: int) -> Tensor:
    """Return an uninitialised uint8 tensor (size,). Raises ValueError if the memory cannot be allocated."""
    try:
        return torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        raise ValueError(f"takes {size} bytes of memory, which this machine cannot allocate") from None


def _make_header_buffer(length: bytes, size: int) -> bytearray:
    """Return a buffer that begins with `length`, followed by zeros, one for each byte that the header has according to `length`.

    length: first 8 bytes of the file, a little-endian integer. size: number of bytes of the file.
    Raises ValueError if the header would be longer than `MAX_HEADER` or than the rest of the file.
    """
    claimed = int.from_bytes(length, "little")
    if len(length) < 8 or claimed > min(MAX_HEADER, size - 8):
        raise ValueError(f"is not a safetensors file: it has {size} bytes, but announces a header of {claimed}")
    return bytearray(length) + bytearray(claimed)


def _parse_header(header: bytes, size: int) -> dict[str, TensorEntry]:
    """Return the header's entries by tensor name, in the order of the header.

    header: JSON text. size: number of bytes of the file after the header.
    Raises ValueError for an invalid header, and unless its tensors fill the `size` bytes exactly, without gaps or overlaps.
    """
    try:
        described = parse_json(header)
    except ValueError as error:
        raise ValueError(f"is not a safetensors file: its header cannot be read: {error}; {COPY_AGAIN}") from None
    if not isinstance(described, dict):
        raise ValueError(f"is not a safetensors file: its header is {shorten(described)}, not a JSON object; {COPY_AGAIN}")
    if not isinstance(metadata := described.pop("__metadata__", {}), dict):
        raise ValueError(
            f"is not a safetensors file: '__metadata__' in its header is {shorten(metadata)}, not a JSON object; {COPY_AGAIN}"
        )
    layout = {name: _check_entry(name, entry) for name, entry in described.items()}
    at = 0
    for name, entry in sorted(layout.items(), key=lambda item: item[1][2:]):
        if entry.start != at:
            raise ValueError(
                f"tensor {name!r} begins at byte {entry.start}, but the tensor before it ends at byte {at}; {COPY_AGAIN}"
            )
        at = entry.end
    if at != size:
        raise ValueError(f"has {size} bytes of tensors, but its header describes {at} bytes; {COPY_AGAIN}")
    return layout


def _check_entry(name: str, described: Any) -> TensorEntry:
    """Return the entry for one tensor's description in the header. Raises ValueError if the name or description is invalid."""
    tensor = f"tensor {shorten(name)}"
    if not name or len(name) > 512 or UNPRINTABLE_PATTERN.search(name):
        raise ValueError(f"{tensor}: a name must have 1 to 512 printable characters")
    if not isinstance(described, dict) or described.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{tensor} is described in the header by {shorten(described)}, not by dtype, shape and data_offsets; {COPY_AGAIN}"
        )
    dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES_BY_NAME:
        raise ValueError(f"{tensor} has type {shorten(dtype)}, which is not one of {', '.join(DTYPES_BY_NAME)}; {COPY_AGAIN}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or prod(max(1, length) for length in shape) > MAX_BYTES:
        raise ValueError(
            f"{tensor} has shape {shorten(shape)}, not a list of at most {MAX_DIMENSIONS} whole numbers of which the product is "
            f"at most {MAX_BYTES}; {COPY_AGAIN}"
        )
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{tensor} has data_offsets {shorten(offsets)}, not two whole numbers from 0 to {MAX_BYTES}; {COPY_AGAIN}"
        )
    needed, (start, end) = prod(shape) * DTYPES_BY_NAME[dtype].itemsize, offsets
    if end - start != needed:
        raise ValueError(
            f"{tensor} of shape {tuple(shape)} and type {dtype} takes {needed} bytes, but its data_offsets span {end - start}; "
            f"{COPY_AGAIN}"
        )
    return TensorEntry(DTYPES_BY_NAME[dtype], tuple(shape), start, end)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)


def _view_tensor(name: str, entry: TensorEntry, data: Tensor) -> Tensor:
    if entry.start == entry.end:
        return torch.empty(entry.shape, dtype=entry.dtype)
    part = data[entry.start : entry.end]
    if entry.dtype is torch.bool and (highest := int(part.max())) > 1:
        raise ValueError(f"bool tensor {name!r} holds a byte of value {highest}, but a bool is 0 or 1; {COPY_AGAIN}")
    if entry.start % entry.dtype.itemsize:
        part = part.clone()
    return part.view(entry.dtype).reshape(entry.shape)
