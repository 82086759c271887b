"""Secure aggregation on the server, as a Flower `Grid` (the server's connection to its clients)."""

import logging
from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedsim.flower import records
from fedsim.flower.grid import GridWrapper
from fedsim.secagg.cohorts import Cohorts, SecureRound
from fedsim.secagg.exchanges import Exchanges
from fedsim.secagg.protocol.terms import Agreement

FAILED_CODE = 90
"""Error code of replies for clients that failed."""


class SecureGrid(GridWrapper):
    """A grid that runs training messages through the exchanges of secure aggregation, and forwards all other messages.

    The strategy receives equal replies from all clients in the sum: the weights that it sent plus the mean of the quantised
    updates, weighted by numbers of examples, with `num-examples` 1. Strategies that average get the right result. A client that
    is not in the sum replies with an error, or not at all if it was late; this holds for all clients if no sum can be computed.

    agreement: settings agreed with the clients, which read them from their own configuration.
    seed:      seed of the random graphs of neighbours, the clients that share masks.
    observe:   called with the outcome of each round before its replies are returned.
    cohorts:   store of the clients in the last sum, for a round that is repeated after a crash; None keeps it in memory.

    The timeout of `send_and_receive`, in seconds, holds for each exchange. That method raises ValueError if more clients are
    asked in one round than were agreed on.
    """

    def __init__(
        self,
        inner: Grid,
        agreement: Agreement,
        *,
        seed: int = 0,
        observe: Callable[[SecureRound], None] | None = None,
        cohorts: Cohorts | None = None,
    ) -> None:
        super().__init__(inner)
        self.agreement = agreement
        self._seed, self._observe, self._cohorts = seed, observe, cohorts or Cohorts()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        requests = {message.metadata.dst_node_id: message for message in messages}
        if any(message.metadata.message_type.partition(".")[0] != "train" for message in requests.values()):
            return self.inner.send_and_receive(requests.values(), timeout=timeout)
        if not requests:
            return []
        if len(requests) > self.agreement.clients:
            raise ValueError(
                f"{len(requests)} clients are asked in one round, but secure aggregation was agreed for "
                f"{self.agreement.clients}, since larger sums could overflow 32-bit words; lower the strategy's "
                "number of clients per round"
            )
        outcome = Exchanges(self.inner, self.agreement, requests, timeout=timeout, seed=self._seed, cohorts=self._cohorts).run()
        if outcome.revealed is None:
            logging.getLogger(__name__).warning("the round is lost: %s", outcome.reason)
        if self._observe is not None:
            self._observe(outcome)
        return _make_replies(requests, outcome)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages that are not training messages, and return their ids.

        Raises NotImplementedError if there is a training message: secure aggregation takes several exchanges, as
        `send_and_receive` does.
        """
        sent = list(messages)
        if any(message.metadata.message_type.partition(".")[0] == "train" for message in sent):
            raise NotImplementedError("secure aggregation takes several exchanges; use send_and_receive")
        return self.inner.push_messages(sent)


def _make_replies(requests: dict[int, Message], outcome: SecureRound) -> list[Message]:
    """Return the replies to the messages `requests` (dict by node id).

    For a client in the sum, the reply holds the weights sent plus the mean update; for any other client, an error. A client that
    was late has no reply.
    """
    answers = []
    plain: RecordDict | None = None
    for node, message in requests.items():
        seen = outcome.seen[node]
        if outcome.revealed is not None and outcome.is_summed(node):
            plain = plain or _make_plain_reply(message, outcome.revealed.mean)
            answers.append(Message(RecordDict(dict(plain)), reply_to=message))
        elif not seen.late:
            answers.append(Message(Error(code=FAILED_CODE, reason=seen.reason), reply_to=message))
    return answers


def _make_plain_reply(message: Message, mean: dict[str, NDArray[np.floating]]) -> RecordDict:
    start = message.content[records.WEIGHTS_KEY]
    assert isinstance(start, ArrayRecord)
    weights = ArrayRecord({name: records.add_update(array, mean[name]) for name, array in start.items()})
    return RecordDict({records.WEIGHTS_KEY: weights, records.METRICS_KEY: MetricRecord({records.NUM_EXAMPLES_KEY: 1})})
