"""The Flower ClientApp: local training, then the defense, then the wire."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor

from defenses.spec import DefenseSpec
from fedsim import models, records
from fedsim.client.identity import Identity, load_or_draw
from fedsim.schedule import Cursor, batches
from fedsim.training import train
from fedsim.truth import TruthWriter, describe_dataset
from fedsim.wire.codec import encode
from fedsim.wire.observation import DataSpec, ModelSpec, Training


class Examples(Protocol):
    """Training examples: (x, y) by index."""

    def __getitem__(self, indices: Any) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that a client needs beside the messages.

    private:   where the client keeps what is its own; truth: where it writes down what it used.
    described: what truth says of the data set; called once.
    holdings:  from a partition number, the examples of the data set and which of them are this client's.
    seed:      see `load_or_draw`. threads: intra-op threads of one client; None leaves them as they are.
    """

    model: ModelSpec
    data: DataSpec
    training: Training
    defense: DefenseSpec
    private: Path
    truth: Path
    described: Callable[[], dict[str, Any]]
    holdings: Callable[[int], tuple[Examples, NDArray[np.int64]]]
    seed: int | None = None
    device: str = "cpu"
    threads: int | None = 1

    def identity(self, context: Context) -> Identity:
        partition = int(context.node_config["partition-id"])
        return load_or_draw(self.private / f"partition-{partition:05d}", partition, seed=self.seed)


def make_client_app(settings_of: Callable[[Context], Settings]) -> ClientApp:
    """The client's app. `settings_of` may be called for every message: it should remember."""
    app = ClientApp(mods=[defend(settings_of)])

    @app.train()
    def handle(message: Message, context: Context) -> Message:
        settings = settings_of(context)
        with _threads(settings.threads):
            return _train(message, context, settings)

    return app


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads, and leave the process as it was: on the local engine it is not the client's own."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(message: Message, context: Context, settings: Settings) -> Message:
    round, attempt = _number(message, "server-round"), _number(message, "attempt")
    identity = settings.identity(context)
    examples, mine = settings.holdings(int(context.node_config["partition-id"]))
    chosen, cursor = batches(
        _cursor(context),
        len(mine),
        settings.training,
        lambda epoch: identity.order(epoch, len(mine), shuffle=settings.training.shuffle),
    )
    used = [mine[positions] for positions in chosen]
    describe_dataset(settings.truth, settings.described)
    TruthWriter(settings.truth, identity.pseudonym).write(round, attempt, [step.tolist() for step in used])

    device = torch.device(settings.device)
    weights = message.content[records.WEIGHTS]
    assert isinstance(weights, ArrayRecord)
    trained = train(
        models.build(settings.model, settings.data).to(device),
        {name: tensor.to(device) for name, tensor in records.to_tensors(weights).items()},
        [(x.to(device), y.to(device)) for x, y in (examples[step] for step in used)],
        settings.training,
        settings.data,
    )
    epochs = settings.training.epochs or 1
    content = RecordDict(
        {
            records.UPDATE: records.to_arrays(trained.update),
            # no training loss: at batch 1 it says p_y in clear, beside whatever a defense did to the update
            records.METRICS: MetricRecord({records.NUM_EXAMPLES: sum(map(len, used)) // epochs}),
        }
    )
    context.state["cursor"] = ConfigRecord({"epoch": cursor.epoch, "position": cursor.position})
    return Message(content, reply_to=message)


def defend(settings_of: Callable[[Context], Settings]) -> Callable[..., Message]:
    """A mod that turns the update into what leaves the client: defense, codec, pseudonym."""

    def mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        if reply.has_error() or records.UPDATE not in reply.content:
            return reply
        settings = settings_of(context)
        identity = settings.identity(context)
        record = reply.content[records.UPDATE]
        assert isinstance(record, ArrayRecord)
        update = records.to_tensors(record)
        defense = settings.defense.build()
        stored = context.state.get("defense")
        state = records.to_tensors(stored) if isinstance(stored, ArrayRecord) else defense.init(update)
        update_sent, state = defense.apply(update, state, identity.generator(_number(message, "server-round")))
        del reply.content[records.UPDATE]
        records.put_payload(reply.content, encode(update_sent))
        reply.content[records.CLIENT] = ConfigRecord({"pseudonym": identity.pseudonym})
        context.state["defense"] = records.to_arrays(state)
        return reply

    return mod


def _number(message: Message, key: str) -> int:
    """A number out of what the server prescribes for this round."""
    config = message.content[records.CONFIG]
    assert isinstance(config, ConfigRecord)
    return int(config[key])  # type: ignore[arg-type]


def _cursor(context: Context) -> Cursor:
    stored = context.state.get("cursor")
    return Cursor(int(stored["epoch"]), int(stored["position"])) if isinstance(stored, ConfigRecord) else Cursor()  # type: ignore[arg-type]
