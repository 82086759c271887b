"""Conversion between tensors and Flower's records, and access to the entries of Flower's messages."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from math import prod
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from fedsim.recording.codec import Payload

CallNext = Callable[[Message, Context], Message]
"""Next mod of a Flower ClientApp, or the app itself."""
WEIGHTS_KEY = "arrays"
"""Flower's key for model weights, in both directions."""
UPDATE_KEY = "update"
"""Key of the update before any defense; used inside a client only."""
PAYLOAD_KEY = "payload"
CODEC_KEY = "codec"
BUFFERS_KEY = "buffers"
"""Key of the batch-norm statistics that a client sends with its update."""
CLIENT_KEY = "client"
METRICS_KEY = "metrics"
CONFIG_KEY = "config"
NUM_EXAMPLES_KEY = "num-examples"
_Record = TypeVar("_Record", ArrayRecord, MetricRecord, ConfigRecord)


def pack(values: NDArray[Any]) -> Array:
    """Return a Flower `Array` with these values, in C order in the format of `numpy.save`, with one copy instead of three."""
    values = np.asarray(values, order="C")
    data = values.reshape(-1).view(np.uint8).data if values.size else b""
    return Array(
        str(values.dtype), values.shape, "numpy.ndarray", b"".join((_make_header(str(values.dtype), values.shape), data))
    )


def read_array(array: Array) -> NDArray[Any]:
    """Return the values of a Flower array, without copying them if its header is the one that `numpy.save` writes in C order.

    Without a copy, the result is read-only. Raises ValueError if the number of bytes does not fit shape and type.
    """
    with suppress(TypeError):  # raised for a type that NumPy does not have
        if array.stype == "numpy.ndarray" and array.data.startswith(head := _make_header(array.dtype, array.shape)):
            return np.frombuffer(array.data, np.dtype(array.dtype), offset=len(head)).reshape(array.shape)
    _check_length(array)
    return array.numpy()


def _check_length(array: Array) -> None:
    """Raise ValueError if `array` holds more or fewer bytes than its header states, or values that are Python objects.

    This is checked before NumPy allocates memory for the values.
    """
    buffer = BytesIO(array.data)
    version = np.lib.format.read_magic(buffer)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(buffer)
    if dtype.hasobject:
        raise ValueError(
            f"a received Flower message has an array of Python objects (type {dtype}), which are not loaded, for safety; send "
            "arrays of numbers"
        )
    wanted, found = prod(shape) * dtype.itemsize, len(array.data) - buffer.tell()
    if wanted != found:
        raise ValueError(
            f"a received Flower message is damaged or was built wrongly: an array of shape {shape} and type {dtype} has {found} "
            f"bytes instead of {wanted}; correct the app that sent it"
        )


@lru_cache(maxsize=4096)
def _make_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the header that `numpy.save` writes before the values of an array in C order."""
    buffer = BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


def add_update(start: Array, update: NDArray[Any]) -> Array:
    """Return `start` plus `update`, in the dtype of `start`."""
    before = read_array(start)
    return pack(np.asarray(before + update.astype(before.dtype, copy=False)))


def to_arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert a dict of tensors to a Flower record with the same names. Raises TypeError for bfloat16, which NumPy lacks."""
    return ArrayRecord({name: pack(t.detach().cpu().numpy()) for name, t in tensors.items()})


def to_tensor(array: Array) -> Tensor:
    """Convert one Flower array to a tensor on the CPU, with memory of its own."""
    return from_numpy(read_array(array).copy())


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Convert a Flower record to a dict of tensors on the CPU, with the same names."""
    return {name: to_tensor(array) for name, array in record.items()}


def put_payload(content: RecordDict, payload: Payload) -> None:
    """Add a payload, a client's encoded update, to the content of its reply: its tensors and the name of its codec."""
    content[PAYLOAD_KEY] = to_arrays(payload.tensors)
    content[CODEC_KEY] = ConfigRecord({"name": payload.codec})


def put_dense(content: RecordDict, update: ArrayRecord) -> None:
    """Add an update to the content of a reply, as a payload with codec "dense" (all values as they are), without copying it."""
    content[PAYLOAD_KEY] = update
    content[CODEC_KEY] = ConfigRecord({"name": "dense"})


def take_payload(content: RecordDict) -> Payload:
    """Remove the payload from a reply's content and return it. Raises ValueError if one of its records is missing."""
    record, codec = _find_record(content, PAYLOAD_KEY, ArrayRecord), _find_record(content, CODEC_KEY, ConfigRecord)
    del content[PAYLOAD_KEY], content[CODEC_KEY]
    return Payload(tensors=to_tensors(record), codec=str(codec["name"]))


def take_buffers(content: RecordDict) -> dict[str, Tensor]:
    """Remove the buffers from a reply's content and return them by name; {} if there are none."""
    if BUFFERS_KEY not in content:
        return {}
    record = _find_record(content, BUFFERS_KEY, ArrayRecord)
    del content[BUFFERS_KEY]
    return to_tensors(record)


def read_metrics(content: RecordDict) -> dict[str, float]:
    """Return a reply's metrics that are numbers, by name. Raises ValueError if it has no record of metrics."""
    record = _find_record(content, METRICS_KEY, MetricRecord)
    return {name: value for name, value in record.items() if not isinstance(value, list)}


def take_num_examples(metrics: dict[str, float], key: str = NUM_EXAMPLES_KEY) -> float:
    """Remove the number of examples under `key` from a client's metrics and return it. Raises ValueError if it is missing."""
    if key not in metrics:
        raise ValueError(
            f"the client's reply lacks the metric {key!r}, its number of examples; the client's app must add this number to the "
            f"metrics of its reply"
        )
    return metrics.pop(key)


def _find_record(content: RecordDict, key: str, kind: type[_Record]) -> _Record:
    """Return the record at `key` of a reply. Raises ValueError if there is none, or if it is not of the type `kind`."""
    record = content.get(key)
    if not isinstance(record, kind):
        found = "and it has none" if record is None else f"got {type(record).__name__}"
        article = "an" if kind is ArrayRecord else "a"
        raise ValueError(f"the client's reply needs {article} {kind.__name__} called {key!r}, {found}")
    return record


def count_bytes(content: RecordDict) -> int:
    """Return the total size in bytes of all records of a message, as Flower counts it, including the keys of their entries."""
    return sum(_count_record_bytes(record) for record in content.values())


def _count_record_bytes(record: ArrayRecord | MetricRecord | ConfigRecord) -> int:
    """Return a record's size as Flower counts it. Empty values of a ConfigRecord, at which Flower fails, count as their keys."""
    if not isinstance(record, ConfigRecord):
        return record.count_bytes()
    filled = ConfigRecord({key: value for key, value in record.items() if value not in ("", b"", [])})
    return filled.count_bytes() + sum(len(key) for key in record.keys() - filled.keys())


def read_number(message: Message, key: str) -> int:
    """Return the number at `key` of the server's configuration in the message, converted by `int`."""
    config = message.content[CONFIG_KEY]
    assert isinstance(config, ConfigRecord)
    return int(config[key])  # type: ignore[arg-type]
