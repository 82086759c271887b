"""Preparation of an update for sending: defense, packing, pseudonym."""

from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from torch import Generator

from defenses.spec import DefenseSpec
from fedsim.flower import records
from fedsim.recording.codec import encode


def put_update(
    content: RecordDict, update: ArrayRecord, defense: DefenseSpec, context: Context, *, rng: Generator, pseudonym: str
) -> None:
    """Apply the defense to `update`, pack it, and add it to a reply under the client's pseudonym.

    The state of the defense is kept in `context.state`.
    """
    if defense.steps:
        tensors = records.to_tensors(update)
        built = defense.build()
        stored = context.state.get("defense")
        state = records.to_tensors(stored) if isinstance(stored, ArrayRecord) else built.init(tensors)
        sent, state = built.apply(tensors, state, rng)
        records.put_payload(content, encode(sent, defense.codec()))
        context.state["defense"] = records.to_arrays(state)
    else:
        records.put_dense(content, update)
    content[records.CLIENT] = ConfigRecord({"pseudonym": pseudonym})
