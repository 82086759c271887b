"""State of a client between rounds, on disk, so that a round can be repeated after a crash of the server."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedsim.flower import records
from fedsim.flower.records import CallNext
from fedsim.recording.files import remove, write_tensors
from fedsim.recording.safe_files import open_tensors, parse_json
from fedsim.recording.tensor_files import MAX_BYTES


def make_memory_mod(folder_of: Callable[[Context], Path]) -> Callable[[Message, Context, CallNext], Message]:
    """Return a mod that loads Flower's `Context.state` from the client's folder before a round and stores it there afterwards.

    A mod is a function around Flower's handling of a message. In the app's list of mods, this one must come before all mods whose
    state it stores; other mods may come before it.
    A round starts from the state after the rounds before it, so that a repeated round gives the same result. The states of the
    client's last two rounds are kept. Changes by a round that fails are discarded. After each round, `Context.state` is empty.
    folder_of: returns the client's folder.
    """

    def run(message: Message, context: Context, call_next: CallNext) -> Message:
        round, folder = records.read_number(message, "server-round"), folder_of(context)
        context.state = load_state(folder, before=round)
        reply = call_next(message, context)
        if not reply.has_error():
            store_state(folder, round, context.state)
        context.state = RecordDict()  # the state is stored above, so that Flower need not transfer it
        return reply

    return run


def load_state(folder: Path, *, before: int) -> RecordDict:
    """Return the state that was stored after the latest round before round `before`; empty if there is none."""
    earlier = [number for number in _list_rounds(folder) if number < before]
    if not earlier:
        return RecordDict()
    with open_tensors(folder, _make_name(max(earlier)), limit=MAX_BYTES) as file:
        facts = parse_json(file.metadata()["facts"], finite=False)
        arrays = {
            key: records.to_arrays({name: file.get_tensor(f"{key}/{name}") for name in names})
            for key, names in facts["arrays"].items()
        }
    configs = {key: ConfigRecord(values) for key, values in facts["configs"].items()}
    return RecordDict({**arrays, **configs})


def store_state(folder: Path, round: int, state: RecordDict) -> None:
    """Store the `ArrayRecord`s and `ConfigRecord`s of `state` as the client's state after `round`; leave out other records.

    Stored states of later rounds are deleted, and states of earlier rounds except the latest of them.
    """
    arrays = {key: records.to_tensors(record) for key, record in state.items() if isinstance(record, ArrayRecord)}
    configs = {key: dict(record) for key, record in state.items() if isinstance(record, ConfigRecord)}
    tensors = {f"{key}/{name}": tensor for key, named in arrays.items() for name, tensor in named.items()}
    facts = {"arrays": {key: list(named) for key, named in arrays.items()}, "configs": configs}
    write_tensors(folder / _make_name(round), tensors, {"facts": json.dumps(facts)})
    kept = _list_rounds(folder)
    last = max((number for number in kept if number < round), default=0)
    for number in kept:
        if number > round or number < last:
            remove(folder / _make_name(number))


def _list_rounds(folder: Path) -> list[int]:
    names = (name for name in os.listdir(folder) if name.startswith("state-")) if folder.exists() else ()
    return [int(name.removeprefix("state-").removesuffix(".safetensors")) for name in names]


def _make_name(round: int) -> str:
    return f"state-{round:05d}.safetensors"
