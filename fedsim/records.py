"""The adapter between tensors and Flower's records: the only place where one becomes the other."""

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor, from_numpy

from fedsim.wire.codec import Payload

WEIGHTS = "arrays"
"""Flower's own key for model weights, both ways."""
UPDATE = "update"
"""Inside a client only: the update before any defense."""
PAYLOAD = "payload"
CODEC = "codec"
CLIENT = "client"
METRICS = "metrics"
CONFIG = "config"
NUM_EXAMPLES = "num-examples"


def to_arrays(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors by name as a Flower record, bit for bit."""
    return ArrayRecord({name: Array(t.detach().cpu().numpy()) for name, t in tensors.items()})


def to_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """The inverse of `to_arrays`."""
    return {name: from_numpy(array.numpy()) for name, array in record.items()}


def put_payload(content: RecordDict, payload: Payload) -> None:
    """Add a payload to a reply."""
    content[PAYLOAD] = to_arrays(payload.tensors)
    content[CODEC] = ConfigRecord({"name": payload.codec})


def take_payload(content: RecordDict) -> Payload:
    """Remove the payload from a reply and return it."""
    record, codec = content[PAYLOAD], content[CODEC]
    assert isinstance(record, ArrayRecord)
    assert isinstance(codec, ConfigRecord)
    del content[PAYLOAD], content[CODEC]
    return Payload(tensors=to_tensors(record), codec=str(codec["name"]))


def reported(content: RecordDict) -> dict[str, float]:
    """The metrics that a client reports in clear; lists of numbers are left out."""
    record = content[METRICS]
    assert isinstance(record, MetricRecord)
    return {name: value for name, value in record.items() if not isinstance(value, list)}


def count_bytes(content: RecordDict) -> int:
    """Size of all records of a message on the wire, keys included."""
    return sum(record.count_bytes() for record in content.values())
