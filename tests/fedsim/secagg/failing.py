"""A grid on which clients fail as they are told to."""

from collections.abc import Iterable, Mapping
from typing import ClassVar

from flwr.app import Error, Message

from fedsim.engine import engines as engine
from fedsim.flower import records
from fedsim.secagg import messages

Fails = Mapping[tuple[int, str], Iterable[int]]
"""By round and exchange, the partitions of the clients that fail there."""


class Failing(engine.LocalGrid):
    """fails: answer with an error. late: never get the message. lost: answer, and the answer does not come in time.

    seen: all that passed, by exchange: (partition, message, answer).
    """

    fails: ClassVar[Fails] = {}
    late: ClassVar[Fails] = {}
    lost: ClassVar[Fails] = {}
    seen: ClassVar[list[tuple[str, int, Message, Message | None]]]

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        type(self).seen = []

    def send_and_receive(self, messages_: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:  # type: ignore[override]
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
            kept = Message(answer.content.copy(), metadata=answer.metadata) if answer.has_content() else answer  # type: ignore[call-overload]
            answer = None if partition in self.lost.get(place, ()) else answer
            self.seen.append((stage, partition, message, kept))
        return answer
