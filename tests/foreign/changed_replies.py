"""A mod of clients that changes their replies."""

from collections.abc import Callable
from typing import Any

from flwr.app import Message, RecordDict


def rewrite(change: Callable[[RecordDict], None]) -> Callable[..., Message]:
    """Return a mod that changes the content of replies to training messages."""

    def mod(message: Message, context: Any, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if message.metadata.message_type == "train":
            change(reply.content)
        return reply

    return mod
