"""Strategy of an honest-but-curious server: lets the strategy that it wraps aggregate, and records weights and replies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedsim.flower import records
from fedsim.recording.contradictions import find_contradictions
from fedsim.recording.selection import RecordSelection
from fedsim.recording.training import Training
from fedsim.recording.writer import Recorder, Reply
from fedsim.strategies.replies import ReplyReader, is_packed, read_pseudonym
from fedsim.strategies.wrapper import Wrapper, find_innermost

Traffic = dict[str, int | dict[str, dict[str, int]]]
"""Traffic of one round, in bytes of Flower's packed messages: `bytes_up` and `bytes_down` over all clients, numbers of `clients`
that answered and of `missing` ones, and under "bytes" `up` and `down` of each client."""


class RecordingStrategy(Wrapper):
    """A wrapper of any Flower strategy that records the weights it sends and the clients' replies.

    inner:    strategy that samples clients and aggregates. It receives replies with whole weights instead of updates, as Flower's
              strategies expect, and errors; malformed replies are withheld from it.
    recorder: writer of the recording, where malformed replies have the status "failed".
    wanted:   rounds and clients to record; None for all.
    buffers:  names of the buffers that the server sends.
    foreign:  whether clients may send whole weights instead of updates, as those of other Flower apps do. `inner` receives such
              replies unchanged, even if they are malformed.
    types:    dtypes of the clients' network by parameter name, in which the sent weights are recorded. Some of Flower's
              strategies send float64, which clients round to their own dtype. None: as sent.
    stated:   training settings of the clients, with which the first reply with whole weights is compared, see
              `find_contradictions`. None: no comparison. is_defended: whether a defense of updates is stated as well.
    """

    def __init__(
        self,
        inner: Strategy,
        recorder: Recorder,
        *,
        wanted: RecordSelection | None = None,
        buffers: frozenset[str] = frozenset(),
        foreign: bool = False,
        types: Mapping[str, torch.dtype] | None = None,
        stated: Training | None = None,
        is_defended: bool = False,
    ) -> None:
        super().__init__(inner)
        self._recorder, self._wanted, self._buffers, self._foreign = recorder, wanted or RecordSelection(), buffers, foreign
        self._replies = ReplyReader(
            start=ArrayRecord(),
            buffers=buffers,
            key=str(getattr(find_innermost(inner), "arrayrecord_key", records.WEIGHTS_KEY)),
            examples=str(getattr(find_innermost(inner), "weighted_by_key", records.NUM_EXAMPLES_KEY)),
            foreign=foreign,
            types=types or {},
        )
        self._types = types or {}
        self._stated, self._is_defended = stated, is_defended
        self._told: set[str] = set()
        self._attempt = 1
        self._asked: dict[int, int] = {}  # number of bytes sent to each node
        self._sent: list[Metadata] = []
        self._kept: set[str] = recorder.list_recorded_clients() if self._wanted.at_most else set()
        self.pseudonyms: dict[int, str] = {}
        self.traffic: Traffic = {}

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        self._attempt = 1 if self._foreign else int(config.get("attempt", 1))  # type: ignore[arg-type]
        messages = list(self.inner.configure_train(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id: records.count_bytes(message.content) for message in messages}
        self._sent = [message.metadata for message in messages]
        self._replies = replace(self._replies, start=arrays)
        self.traffic = {"bytes_down": sum(self._asked.values()), "bytes_up": 0}
        if self._is_written(server_round):
            tensors = {name: t.to(self._types.get(name, t.dtype)) for name, t in records.to_tensors(arrays).items()}
            buffers = {name: tensors.pop(name) for name in sorted(self._buffers & tensors.keys())}
            self._recorder.record_sent(server_round, tensors, buffers)
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        by_node = _key_by_client(replies, self._sent)
        self.pseudonyms |= {node: name for node, message in by_node.items() if (name := read_pseudonym(message)) is not None}
        packed = {node for node, message in by_node.items() if message.has_content() and is_packed(message.content)}
        named = make_distinct(sorted((self._name_client(node), node) for node in {*by_node, *self._asked}))
        received = {
            node: self._write(server_round, client, self._read(node, by_node.get(node))) for node, client in named.items()
        }
        if self._is_written(server_round):
            self._recorder.commit(server_round, sorted(named.values()), attempt=self._attempt)
        accepted = [
            by_node[node]
            for node, reply in received.items()
            if node in by_node
            and (reply.status == "complete" or by_node[node].has_error() or (self._foreign and node not in packed))
        ]
        if self._foreign:
            accepted.sort(key=list(by_node.values()).index)
        complete = sum(reply.status == "complete" for reply in received.values())
        self.traffic |= {
            "bytes_up": sum(reply.bytes for reply in received.values()),
            "clients": complete,
            "missing": len(received) - complete,
            "bytes": {c: {"up": received[node].bytes, "down": self._asked.get(node, 0)} for node, c in named.items()},
        }
        return self.inner.aggregate_train(server_round, accepted)

    def _read(self, node: int, message: Message | None) -> Reply:
        if message is None:
            return Reply(client=str(node), node=str(node), status="late", reason="no answer in time")
        reply = replace(self._replies.read(message), node=str(node))
        if self._foreign and message.has_content():
            self._warn_of_unrecorded(message.content, reply)
        return reply

    def _warn_of_unrecorded(self, content: RecordDict, reply: Reply) -> None:
        """Log that a reply, or a part of it, cannot be recorded; the same words only once."""
        reason = reply.reason
        if reply.status != "failed":
            others = (
                set() if is_packed(content) or len(content.array_records) < 2 else {*content.array_records} - {self._replies.key}
            )
            reason = f"besides the weights, it has the arrays {', '.join(sorted(others))}" if others else ""
        if reason and reason not in self._told:
            self._told.add(reason)
            what = "" if reply.status == "failed" else "part of "
            log(WARNING, "fedleak: cannot record %sthe reply of client %s: %s", what, reply.node, reason)

    def _write(self, server_round: int, client: str, reply: Reply) -> Reply:
        """Record a client's reply if its round and the client are selected, and return the reply without its update and buffers.

        So only one client's update at a time is in memory.
        """
        reply = replace(reply, client=client)
        self._warn_of_contradictions(server_round, reply)
        if self._is_written(server_round) and self._is_kept(reply):
            self._recorder.record_reply(server_round, reply)
        return replace(reply, payload=None, buffers={})

    def _warn_of_contradictions(self, server_round: int, reply: Reply) -> None:
        """Log sentences on what the stated training settings cannot explain in the first reply that holds whole weights.

        Later replies are not compared, and nothing is done if no settings were stated.
        """
        if self._stated is None or reply.payload is None or reply.payload.codec != "weights":
            return
        training, self._stated = self._stated.fix_round(server_round), None
        before = records.to_tensors(self._replies.start)
        after = {**reply.payload.tensors, **reply.buffers}
        for sentence in find_contradictions(training, reply.num_examples, before, after, is_defended=self._is_defended):
            log(WARNING, "fedleak: client %s does not seem to train as record() was told: %s", reply.client, sentence)

    def _is_written(self, server_round: int) -> bool:
        return self._wanted.rounds is None or server_round in self._wanted.rounds

    def _is_kept(self, reply: Reply) -> bool:
        if self._wanted.clients is not None:
            return reply.client in self._wanted.clients
        if self._wanted.at_most is None:
            return True
        if reply.status in ("complete", "masked") and len(self._kept) < self._wanted.at_most:
            self._kept.add(reply.client)
        return reply.client in self._kept

    def _name_client(self, node: int) -> str:
        return self.pseudonyms.get(node, str(node))


def _key_by_client(replies: Iterable[Message], sent: Sequence[Metadata]) -> dict[int, Message]:
    """Return the replies as a dict from the node id of the client that was asked; clients without a reply are left out.

    A SuperLink answers in place of a missing client, under another node id. Such a reply is assigned to the client by the id of
    the message that it answers. A reply that fits no message keeps its own node id. sent: metadata of the messages that were
    sent.
    """
    nodes = {metadata.dst_node_id for metadata in sent}
    about = {metadata.message_id: metadata.dst_node_id for metadata in sent if metadata.message_id}
    messages: dict[int, Message] = {}
    for message in replies:
        node = message.metadata.src_node_id
        messages[node if node in nodes else about.get(message.metadata.reply_to_message_id, node)] = message
    return messages


def make_distinct(named: Sequence[tuple[str, int]]) -> dict[int, str]:
    """Return a dict from node id to name, where clients that chose the same pseudonym have different names.

    named: pairs of pseudonym and node id. Of clients with the same pseudonym, the first in this order keeps it, and the name of
    each other one is its node id as text.
    """
    taken: set[str] = set()
    names: dict[int, str] = {}
    for client, node in named:
        names[node] = str(node) if client in taken else client
        taken.add(names[node])
    return names
