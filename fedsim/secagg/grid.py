"""The server's side of secure aggregation, as a Flower grid: a strategy asks for updates, and gets their mean from everyone."""

import logging
from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedsim.flower import records
from fedsim.flower.grid import Around
from fedsim.secagg.exchanges import Exchanges
from fedsim.secagg.outcome import SecureRound
from fedsim.secagg.protocol.terms import Agreement

FAILED = 90
"""Code of the error replies that a strategy gets."""


class SecureGrid(Around):
    """Sends messages of training as four exchanges each, and every other message as it is.

    What a strategy gets back are replies of those whose vectors are in the sum, all alike: the weights that it sent plus the mean
    of the updates, weighted by the clients' numbers of examples, and the same `num-examples`, 1, for each. So any strategy works
    that averages. Clients that failed answer with an error; where the round is lost, all do.

    agreement: with the clients, which have it from their own configuration. seed: draws the graphs.
    observe:   is told of each round before its replies are handed out. Each exchange waits for as long as `timeout` says.
    Raises ValueError where more clients are asked at once than were agreed upon.
    """

    def __init__(
        self, inner: Grid, agreement: Agreement, *, seed: int = 0, observe: Callable[[SecureRound], None] | None = None
    ) -> None:
        super().__init__(inner)
        self.agreement = agreement
        self._seed, self._observe = seed, observe

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        asked = {message.metadata.dst_node_id: message for message in messages}
        if any(message.metadata.message_type.partition(".")[0] != "train" for message in asked.values()):
            return self.inner.send_and_receive(asked.values(), timeout=timeout)
        if not asked:
            return []
        if len(asked) > self.agreement.clients:
            raise ValueError(
                f"{len(asked)} clients are asked at once, and sums over more than {self.agreement.clients} could overflow 32-bit "
                "words"
            )
        outcome = Exchanges(self.inner, self.agreement, asked, timeout=timeout, seed=self._seed).run()
        if outcome.revealed is None:
            logging.getLogger(__name__).warning("the round is lost: %s", outcome.reason)
        if self._observe is not None:
            self._observe(outcome)
        return replies(asked, outcome)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Of whatever is no training: a round cannot be pushed, and pulled later."""
        sent = list(messages)
        if any(message.metadata.message_type.partition(".")[0] == "train" for message in sent):
            raise NotImplementedError("secure aggregation takes several exchanges; use send_and_receive")
        return self.inner.push_messages(sent)


def replies(asked: dict[int, Message], outcome: SecureRound) -> list[Message]:
    """What a strategy gets in answer to the messages `asked`, by node; nothing of clients from which nothing came in time."""
    answers = []
    plain: RecordDict | None = None
    for node, message in asked.items():
        seen = outcome.seen[node]
        if outcome.revealed is not None and outcome.is_summed(node):
            plain = plain or _plain(message, outcome.revealed.mean)
            answers.append(Message(RecordDict(dict(plain)), reply_to=message))
        elif not seen.late:
            answers.append(Message(Error(code=FAILED, reason=seen.reason), reply_to=message))
    return answers


def _plain(message: Message, mean: dict[str, NDArray[np.floating]]) -> RecordDict:
    start = message.content[records.WEIGHTS]
    assert isinstance(start, ArrayRecord)
    weights = ArrayRecord({name: _plus(array, mean[name]) for name, array in start.items()})
    return RecordDict({records.WEIGHTS: weights, records.METRICS: MetricRecord({records.NUM_EXAMPLES: 1})})


def _plus(start: Array, update: NDArray[np.floating]) -> Array:
    """Weights after an update, in their own type."""
    before = records.view(start)
    return records.pack(np.asarray(before + update.astype(before.dtype)))
