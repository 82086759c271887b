"""Reading and validation of clients' replies, which are not trusted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.flower import records
from fedsim.recording.codec import Payload, find_codec
from fedsim.recording.files import DTYPES
from fedsim.recording.packing.parts import split_parts
from fedsim.recording.writer import MAX_EXAMPLES, Reply, is_plain

NODE_DIGITS = 13
"""Number of digits from which a purely numeric pseudonym is refused, since it could be another client's node id."""
RETURNED_PART_ADVICE = (
    "; if clients return only a part of the weights on purpose, let the server send only this part, and name a function whose "
    "network holds the other weights as buffers that are not saved (docs/tutorials/flower-app.md shows one)"
)


@dataclass(frozen=True, kw_only=True)
class ReplyReader:
    """Reader for the replies of one round.

    start:    weights and buffers that the clients were sent. buffers: names of the buffers among them.
    key:      name under which the strategy that aggregates looks for a client's whole weights in a message.
    examples: name of the metric with the number of examples.
    foreign:  whether clients may send whole weights, as in other Flower apps, instead of an update packed by `fedsim.client`.
    types:    dtypes of the clients' network by name; for a name that is missing, the dtype in `start` counts.
    """

    start: ArrayRecord
    types: Mapping[str, torch.dtype] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    key: str = records.WEIGHTS_KEY
    examples: str = records.NUM_EXAMPLES_KEY
    foreign: bool = False

    def read(self, message: Message) -> Reply:
        """Return the reply that `message` holds, and replace a packed update in the message by whole weights, for the strategy.

        Unless `foreign` is set, the message also loses all its metrics except the number of examples. For an error or a malformed
        message, a reply with status "failed" is returned.
        """
        node = str(message.metadata.src_node_id)
        if message.has_error():
            return Reply(client=node, node=node, status="failed", reason=message.error.reason or "")
        size = records.count_bytes(message.content)
        try:
            return self._read(message.content, node, size)
        except Exception as error:  # one malformed reply must not end the federation, whatever it raises
            reason = f"malformed reply: {error or type(error).__name__}"
            return Reply(client=node, node=node, status="failed", reason=reason, bytes=size)

    def _read(self, content: RecordDict, node: str, size: int) -> Reply:
        if self.foreign:
            records_found = content.metric_records.values()  # of several numbers with the same name, the last counts
            metrics = {name: v for record in records_found for name, v in record.items() if not isinstance(v, list)}
            examples = _take_count(metrics, self.examples)
        else:
            metrics = records.read_metrics(content)
            examples = to_whole(records.take_num_examples(metrics, self.examples))
        if self.foreign and not is_packed(content):  # the reply of such an app is not changed
            payload, buffers = self._take_weights(content)
        else:
            payload, buffers = self._take_update(content)
        # metrics of a client never reach the strategy, because Flower ends the run if they differ between clients
        if not self.foreign:
            _replace(content, records.METRICS_KEY, MetricRecord({self.examples: examples or 0}))
        return Reply(client=node, node=node, payload=payload, buffers=buffers, num_examples=examples, bytes=size, metrics=metrics)

    def _take_weights(self, content: RecordDict) -> tuple[Payload, dict[str, Tensor]]:
        tensors = records.to_tensors(self._choose_arrays(content.array_records))
        buffers = {name: tensors.pop(name) for name in sorted(self.buffers & tensors.keys())}
        self._check(tensors, buffers, may_keep_buffers=True)
        return Payload(tensors=tensors, codec="weights"), buffers

    def _choose_arrays(self, arrays: Mapping[str, ArrayRecord]) -> ArrayRecord:
        """Return the record under `key`, or the only record, whatever its key. Raises ValueError if there is neither."""
        if self.key in arrays:
            return arrays[self.key]
        if len(arrays) != 1:
            names = ", ".join(repr(name) for name in sorted(arrays)) or "none"
            raise ValueError(
                f"the client's reply has the array records {names}; send the weights in one record, or beside others under the "
                f"strategy's arrayrecord_key, {self.key!r}"
            )
        return next(iter(arrays.values()))

    def _take_update(self, content: RecordDict) -> tuple[Payload, dict[str, Tensor]]:
        """Return a client's encoded update and its buffers, and replace them in `content` by its whole weights."""
        payload, buffers = records.take_payload(content), records.take_buffers(content)
        codec = find_codec(payload.codec)
        self._check_names(split_parts(payload.tensors) if codec.packs else payload.tensors)
        update = codec.decode(payload.tensors, self._read_start() if payload.codec == "weights" else self._read_shapes())
        self._check(update, buffers)
        plain = {  # in the order of the weights sent, because Flower's clipping pairs tensors by position
            name: records.pack(buffers[name].numpy()) if name in buffers else records.add_update(sent, update[name].numpy())
            for name, sent in self.start.items()
        }
        if self.foreign:
            content[self.key] = ArrayRecord(plain)
        else:
            _replace(content, self.key, ArrayRecord(plain))
        return payload, buffers

    def _read_start(self) -> dict[str, Tensor]:
        return {name: records.to_tensor(array) for name, array in self.start.items() if name not in self.buffers}

    def _read_shapes(self) -> dict[str, Tensor]:
        """Return float32 tensors on the meta device, by name, with the shapes of the weights in `start`, without buffers."""
        shapes = {name: tuple(array.shape) for name, array in self.start.items() if name not in self.buffers}
        return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}

    def _check_names(self, update: Iterable[str]) -> None:
        """Raise ValueError if a tensor in a client's update has the name of a buffer."""
        if mixed := sorted(self.buffers.intersection(update)):
            raise ValueError(
                f"{mixed[0]!r} is a buffer, but the client sent it as part of the update; add {mixed[0].rpartition('.')[2]!r} to "
                "update_mod(buffers=...)"
            )

    def _check(self, update: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, may_keep_buffers: bool = False) -> None:
        """Raise ValueError unless the names, shapes and kinds of a client's tensors are those of the tensors that it was sent.

        The kinds are floating-point, integer and boolean; for tensors in `types`, the kind of the dtype there counts.
        may_keep_buffers: whether the client may leave out all buffers.
        """
        got = {
            name: (tuple(t.shape), _name_kind(t.dtype, f"{name!r} in the client's reply"))
            for tensors in (update, buffers)
            for name, t in tensors.items()
        }
        sent = {
            name: (tuple(array.shape), _name_kind(self.types.get(name) or _find_type(array), f"{name!r} of the server's weights"))
            for name, array in self.start.items()
            if buffers or not may_keep_buffers or name not in self.buffers
        }
        if got != sent:
            wrong = sorted(name for name in got.keys() | sent.keys() if got.get(name) != sent.get(name))
            raise ValueError(
                f"tensor {wrong[0]!r}: the client returned {_describe(got.get(wrong[0]))}, but the weights that it was sent have "
                f"{_describe(sent.get(wrong[0]))}{RETURNED_PART_ADVICE * (got.items() < sent.items())}"
            )


def is_packed(content: RecordDict) -> bool:
    """Return whether a reply holds an update packed by `fedsim.client` (with its codec) instead of whole weights."""
    return records.PAYLOAD_KEY in content and records.CODEC_KEY in content


def read_pseudonym(message: Message) -> str | None:
    """Return the pseudonym that a client sent; None if it sent none, or one that is not allowed.

    Not allowed are names that `is_plain` refuses, and numbers of at least NODE_DIGITS digits, which could be another client's
    node id.
    """
    record = message.content.get(records.CLIENT_KEY) if message.has_content() else None
    name = record.get("pseudonym") if isinstance(record, ConfigRecord) else None
    if not isinstance(name, str) or not is_plain(name) or (name.isdigit() and len(name) >= NODE_DIGITS):
        return None
    return name


def to_whole(count: float) -> int:
    """Return a number of examples as an int. Raises ValueError unless it is an integer from 1 to `MAX_EXAMPLES` - 1."""
    if not isfinite(count) or count != int(count) or not 1 <= count < MAX_EXAMPLES:
        raise ValueError(
            f"the metric {records.NUM_EXAMPLES_KEY!r} in the client's reply, its number of examples, must be a whole number from "
            f"1 to {MAX_EXAMPLES - 1}, got {count}"
        )
    return int(count)


def _take_count(metrics: dict[str, float], key: str) -> int | None:
    """Remove the number of examples under `key` from `metrics` and return it.

    Returns None, and leaves `metrics` unchanged, if it is missing or `to_whole` rejects it.
    """
    try:
        count = to_whole(metrics[key])
    except (KeyError, ValueError):
        return None
    del metrics[key]
    return count


def _describe(layout: tuple[tuple[int, ...], str] | None) -> str:
    """Return a tensor's shape and kind (floating-point, integer or boolean) as text; None stands for a missing tensor."""
    return "no such tensor" if layout is None else f"shape {layout[0]} with {layout[1]} values"


def _name_kind(dtype: torch.dtype, name: str) -> str:
    """Return the kind of a type: floating-point, integer or boolean. name: the tensor of this type, for messages."""
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name} has type {dtype}, which cannot be recorded; convert it to float32")
    return "floating-point" if dtype.is_floating_point else "boolean" if dtype == torch.bool else "integer"


def _find_type(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, np.dtype(array.dtype))).dtype


def _replace(content: RecordDict, key: str, record: ArrayRecord | MetricRecord) -> None:
    """Remove all records of the type of `record` (arrays or metrics) from `content`, and store `record` under `key`."""
    for name in [name for name, other in content.items() if isinstance(other, type(record))]:
        del content[name]
    content[key] = record
