"""The Flower ClientApp: local training, defense, and packing of the update."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import Tensor, nn

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec, PublicPool, to_one_hot
from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.client.identity import ClientIdentity, load_or_draw
from fedsim.client.memory import make_memory_mod
from fedsim.client.mod import put_update
from fedsim.flower import records
from fedsim.recording.observation import DataSpec, ModelSpec
from fedsim.recording.training import Training
from fedsim.secagg.mod import SecureParticipant, make_secure_mod
from fedsim.secagg.protocol.terms import Agreement
from fedsim.training.batches import Cursor, choose_versions, draw_batches
from fedsim.training.local import Batch, train
from fedsim.truth import TruthWriter, describe_dataset


class IndexedExamples(Protocol):
    """Training examples; indexing by an array of M indices returns x (M, *shape) in [0, 1] and y (M,)."""

    def __getitem__(self, indices: Any) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Settings of the clients of a federation that one process runs.

    model, data, training, defense, gradient, inputs: the public settings of the run, as in `Manifest`.
    private:   folder in which each client has a folder for its identity and state, see `find_folder`.
    truth:     one folder for all these clients, in which each writes a file of the indices of the examples that it used.
    described: returns the description of the data set, which is written to `truth`; called only if `truth` has no description
               yet.
    holdings:  maps a partition number to all examples of the data set, and the indices of the examples that the client of this
               partition holds.
    public:    returns the public examples that `inputs`, a defense of the training examples, mixes in, or None.
    secure:    settings of secure aggregation that all parties agreed on; None without secure aggregation.
    seed:      seed of the clients' identities, see `load_or_draw`. device: PyTorch device on which the clients train.
    threads:   intra-op threads of one client; None does not change them.
    canaries:  number of pairs of examples for an audit; the client trains on one example of each pair, see `choose_versions`.
    """

    model: ModelSpec
    data: DataSpec
    training: Training
    defense: DefenseSpec
    private: Path
    truth: Path
    described: Callable[[], dict[str, Any]]
    holdings: Callable[[int], tuple[IndexedExamples, NDArray[np.int64]]]
    gradient: GradientSpec = field(default_factory=GradientSpec)
    inputs: InputsSpec = field(default_factory=InputsSpec)
    public: Callable[[], PublicPool | None] = lambda: None
    seed: int | None = None
    device: str = "cpu"
    threads: int | None = 1
    secure: Agreement | None = None
    canaries: int = 0

    def find_folder(self, context: Context) -> Path:
        """Return the private folder of the client whose partition number is in `context`."""
        return self.private / f"partition-{int(context.node_config['partition-id']):05d}"

    def load_identity(self, context: Context) -> ClientIdentity:
        return load_or_draw(self.find_folder(context), int(context.node_config["partition-id"]), seed=self.seed)

    def make_participant(self, context: Context) -> SecureParticipant | None:
        """Return the settings of secure aggregation (`secure`) with this client's pseudonym; None without secure aggregation."""
        if self.secure is None:
            return None
        identity = self.load_identity(context)
        return SecureParticipant(agreement=self.secure, pseudonym=identity.pseudonym)


def make_client_app(settings_of: Callable[[Context], ClientSettings]) -> ClientApp:
    """Return the Flower ClientApp that trains, applies the defense, packs the update and, with secure aggregation, masks it.

    settings_of: returns the client's settings. It is called several times for every message, so it should cache its result.
    """
    masking = make_secure_mod(lambda context: settings_of(context).make_participant(context))
    app = ClientApp(
        mods=[masking, make_memory_mod(lambda context: settings_of(context).find_folder(context)), _make_defense_mod(settings_of)]
    )

    @app.train()
    def handle(message: Message, context: Context) -> Message:
        settings = settings_of(context)
        with _set_threads(settings.threads):
            return _train(message, context, settings)

    return app


@contextmanager
def _set_threads(count: int | None) -> Iterator[None]:
    """Set the number of intra-op threads within the `with` block and restore it afterwards. None does not change it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _train(message: Message, context: Context, settings: ClientSettings) -> Message:
    round, attempt = records.read_number(message, "server-round"), records.read_number(message, "attempt")
    identity = settings.load_identity(context)
    examples, indices = settings.holdings(int(context.node_config["partition-id"]))
    truth = TruthWriter(settings.truth, identity.pseudonym)
    if settings.canaries:
        indices, pairs = choose_versions(indices, settings.canaries, identity.flip_coins(settings.canaries))
        truth.write_canaries(pairs)
    chosen, cursor = draw_batches(
        _read_cursor(context),
        len(indices),
        settings.training,
        lambda epoch: identity.draw_order(epoch, len(indices), shuffle=settings.training.shuffle),
    )
    used = [indices[positions] for positions in chosen]
    describe_dataset(settings.truth, settings.described)
    truth.write(round, attempt, [step.tolist() for step in used])

    device, model = torch.device(settings.device), _build_model(settings.model, settings.data, settings.device)
    weights, buffers = _split_weights(message, context, models.list_buffers(model))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(identity.derive_training_seed(round))
        trained = train(
            model,
            {name: tensor.to(device) for name, tensor in weights.items()},
            [(x.to(device), y.to(device)) for x, y in _mix_batches((examples[step] for step in used), settings, identity, round)],
            settings.training,
            settings.data,
            buffers={name: tensor.to(device) for name, tensor in buffers.items()},
            rule=settings.gradient.build(),
            rng=identity.make_generator(round, "gradient"),
        )
    epochs = settings.training.epochs or 1
    content = RecordDict(
        {
            records.UPDATE_KEY: records.to_arrays(trained.update),
            # no training loss is sent: at batch size 1 it reveals p_y, whatever the defense does to the update
            records.METRICS_KEY: MetricRecord({records.NUM_EXAMPLES_KEY: sum(map(len, used)) // epochs}),
        }
    )
    context.state["cursor"] = ConfigRecord({"epoch": cursor.epoch, "position": cursor.position})
    if settings.training.buffers == "shared" and trained.buffers:
        content[records.BUFFERS_KEY] = records.to_arrays(trained.buffers)
    elif settings.training.buffers == "local" and trained.buffers:
        context.state[records.BUFFERS_KEY] = records.to_arrays(trained.buffers)
    return Message(content, reply_to=message)


def _mix_batches(chosen: Iterable[Batch], settings: ClientSettings, identity: ClientIdentity, round: int) -> Iterable[Batch]:
    """Return the batches (x, y) to train on, after `settings.inputs`, a defense of the examples such as mixup.

    Without such a defense, the batches are unchanged. With one, y are class probabilities (N, K).
    """
    mixing = settings.inputs.build()
    if mixing is None:
        return chosen
    rng, pool = identity.make_generator(round, "inputs"), settings.public()
    return (mixing.mix(x, to_one_hot(y, settings.data.num_classes), rng, pool) for x, y in chosen)


@lru_cache(maxsize=2)
def _build(spec: str, data: DataSpec, device: str) -> nn.Module:
    return models.build(ModelSpec(**json.loads(spec)), data).to(device)


def _build_model(spec: ModelSpec, data: DataSpec, device: str) -> nn.Module:
    """Return the network, which is cached in this process; `train` does not change its weights."""
    return _build(json.dumps({"name": spec.name, "arguments": dict(spec.arguments), "network": spec.network}), data, device)


def _split_weights(message: Message, context: Context, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights in a message, and the buffers to train with, as two dicts by name.

    names: names of the model's buffers. The buffers are those that the client stored after its last training, or else those in
    the message. The second dict is empty if there are neither; training then begins with the model's initial buffers.
    """
    record, own = message.content[records.WEIGHTS_KEY], context.state.get(records.BUFFERS_KEY)
    assert isinstance(record, ArrayRecord)
    weights = records.to_tensors(record)
    buffers = {name: weights.pop(name) for name in names if name in weights}
    return weights, records.to_tensors(own) if isinstance(own, ArrayRecord) else buffers


def _make_defense_mod(settings_of: Callable[[Context], ClientSettings]) -> Callable[..., Message]:
    """Return a mod that applies the client's defense to the update in a reply, packs it, and adds the client's pseudonym.

    A mod is a function around Flower's handling of a message.
    """

    def apply(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        reply = call_next(message, context)
        if reply.has_error() or records.UPDATE_KEY not in reply.content:
            return reply
        settings = settings_of(context)
        identity = settings.load_identity(context)
        update = reply.content[records.UPDATE_KEY]
        assert isinstance(update, ArrayRecord)
        del reply.content[records.UPDATE_KEY]
        rng = identity.make_generator(records.read_number(message, "server-round"))
        put_update(reply.content, update, settings.defense, context, rng=rng, pseudonym=identity.pseudonym)
        return reply

    return apply


def _read_cursor(context: Context) -> Cursor:
    stored = context.state.get("cursor")
    return Cursor(int(stored["epoch"]), int(stored["position"])) if isinstance(stored, ConfigRecord) else Cursor()  # type: ignore[arg-type]
