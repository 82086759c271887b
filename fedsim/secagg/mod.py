"""Secure aggregation on the client, as a Flower mod (a wrapper of the client app) that masks updates."""

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
    """A client's settings for secure aggregation.

    agreement: settings of the protocol, from the client's own configuration and not from the server.
    pseudonym: the client's name in its answers.
    """

    agreement: Agreement
    pseudonym: str


def make_secure_mod(part_of: Callable[[Context], SecureParticipant | None]) -> Callable[[Message, Context, CallNext], Message]:
    """Return a Flower mod that answers the exchanges of secure aggregation (setup, share, collect, unmask).

    In the exchange "collect" it calls the client app, to train, and masks the update. Messages that do not ask for training go to
    the client app unchanged, as do all messages if neither server nor client uses secure aggregation. Make it the outermost mod,
    so that it masks what the other mods return.

    part_of: returns the client's settings, or None for a client that does not use secure aggregation.
    Keys and shares are stored only in Flower's `Context.state`. They are deleted in the exchange "unmask", or replaced when the
    next round begins. They are random also in a simulation with a seed.
    The mod raises ValueError, which Flower turns into an error reply, if only one of server and client uses secure aggregation,
    if the server asks for exchanges out of order, and for requests that the protocol forbids.
    """

    def answer(message: Message, context: Context, call_next: CallNext) -> Message:
        part, stage = part_of(context), messages.read_stage(message.content)
        if message.metadata.message_type.partition(".")[0] != "train" or (part is None and stage is None):
            return call_next(message, context)
        if part is None or stage is None:
            theirs, ours = ("does not use", "uses") if stage is None else ("uses", "does not use")
            raise ValueError(
                f"the server {theirs} secure aggregation, and this client {ours} it; give both the same experiment file"
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
            me, opened = participant.unmask(_check_context(known, message), *messages.read_share_request(message.content))
            content[EXCHANGE_KEY] = messages.answer_unmask(opened)
        content[records.CLIENT_KEY] = ConfigRecord({"pseudonym": part.pseudonym})
        context.state[EXCHANGE_KEY] = messages.encode_state(me)
        return Message(content, reply_to=message)

    return answer


def _begin_round(part: SecureParticipant, known: Participant | None, context: str) -> Participant:
    """Return the client's state at the beginning of a round, with new keys.

    known: the state that the client stored last; None if there is none. context: name of the round and of the attempt at it,
    such as "round 3, attempt 1".
    Raises ValueError if `known` has the same context, since a client takes part once in each attempt.
    """
    if known is not None and known.context == context:
        raise ValueError(
            f"{context} has begun already, and a client takes part in it only once; the server must repeat a round with a new "
            "attempt number"
        )
    return participant.setup(context, part.agreement.threshold, draw_bytes)


def _check_context(known: Participant | None, message: Message) -> Participant:
    context = messages.read_context(message)
    if known is None or known.context != context:
        raise ValueError(f"this client has no keys for {context}, because it did not answer exchange 'setup' of this attempt")
    return known


def _collect(
    part: SecureParticipant, me: Participant, message: Message, train: Callable[[], Message]
) -> tuple[RecordDict, Participant]:
    """Train, and return the content of the reply, which holds the masked update, and the client's new state.

    train: calls the client app. The content holds the metrics, with the number of examples, only if `part.agreement.reveal` is
    set. Raises ValueError if the shares in `message` are refused, training fails, or the update cannot be quantised.
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
    count = int(records.take_num_examples(records.read_metrics(reply.content)))
    words = part.agreement.quantiser.encode({name: t.numpy() for name, t in update.items()}, shapes, count)
    me, masked = participant.mask(me, words)
    content = RecordDict({MASKED_KEY: messages.answer_collect(masked)})
    if part.agreement.reveal:
        content[records.METRICS_KEY] = metrics
    return content, me
