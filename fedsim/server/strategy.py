"""An honest-but-curious strategy: aggregates exactly as the strategy that it wraps, and writes down what passes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedsim import records
from fedsim.server.wrapper import Wrapper, innermost
from fedsim.wire.codec import Payload, decode
from fedsim.wire.recorder import Recorder, Reply, is_plain
from fedsim.wire.selection import Wanted

T = TypeVar("T")


class Recording(Wrapper):
    """Wraps any Flower strategy.

    inner:    samples clients and aggregates; it sees plain replies, with weights, and never knows that it is watched.
    recorder: where observations go. wanted: which of them.
    buffers:  names of what the server sends beside the weights.
    foreign:  whether clients may send whole weights, as apps do that know nothing of this project. Their replies go to `inner`
              as they are, good or bad; in a federation of ours, a malformed reply is a failed one.
    types:    of the tensors in the clients' network, by name, where the server may send others: some of Flower's strategies send
              float64, of which clients start from what their own types hold. That is what is written down.
    """

    def __init__(
        self,
        inner: Strategy,
        recorder: Recorder,
        *,
        wanted: Wanted | None = None,
        buffers: frozenset[str] = frozenset(),
        foreign: bool = False,
        types: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__(inner)
        self._recorder, self._wanted, self._buffers, self._foreign = recorder, wanted or Wanted(), buffers, foreign
        self._key = str(getattr(innermost(inner), "arrayrecord_key", records.WEIGHTS))
        self._examples = str(getattr(innermost(inner), "weighted_by_key", records.NUM_EXAMPLES))
        self._types = types or {}
        self._start = ArrayRecord()
        self._attempt = 1
        self._asked: list[int] = []
        self._kept: set[str] = set(recorder.clients()) if self._wanted.at_most else set()
        self.pseudonyms: dict[int, str] = {}
        self.traffic: dict[str, int] = {}

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        self._attempt = 1 if self._foreign else int(config.get("attempt", 1))  # type: ignore[arg-type]
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._asked = [message.metadata.dst_node_id for message in messages]
        self._start = arrays
        self.traffic = {"bytes_down": sum(records.count_bytes(message.content) for message in messages), "bytes_up": 0}
        if self._writes(server_round):
            tensors = {name: t.to(self._types.get(name, t.dtype)) for name, t in records.to_tensors(arrays).items()}
            buffers = {name: tensors.pop(name) for name in sorted(self._buffers & tensors.keys())}
            self._recorder.sent(server_round, tensors, buffers)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        by_node = {message.metadata.src_node_id: message for message in replies}
        for message in by_node.values():
            self._learn_name(message)
        named = _distinct(sorted((self._name(node), node) for node in by_node))
        late = {node: self._name(node) for node in sorted(set(self._asked) - by_node.keys())}
        packed = {node for node, message in by_node.items() if message.has_content() and records.PAYLOAD in message.content}
        received = [self._write(server_round, client, self._receive(by_node[node])) for node, client in named.items()]
        received += [self._write(server_round, client, _late(node)) for node, client in late.items()]
        if self._writes(server_round):
            self._recorder.commit(server_round, sorted([*named.values(), *late.values()]), attempt=self._attempt)
        accepted = [
            by_node[node]
            for node, reply in zip(named, received, strict=False)
            if reply.status == "complete" or by_node[node].has_error() or (self._foreign and node not in packed)
        ]
        if self._foreign:
            accepted.sort(key=list(by_node.values()).index)
        complete = sum(reply.status == "complete" for reply in received)
        self.traffic |= {
            "bytes_up": sum(reply.bytes for reply in received),
            "clients": complete,
            "missing": len(received) - complete,
        }
        return self.inner.aggregate_train(server_round, accepted)

    def _write(self, server_round: int, client: str, reply: Reply) -> Reply:
        """Write a reply down, and let go of what is large: one update in memory at a time."""
        reply = replace(reply, client=client)
        if self._writes(server_round) and self._keeps(client):
            self._recorder.received(server_round, reply)
        return replace(reply, payload=None, buffers={})

    def _writes(self, server_round: int) -> bool:
        return self._wanted.rounds is None or server_round in self._wanted.rounds

    def _keeps(self, client: str) -> bool:
        if self._wanted.clients is not None:
            return client in self._wanted.clients
        if self._wanted.at_most is not None and client not in self._kept:
            if len(self._kept) >= self._wanted.at_most:
                return False
            self._kept.add(client)
        return True

    def _name(self, node: int) -> str:
        return self.pseudonyms.get(node, str(node))

    def _learn_name(self, message: Message) -> None:
        if message.has_error() or records.CLIENT not in message.content:
            return
        pseudonym = str(message.content[records.CLIENT].get("pseudonym", ""))
        if is_plain(pseudonym):
            self.pseudonyms[message.metadata.src_node_id] = pseudonym

    def _receive(self, message: Message) -> Reply:
        """What the server learns from one reply; the reply itself becomes the plain one that the inner strategy expects."""
        node = str(message.metadata.src_node_id)
        if message.has_error():
            return Reply(client=node, node=node, status="failed", reason=message.error.reason or "")
        content = message.content
        size = records.count_bytes(content)
        try:
            payload, buffers = self._payload_of(content)
            if self._foreign:
                metrics = _plain_numbers(_only(content.metric_records, "record of metrics"))
                num_examples = _take_count(metrics, self._examples)
            else:
                metrics = records.reported(content)
                num_examples = int(metrics.pop(self._examples))
        except (KeyError, ValueError, TypeError, AssertionError) as error:
            return Reply(client=node, node=node, status="failed", reason=f"malformed reply: {error}", bytes=size)
        return Reply(
            client=node,
            node=node,
            payload=payload,
            buffers=buffers,
            num_examples=num_examples,
            bytes=size,
            metrics=metrics,
        )

    def _payload_of(self, content: RecordDict) -> tuple[Payload, dict[str, Tensor]]:
        """What a client sent, packed, and its buffers; in `content` the plain weights take their place.

        Raises ValueError where it does not fit what the client was sent.
        """
        if self._foreign and records.PAYLOAD not in content:  # an app that sends its weights: left as it is
            tensors = records.to_tensors(_only(content.array_records, "record of weights"))
            buffers = {name: tensors.pop(name) for name in sorted(self._buffers & tensors.keys())}
            self._check(tensors, buffers)
            return Payload(tensors=tensors, codec="weights"), buffers
        payload, buffers = records.take_payload(content), records.take_buffers(content)
        start = {} if payload.codec == "dense" else self._weights()
        update = decode(payload, start)
        self._check(update, buffers)
        content[self._key] = ArrayRecord(
            {  # in the order of what was sent: Flower's own clipping goes by it, not by name
                name: records.pack(buffers[name].numpy()) if name in buffers else _plus(start_, update[name])
                for name, start_ in self._start.items()
            }
        )
        return payload, buffers

    def _weights(self) -> dict[str, Tensor]:
        return records.to_tensors(ArrayRecord({k: a for k, a in self._start.items() if k not in self._buffers}))

    def _check(self, update: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Raises ValueError where names or shapes do not fit what was sent."""
        if mixed := sorted(update.keys() & self._buffers):
            raise ValueError(
                f"{mixed[0]!r} is a buffer, and came as an update; name the last part of it in update_mod(buffers=...)"
            )
        got = {name: tuple(t.shape) for tensors in (update, buffers) for name, t in tensors.items()}
        sent = {name: tuple(array.shape) for name, array in self._start.items()}
        if got != sent:
            wrong = sorted(name for name in got.keys() | sent.keys() if got.get(name) != sent.get(name))
            raise ValueError(f"names or shapes differ from the weights sent, the first: {wrong[0]}")


def _late(node: int) -> Reply:
    return Reply(client=str(node), node=str(node), status="late", reason="no answer in time")


def _plus(start: Array, update: Tensor) -> Array:
    """Weights after an update, in its type. One tensor at a time: an update is large."""
    change = update.numpy()
    return records.pack(np.asarray(records.view(start).astype(change.dtype, copy=False) + change))


def _only(found: Mapping[str, T], what: str) -> T:
    """The one record of its kind, whatever an app calls it, as Flower's own strategies take it."""
    if len(found) != 1:
        raise ValueError(f"{len(found)} times a {what} where Flower expects one")
    return next(iter(found.values()))


def _plain_numbers(record: MetricRecord) -> dict[str, float]:
    return {name: value for name, value in record.items() if not isinstance(value, list)}


def _take_count(metrics: dict[str, float], key: str) -> int | None:
    """The number of examples, taken out of `metrics`; None where an app reports none, or something that counts nothing."""
    value = metrics.get(key)
    return int(metrics.pop(key)) if value is not None and value >= 0 and float(value).is_integer() else None


def _distinct(named: Sequence[tuple[str, int]]) -> dict[int, str]:
    """Names by node. A pseudonym stands for one client a round: whoever else sends it is known by its node id."""
    taken: set[str] = set()
    names: dict[int, str] = {}
    for client, node in named:
        names[node] = str(node) if client in taken else client
        taken.add(names[node])
    return names
