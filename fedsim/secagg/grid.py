"""Secure aggregation on the server: a Flower `Grid` (the server's connection to its clients), and the exchanges of one round.

A round has four exchanges: setup, share, collect and unmask.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from fedsim.flower import records
from fedsim.flower.grid import GridWrapper
from fedsim.secagg import messages
from fedsim.secagg.cohorts import Cohorts, SecureClient, SecureRound
from fedsim.secagg.messages import EXCHANGE_KEY
from fedsim.secagg.protocol.aggregator import Aggregator, RoundLost
from fedsim.secagg.protocol.masks import Words
from fedsim.secagg.protocol.participant import PublicKeys, Stage
from fedsim.secagg.protocol.terms import Agreement
from fedsim.strategies.replies import read_pseudonym, to_whole

T = TypeVar("T")
FAILED_CODE = 90
"""Error code of replies for clients that failed."""


class Exchanges:
    """One round of secure aggregation on the server.

    grid:     the server's connection to its clients. agreement: settings agreed with the clients.
    requests: dict from the node id of each client in the round to the Flower message for it, with the weights and the
              configuration.
    timeout:  seconds to wait for the answers to each exchange; None for no limit.
    seed:     seed of the random graph of neighbours, the clients that share masks.
    cohorts:  store of the clients in the sum, for a round that is repeated after a crash; None keeps none.
    """

    def __init__(
        self,
        grid: Grid,
        agreement: Agreement,
        requests: Mapping[int, Message],
        *,
        timeout: float | None,
        seed: int,
        cohorts: Cohorts | None = None,
    ) -> None:
        self._grid, self._agreement, self._requests, self._timeout = grid, agreement, requests, timeout
        first = next(iter(requests.values()))
        start = first.content[records.WEIGHTS_KEY]
        assert isinstance(start, ArrayRecord)
        self._shapes = {name: tuple(array.shape) for name, array in start.items()}
        context = messages.read_context(first)
        self._aggregator = Aggregator(agreement, context, Random(f"{seed}/{context}"))
        self._cohorts, self._round = cohorts or Cohorts(), records.read_number(first, "server-round")
        self._seen = {node: SecureClient(node) for node in requests}
        self._numbers: dict[int, int] = {}  # numbers of members by node

    def run(self) -> SecureRound:
        """Run the exchanges and return the outcome, which holds the sum or, if no sum can be computed, the reason."""
        try:
            total = self._compute_total()
            clients = sum(seen.words is not None for seen in self._seen.values())
            revealed = self._agreement.quantiser.decode(total, self._shapes, clients)
        except (RoundLost, ValueError) as lost:
            for seen in self._seen.values():
                seen.reason = seen.reason or f"the round is lost: {lost}"
            return SecureRound(self._seen, None, str(lost))
        return SecureRound(self._seen, revealed)

    def _compute_total(self) -> Words:
        aggregator = self._aggregator
        publics = self._select_cohort(
            self._exchange("setup", {node: messages.ask_setup() for node in self._requests}, self._read_publics)
        )
        self._numbers = {node: number for number, node in enumerate(sorted(publics, key=self._make_sort_key), start=1)}
        rosters = self._key_by_node(aggregator.draw_rosters(self._key_by_number(publics)))
        sealed = self._exchange(
            "share",
            {node: messages.ask_share(roster) for node, roster in rosters.items()},
            lambda node, content: messages.read_shared(content, rosters[node]),
        )
        for node, texts in sealed.items():
            self._seen[node].sealed = tuple(len(text) for text in texts.values())
        for_each = self._key_by_node(aggregator.route_shares(self._key_by_number(sealed)))
        vectors = self._exchange(
            "collect", {node: messages.ask_collect(texts) for node, texts in for_each.items()}, self._read_words
        )
        wanted = self._key_by_node(aggregator.ask_shares(self._key_by_number(vectors)))
        self._cohorts.store(self._round, map(self._name_member, wanted))
        opened = self._exchange(
            "unmask",
            {node: messages.ask_unmask(request) for node, request in wanted.items()},
            lambda node, content: messages.read_opened(content, wanted[node]),
        )
        return aggregator.unmask(self._key_by_number(opened))

    def _select_cohort(self, publics: dict[int, PublicKeys]) -> dict[int, PublicKeys]:
        """Return the public keys of the clients that may take part, and store why others may not in `_seen`."""
        admitted = {
            node: keys for node, keys in publics.items() if self._cohorts.is_admitted(self._round, self._name_member(node))
        }
        for node in publics.keys() - admitted.keys():
            self._seen[node].reason = "the round is repeated, and this client was not in its sum before"
        return admitted

    def _name_member(self, node: int) -> str:
        return self._seen[node].pseudonym or str(node)

    def _read_publics(self, node: int, content: RecordDict) -> PublicKeys:
        publics = messages.read_publics(content)
        self._seen[node].publics = publics
        return publics

    def _read_words(self, node: int, content: RecordDict) -> Words:
        words, seen = messages.read_words(content, self._agreement.quantiser.count_words(self._shapes)), self._seen[node]
        if self._agreement.reveal:
            metrics = records.read_metrics(content)
            seen.num_examples, seen.metrics = to_whole(records.take_num_examples(metrics)), metrics
        seen.words = words
        return words

    def _exchange(self, stage: Stage, by_node: Mapping[int, ConfigRecord], read: Callable[[int, RecordDict], T]) -> dict[int, T]:
        """Send one exchange; return a dict from node id to valid answer, and store in `_seen` why the other nodes failed.

        by_node: dict from node id to the record that it is sent. read: maps the node id and the content of an answer to the
        parsed answer; an error that it raises makes only this client fail.
        """
        sent = [self._make_message(stage, node, record) for node, record in by_node.items()]
        for message in sent:
            self._seen[message.metadata.dst_node_id].down[stage] = records.count_bytes(message.content)
        answers = {m.metadata.src_node_id: m for m in self._grid.send_and_receive(sent, timeout=self._timeout)}
        answered = {}
        for node in by_node:
            seen, answer = self._seen[node], answers.get(node)
            if answer is None:
                seen.reason, seen.late = f"no answer in time at exchange '{stage}'", True
            elif answer.has_error():
                seen.reason = f"exchange '{stage}': {answer.error.reason or 'failed'}"
            else:
                seen.up[stage] = records.count_bytes(answer.content)
                seen.pseudonym = seen.pseudonym or read_pseudonym(answer)
                try:
                    answered[node] = read(node, answer.content)
                    seen.answered += (stage,)
                except Exception as error:  # one malformed answer must not end the federation, whatever it raises
                    seen.reason = f"exchange '{stage}': malformed reply: {error or type(error).__name__}"
        return answered

    def _make_message(self, stage: Stage, node: int, record: ConfigRecord) -> Message:
        """Return the message of one exchange: `record`, the strategy's configuration and, only in "collect", the weights."""
        template = self._requests[node]
        content = RecordDict(
            {key: value for key, value in template.content.items() if stage == "collect" or isinstance(value, ConfigRecord)}
        )
        content[EXCHANGE_KEY] = record
        return Message(content, dst_node_id=node, message_type=template.metadata.message_type)

    def _make_sort_key(self, node: int) -> tuple[str, int]:
        """Return the pseudonym ("" if there is none) and the node id of a client, by which the clients are numbered.

        The pseudonym comes first so that a simulation repeats although Flower draws new node ids.
        """
        return self._seen[node].pseudonym or "", node

    def _key_by_number(self, answers: Mapping[int, T]) -> dict[int, T]:
        return {self._numbers[node]: answer for node, answer in answers.items()}

    def _key_by_node(self, answers: Mapping[int, T]) -> dict[int, T]:
        return {node: answers[number] for node, number in self._numbers.items() if number in answers}


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
