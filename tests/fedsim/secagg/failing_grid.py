"""A grid (Flower's connection to the clients) on which chosen clients fail in chosen messages."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from flwr.app import Error, Message

from fedsim.engine import engines as engine
from fedsim.flower import records
from fedsim.secagg import messages

Fails = Mapping[tuple[int, str], Iterable[int]]
"""Partition numbers of the failing clients, by round and exchange; an exchange is one of the four steps of the protocol."""


class Failing(engine.LocalGrid):
    """A grid with failures. fails: clients that answer with an error. late: those that never get the message. lost: those whose
    answer is dropped.

    seen: all messages as (exchange, partition, message, answer).
    """

    fails: ClassVar[Fails] = {}
    late: ClassVar[Fails] = {}
    lost: ClassVar[Fails] = {}
    seen: ClassVar[list[tuple[str, int, Message, Message | None]]]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        type(self).seen = []

    def send_and_receive(self, messages_: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return [answer for message in messages_ if (answer := self._one(message)) is not None]

    def _one(self, message: Message) -> Message | None:
        partition = list(self._contexts).index(message.metadata.dst_node_id)
        stage = messages.read_stage(message.content) or ""
        place = records.read_number(message, "server-round"), stage
        answer: Message | None = None
        if partition in self.fails.get(place, ()):
            answer = Message(Error(code=0, reason="told to fail"), reply_to=message)
        elif partition not in self.late.get(place, ()):
            (answer,) = super().send_and_receive([message])
            kept = Message(answer.content.copy(), metadata=answer.metadata) if answer.has_content() else answer
            answer = None if partition in self.lost.get(place, ()) else answer
            self.seen.append((stage, partition, message, kept))
        return answer
