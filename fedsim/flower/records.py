"""The adapter between tensors and Flower's records: the only place where one becomes the other."""

from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from fedsim.recording.codec import Payload

WEIGHTS = "arrays"
"""Flower's own key for model weights, both ways."""
UPDATE = "update"
"""Inside a client only: the update before any defense."""
PAYLOAD = "payload"
CODEC = "codec"
BUFFERS = "buffers"
"""Batch-norm statistics that a client sends beside its update."""
CLIENT = "client"
METRICS = "metrics"
CONFIG = "config"
NUM_EXAMPLES = "num-examples"


def pack(values: NDArray[Any]) -> Array:
    """As Flower's `Array(values)`, byte for byte, with one copy in place of three."""
    values = np.asarray(values, order="C")
    data = values.reshape(-1).view(np.uint8).data if values.size else b""
    return Array(str(values.dtype), values.shape, "numpy.ndarray", b"".join((_header(str(values.dtype), values.shape), data)))


def view(array: Array) -> NDArray[Any]:
    """As Flower's `array.numpy()`, but read-only, with no copy and no header to parse. Raises ValueError for a wrong length."""
    with suppress(TypeError):  # a type that NumPy does not know
        if array.stype == "numpy.ndarray" and array.data.startswith(head := _header(array.dtype, array.shape)):
            return np.frombuffer(array.data, np.dtype(array.dtype), offset=len(head)).reshape(array.shape)
    _check_length(array)
    return array.numpy()


def _check_length(array: Array) -> None:
    """Raises ValueError where the header in `array` claims more values than follow: NumPy would make room for them first."""
    buffer = BytesIO(array.data)
    version = np.lib.format.read_magic(buffer)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(buffer)
    if dtype.hasobject or prod(shape) * dtype.itemsize != len(array.data) - buffer.tell():
        raise ValueError(f"an array of shape {shape} and type {dtype} in {len(array.data)} bytes")


@lru_cache(maxsize=4096)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What `numpy.save` writes before the values of an array in C order."""
    buffer = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def to_arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors by name as a Flower record, bit for bit."""
    return ArrayRecord({name: pack(t.detach().cpu().numpy()) for name, t in tensors.items()})


def to_tensor(array: Array) -> Tensor:
    """One array as a tensor."""
    return from_numpy(view(array).copy())


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """The inverse of `to_arrays`."""
    return {name: to_tensor(array) for name, array in record.items()}


def put_payload(content: RecordDict, payload: Payload) -> None:
    """Add a payload to a reply."""
    content[PAYLOAD] = to_arrays(payload.tensors)
    content[CODEC] = ConfigRecord({"name": payload.codec})


def put_dense(content: RecordDict, update: ArrayRecord) -> None:
    """Add an update to a reply as it is: what `put_payload` does with codec "dense", without unpacking it."""
    content[PAYLOAD] = update
    content[CODEC] = ConfigRecord({"name": "dense"})


def take_payload(content: RecordDict) -> Payload:
    """Remove the payload from a reply and return it."""
    record, codec = content[PAYLOAD], content[CODEC]
    assert isinstance(record, ArrayRecord)
    assert isinstance(codec, ConfigRecord)
    del content[PAYLOAD], content[CODEC]
    return Payload(tensors=to_tensors(record), codec=str(codec["name"]))


def take_buffers(content: RecordDict) -> dict[str, Tensor]:
    """Remove the buffers from a reply and return them; none where it has none."""
    if BUFFERS not in content:
        return {}
    record = content[BUFFERS]
    assert isinstance(record, ArrayRecord)
    del content[BUFFERS]
    return to_tensors(record)


def reported(content: RecordDict) -> dict[str, float]:
    """The metrics that a client reports in clear; lists of numbers are left out."""
    record = content[METRICS]
    assert isinstance(record, MetricRecord)
    return {name: value for name, value in record.items() if not isinstance(value, list)}


def count_bytes(content: RecordDict) -> int:
    """Size of all records of a message on the wire, keys included."""
    return sum(_size(record) for record in content.values())


def _size(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    """As Flower counts, which fails for empty values."""
    if not isinstance(record, ConfigRecord):
        return record.count_bytes()
    filled = ConfigRecord({key: value for key, value in record.items() if value not in ("", b"", [])})
    return filled.count_bytes() + sum(len(key) for key in record.keys() - filled.keys())


def number(message: Message, key: str) -> int:
    """A number out of what the server prescribes for this round."""
    config = message.content[CONFIG]
    assert isinstance(config, ConfigRecord)
    return int(config[key])  # type: ignore[arg-type]
