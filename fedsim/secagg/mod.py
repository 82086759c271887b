"""Secure aggregation on the client, as a Flower mod that masks updates."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedsim.flower import records
from fedsim.flower.records import CallNext
from fedsim.recording.codec import decode
from fedsim.secagg import messages
from fedsim.secagg.messages import EXCHANGE_KEY, MASKED_KEY
from fedsim.secagg.protocol import participant
from fedsim.secagg.protocol.keys import draw_bytes
from fedsim.secagg.protocol.participant import Participant
from fedsim.secagg.protocol.terms import Agreement


@dataclass(frozen=True, kw_only=True)
class SecureParticipant:
    """Settings of one client.

    agreement: the client's own copy; the server's version is ignored. pseudonym: name in its answers.

    Keys and masks always come from the operating system, also in a simulation with a client seed, because two vectors under one
    mask reveal the difference of the updates. The sum does not depend on them.
    """

    agreement: Agreement
    pseudonym: str


def make_secure_mod(part_of: Callable[[Context], SecureParticipant | None]) -> Callable[[Message, Context, CallNext], Message]:
    """Return a mod that answers the exchanges of secure aggregation; only "collect" reaches the client app.

    Use it as the outermost mod.

    part_of: returns the client's settings, or None for a client without secure aggregation, whose messages pass unchanged.
    Keys and shares are stored only in Flower's `Context.state`, and only during a round.
    Raises ValueError, which becomes an error reply, if the server asks for an unmasked update or asks out of order.
    """

    def answer(message: Message, context: Context, call_next: CallNext) -> Message:
        part, stage = part_of(context), messages.read_stage(message.content)
        if message.metadata.message_type.partition(".")[0] != "train" or (part is None and stage is None):
            return call_next(message, context)
        if part is None or stage is None:
            theirs, ours = ("not", "only") if stage is None else ("securely", "not")
            raise ValueError(
                f"the server aggregates {theirs}, and this client takes part in secure aggregation {ours}; give both the same "
                "experiment"
            )
        known = messages.decode_state(context.state)
        content = RecordDict()
        if stage == "collect":
            content, me = _collect(part, _check_context(known, message), message, lambda: call_next(message, context))
        elif stage == "setup":
            me = _begin_round(part, known, messages.read_context(message))
            content[EXCHANGE_KEY] = messages.answer_setup(me.publics)
        elif stage == "share":
            me = _check_context(known, message)
            me, sealed = participant.share(me, *messages.read_roster(message.content), draw_bytes)
            content[EXCHANGE_KEY] = messages.answer_share(sealed)
        else:
            me, opened = participant.unmask(_check_context(known, message), *messages.read_asked(message.content))
            content[EXCHANGE_KEY] = messages.answer_unmask(opened)
        content[records.CLIENT_KEY] = ConfigRecord({"pseudonym": part.pseudonym})
        context.state[EXCHANGE_KEY] = messages.encode_state(me)
        return Message(content, reply_to=message)

    return answer


def _begin_round(part: SecureParticipant, known: Participant | None, context: str) -> Participant:
    """Return the client's state at the beginning of a round, with new keys.

    known: state that the client stored last; None if there is none. context: name of the round and attempt, see `read_context`.
    Raises ValueError if `known` has the same context, since a client takes part once in each attempt.
    """
    if known is not None and known.context == context:
        raise ValueError(
            f"{context} has begun already, and a client takes part in it once; the server must give a repetition a new "
            "attempt number"
        )
    return participant.setup(context, part.agreement.threshold, draw_bytes)


def _check_context(known: Participant | None, message: Message) -> Participant:
    context = messages.read_context(message)
    if known is None or known.context != context:
        raise ValueError(f"the server asks about {context}, for which this client has no keys, because it has not begun")
    return known


def _collect(
    part: SecureParticipant, me: Participant, message: Message, train: Callable[[], Message]
) -> tuple[RecordDict, Participant]:
    """Train and return the content of the reply, with the masked update, and this client's new state.

    The content holds metrics only if `part.agreement.reveal` is set.
    """
    me = participant.receive(me, messages.read_sealed(message.content))
    start = message.content[records.WEIGHTS_KEY]
    assert isinstance(start, ArrayRecord)
    shapes = {name: tuple(array.shape) for name, array in start.items()}
    reply = train()
    if reply.has_error():
        raise ValueError(reply.error.reason)
    payload, metrics = records.take_payload(reply.content), reply.content[records.METRICS_KEY]
    update = decode(payload, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    count = int(records.read_metrics(reply.content)[records.NUM_EXAMPLES_KEY])
    words = part.agreement.quantiser.encode({name: t.numpy() for name, t in update.items()}, shapes, count)
    me, masked = participant.mask(me, words)
    content = RecordDict({MASKED_KEY: messages.answer_collect(masked)})
    if part.agreement.reveal:
        content[records.METRICS_KEY] = metrics
    return content, me
