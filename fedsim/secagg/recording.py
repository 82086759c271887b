"""Recording of secure aggregation: each client's masked vector and public keys, and the sum as one more observation."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, Message, MetricRecord

from fedsim.recording.codec import Payload, encode
from fedsim.recording.masked_vectors import MASKED_CODEC, SUM_CLIENT, MaskedMessage
from fedsim.recording.writer import Reply
from fedsim.secagg.cohorts import SecureClient, SecureRound
from fedsim.secagg.protocol.quantisation import RevealedSum
from fedsim.strategies.recording_strategy import RecordingStrategy, make_distinct


class SecureRecording(RecordingStrategy):
    """A strategy that records rounds of secure aggregation.

    Give its method `observe` to the `SecureGrid`, the Flower grid that runs the exchanges with the clients. The grid calls it in
    each round.

    In each recorded round, every client that was asked has a row in the index. Its status is "masked" if its vector is in the
    sum, "late" if an answer did not come in time, and otherwise "failed". For a client that is selected for recording and sent
    public keys, a file holds these keys, the masked vector if it came, and the sizes of its messages. If a sum was computed, it
    is recorded as the reply of a client named "sum": the mean of the updates and the total number of examples.
    """

    _outcome: SecureRound | None = None

    def observe(self, outcome: SecureRound) -> None:
        """Keep the outcome of the current round until `aggregate_train` records it."""
        self._outcome = outcome

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        outcome, self._outcome = self._outcome, None
        assert outcome is not None
        self.pseudonyms |= {node: seen.pseudonym for node, seen in outcome.seen.items() if seen.pseudonym is not None}
        named = make_distinct(sorted((self._name_client(node), node) for node in outcome.seen))
        summed = {node for node in named if outcome.is_summed(node)}
        for node, client in named.items():
            self._record(server_round, replace(_make_reply(outcome, node), client=client))
        if outcome.revealed is not None and self._is_written(server_round):
            self._recorder.record_reply(server_round, self._make_sum_reply(outcome.revealed))
        if self._is_written(server_round):
            self._recorder.commit(server_round, sorted(named.values()), attempt=self._attempt)
        sizes = {client: _count_bytes(outcome.seen[node]) for node, client in named.items()}
        self.traffic = {
            "bytes_down": sum(size["down"] for size in sizes.values()),
            "bytes_up": sum(size["up"] for size in sizes.values()),
            "clients": len(summed),
            "missing": len(named) - len(summed),
            "bytes": sizes,
        }
        if outcome.revealed is not None:
            self.traffic |= _count_clipped(outcome.revealed)
        by_node = {message.metadata.src_node_id: message for message in replies}
        return self.inner.aggregate_train(server_round, [by_node[node] for node in named if node in by_node])

    def _record(self, server_round: int, reply: Reply) -> None:
        """Record a client's reply in a round that is selected for recording; do nothing in another round.

        For a client that is not selected for recording, only its row in the index is written, and no file with the payload. The
        row shows whether the client is in the sum.
        """
        if self._is_written(server_round):
            self._recorder.record_reply(server_round, reply if self._is_kept(reply) else replace(reply, payload=None))

    def _make_sum_reply(self, revealed: RevealedSum) -> Reply:
        start = self._replies.start
        update = {name: torch.from_numpy(revealed.mean[name].astype(array.dtype)) for name, array in start.items()}
        metrics = {name: float(number) for name, number in _count_clipped(revealed).items()}
        return Reply(client=SUM_CLIENT, node="", payload=encode(update), num_examples=revealed.num_examples, metrics=metrics)


def _count_clipped(revealed: RevealedSum) -> dict[str, int]:
    """Return two metrics of a round as a dict by name.

    secagg_clipped: number of clipped coordinates over all clients. secagg_clipped_clients: number of clients with clipped
                    coordinates.
    """
    return {"secagg_clipped": revealed.clipped, "secagg_clipped_clients": revealed.clipped_clients}


def _make_reply(outcome: SecureRound, node: int) -> Reply:
    seen = outcome.seen[node]
    summed = outcome.is_summed(node)
    masked = None
    if seen.publics is not None:
        masked = MaskedMessage(
            words=None if seen.words is None else torch.from_numpy(seen.words.copy()),
            mask_key=seen.publics.mask,
            share_key=seen.publics.share,
            sealed=seen.sealed,
            up=dict(seen.up),
            down=dict(seen.down),
        )
    return Reply(
        client=str(node),
        node=str(node),
        status="masked" if summed else "late" if seen.late else "failed",
        reason=seen.reason,
        payload=None if masked is None else Payload(tensors=masked.to_tensors(), codec=MASKED_CODEC),
        num_examples=seen.num_examples,
        bytes=_count_bytes(seen)["up"],
        metrics=seen.metrics,
    )


def _count_bytes(client: SecureClient) -> dict[str, int]:
    return {"up": sum(client.up.values()), "down": sum(client.down.values())}
