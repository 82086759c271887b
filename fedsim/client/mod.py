"""Mod for the clients of any Flower app, which sends updates with a defense and a pseudonym."""

from collections.abc import Callable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Generator, Tensor

from defenses.spec import DefenseSpec
from fedsim.client.identity import ClientIdentity, draw_identity
from fedsim.flower import records
from fedsim.flower.records import CallNext
from fedsim.recording.codec import encode

BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
"""Names of batch norm's buffers in PyTorch, without the name of the layer: the part after the last dot."""


def update_mod(
    defense: str = "", *, buffers: tuple[str, ...] = BATCH_NORM, key: str = records.WEIGHTS_KEY
) -> Callable[[Message, Context, CallNext], Message]:
    """Return a mod that replaces the trained weights in a reply by the update (trained minus received), with a defense applied.

    Use it in `ClientApp(mods=[...])` of an app whose strategy is recorded with `fedsim.server.record`. Put it first, so that
    changes of the weights by other mods are part of the update. It affects training messages only. It also adds a pseudonym of
    the client to the reply. Pseudonym, secret and the state of the defense are kept in Flower's `Context.state`.

    defense: specification of the defense of the update, such as "clip(1) | gaussian(0.1)".
    buffers: tensors that are sent as they are after training, not as differences and without the defense, each given as the part
             of its name after the last dot: "running_mean" selects "bn1.running_mean", and "mean" would not.
    key:     name of the record of weights, in the server's messages and in the app's replies.

    Raises ValueError for an invalid defense and, during a round, if there are no weights under `key` or the tensors in message
    and reply differ in name.
    """
    spec = DefenseSpec.parse(defense)

    def apply(message: Message, context: Context, call_next: CallNext) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        sent = _read_weights(message.content, key, "the server's message")  # read first, since the app may empty the record
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        trained = _read_weights(reply.content, key, "the app's reply")
        if sent.keys() != trained.keys():
            unmatched = sorted(sent.keys() ^ trained.keys())[0]
            where = "the server's message" if unmatched in sent else "the app's reply"
            raise ValueError(
                f"tensor {unmatched!r} is only in {where}; the server's message and the app's reply must hold the same tensors"
            )
        beside = {name: tensor for name, tensor in trained.items() if name.rpartition(".")[2] in buffers}
        update = {name: _subtract(tensor, sent[name]) for name, tensor in trained.items() if name not in beside}
        del reply.content[key]
        identity, number = _count_update(context)
        rng = identity.make_generator(number)
        put_update(reply.content, records.to_arrays(update), spec, context, rng=rng, pseudonym=identity.pseudonym)
        if beside:
            reply.content[records.BUFFERS_KEY] = records.to_arrays(beside)
        return reply

    return apply


def _read_weights(content: RecordDict, key: str, where: str) -> dict[str, Tensor]:
    record = content.get(key)
    if not isinstance(record, ArrayRecord):
        there = ", ".join(sorted(content.array_records)) or "none"
        raise ValueError(f"{where} has no record of weights {key!r}; it has {there}. Name it in update_mod(key=...)")
    return records.to_tensors(record)


def _subtract(trained: Tensor, sent: Tensor) -> Tensor:
    """Return trained minus sent, computed in float64, in the dtype of `trained`, to which `sent` is rounded first."""
    return (trained.double() - sent.to(trained.dtype).double()).to(trained.dtype)


def _count_update(context: Context) -> tuple[ClientIdentity, int]:
    """Count one more update in `context.state`, and return the client's identity and this count, which is 1 for the first update.

    The count seeds the noise. The server's round number might repeat, and then the noise would repeat as well.
    """
    stored: Mapping[str, object] | None = context.state.config_records.get("identity")
    drawn = draw_identity() if stored is None else ClientIdentity(str(stored["pseudonym"]), str(stored["secret"]))
    number = 1 if stored is None else int(str(stored["updates"])) + 1
    context.state["identity"] = ConfigRecord({"pseudonym": drawn.pseudonym, "secret": drawn.secret, "updates": number})
    return drawn, number


def put_update(
    content: RecordDict, update: ArrayRecord, defense: DefenseSpec, context: Context, *, rng: Generator, pseudonym: str
) -> None:
    """Apply the defense to `update`, pack it, and add it and the client's pseudonym to `content`, the records of a reply.

    The state of the defense is kept in `context.state`. rng: generator from which the defense draws.
    """
    if defense.steps:
        tensors = records.to_tensors(update)
        built = defense.build()
        stored = context.state.get("defense")
        state = records.to_tensors(stored) if isinstance(stored, ArrayRecord) else built.init(tensors)
        sent, state = built.apply(tensors, state, rng)
        records.put_payload(content, encode(sent, defense.choose_codec()))
        context.state["defense"] = records.to_arrays(state)
    else:
        records.put_dense(content, update)
    content[records.CLIENT_KEY] = ConfigRecord({"pseudonym": pseudonym})
