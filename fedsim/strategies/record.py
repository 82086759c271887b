"""Recording of any Flower app by wrapping its strategy."""

from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from logging import INFO
from pathlib import Path
from time import gmtime, strftime
from typing import TypeVar, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import nn

from defenses.spec import DefenseSpec
from fedsim import models
from fedsim.recording.manifest import Manifest
from fedsim.recording.observation import DataSpec, ModelSpec
from fedsim.recording.selection import RecordSelection
from fedsim.recording.training import Training
from fedsim.recording.writer import Recorder
from fedsim.strategies.older_strategy import SentMessages, is_older, watch_older
from fedsim.strategies.recording_strategy import RecordingStrategy
from fedsim.strategies.wrapper import Wrapper, find_innermost

PART_ADVICE = (
    "if the server sends only a part of it on purpose, such as a head or adapters, name a function whose network holds the other "
    "weights as buffers that are not saved (docs/tutorials/flower-app.md shows one)"
)
AnyStrategy = TypeVar("AnyStrategy")
"""A strategy of `flwr.serverapp.strategy`, or of the older `flwr.server.strategy`."""


def record(
    strategy: AnyStrategy,
    out: Path | str,
    *,
    model: str | ModelSpec,
    training: Training,
    data: DataSpec,
    defense: str = "",
    gradient: str = "plain",
    inputs: str = "",
    rounds: str = "all",
    clients: str = "all",
) -> AnyStrategy:
    """Make a Flower strategy record the weights it sends and the replies it receives, and return the strategy itself.

    What the strategy computes does not change.

    strategy: the outermost strategy, if one wraps another. If it clips or adds noise, updates are recorded before that. A
              strategy of the older module flwr.server.strategy is recorded as well, for clients of type NumPyClient that send
              their weights as a list in the order of the state dict, with or without buffers.
    out:      folder of the run, in which the recording is written. A relative path starts in the working directory of this
              process. With `flwr run`, that is the folder in which the local SuperLink was started. The SuperLink keeps running,
              so that a later `flwr run` from another folder still records in the first one. The full path is logged.
    model:    name of a model of this project, or `module:function` of the app, which is imported; for the arguments of
              the function see `fedsim.models.admit`. The network's state dict must have the names that the server sends; the
              server need not send buffers.
    training: how the clients train, which attacks rely on. These settings are not sent to the clients.
    data:     shape, number of classes and normalisation of the clients' examples.
    defense:  how the clients change their updates before they send them, such as "gaussian(std=0.01)", if they use
              `fedsim.client.update_mod`; "" if they do not.
    gradient: how the clients change their gradients, such as "dp_sgd(max_norm=1, noise=1.1)"; "plain" if they do not.
    inputs:   how the clients change their inputs; "" if they do not.
    rounds:   rounds to record, such as "1-20" or "1-3,7".
    clients:  clients to record: "all", names such as "3f2a,77b0", or a number. "5" stands for five clients, the same in all
              recorded rounds: the first, by round and then by name, that send an update in a recorded round.

    Calling `record` logs what attacks will assume about the updates, with the reasons.

    Raises TypeError if `strategy` is not a Flower strategy, and ValueError if `out` holds a recording already or another argument
    is invalid. Later, when a round begins, the strategy raises ValueError if the weights that it sends do not fit `model`, if it
    sends different weights to different clients, if it has recorded this round before, as in a second run, or if `out` has got
    a recording since.
    """
    _check_interface(strategy)
    folder = Path(out).expanduser().absolute()
    where = "" if Path(out).expanduser().is_absolute() else _explain_relative(out)
    _check_new(folder, where)
    spec, network, training = _build_network(model, training, data)
    weights = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    wanted = RecordSelection.parse(rounds, clients)
    chosen = DefenseSpec.parse(defense, learning_rate=training.learning_rate)
    manifest = Manifest(
        name=folder.name,
        model=spec,
        data=data,
        training=training,
        defense=chosen,
        gradient=gradient,
        inputs=inputs,
        codec=chosen.choose_codec(),
        created=strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()),
        software={package: _find_version(package) for package in ("fedleak", "flwr", "torch", "numpy")},
    )
    warnings = (*data.list_doubts(), *_list_scale_doubts(data), *models.list_warnings(network, training, data))
    believed = (*training.list_beliefs(), *_list_proximal(strategy, training))
    for sentence in (f"will record in {folder}{where}", *believed, *warnings):
        log(INFO, "fedleak: %s", sentence)
    messages = SentMessages()
    own: Strategy = messages if is_older(strategy) else _UserStrategy(cast(Strategy, strategy))
    state = network.state_dict()

    def start() -> RecordingStrategy:
        _check_new(folder, where)
        recorder = Recorder(folder / "recording", manifest)
        log(INFO, "fedleak records this federation in %s", folder)
        types = models.find_client_types(network)
        buffers = frozenset(state) - weights
        return RecordingStrategy(
            own,
            recorder,
            wanted=wanted,
            foreign=True,
            buffers=buffers,
            types=types,
            stated=training,
            is_defended=bool(chosen.steps) or gradient != "plain",
        )

    watched = _Watched(own, network, str(spec), start)
    # methods are replaced on the instance: a wrapper would be bypassed by a strategy's own `start`, and apps read its attributes
    if is_older(strategy):
        watch_older(strategy, watched, messages, network)
    else:
        vars(strategy).update(configure_train=watched.configure_train, aggregate_train=watched.aggregate_train)
    return strategy


def _build_network(model: str | ModelSpec, training: Training, data: DataSpec) -> tuple[ModelSpec, nn.Module, Training]:
    """Return the specification of the model, its network, and the training settings with the mode and precision of the network.

    Raises ValueError if the network does not suit the training settings or the data.
    """
    if not isinstance(model, str | ModelSpec):
        raise ValueError(
            "model must be a name as text, such as 'task:Net' for the class or function Net in task.py, since other processes "
            f"import it by this name; got {model if isinstance(model, type) else type(model)}"
        )
    spec = model if isinstance(model, ModelSpec) else ModelSpec(name=model)
    if ":" in spec.name and spec.name not in models.MODELS:
        models.admit(spec.name)
    network = models.build(spec, data)
    training = models.adopt_precision(network, models.require_mode(network, training, data))
    models.check_loss(network, training, data)
    return spec, network, training


def _list_scale_doubts(data: DataSpec) -> list[str]:
    """Return a list with a warning if the mean of images seems to be stated for pixels from 0 to 255; otherwise empty."""
    if not data.is_image or max(data.mean) <= 1:
        return []
    return [
        f"attacks assume images with values from 0 to 1 before the normalisation, whose mean cannot be {data.mean}; if it is "
        "that of pixels from 0 to 255, divide mean and std by 255"
    ]


class _UserStrategy(Wrapper):
    """The user's strategy with its original `configure_train` and `aggregate_train`, which `record` replaces."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__(strategy)
        self._configure, self._aggregate = strategy.configure_train, strategy.aggregate_train

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return self._configure(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self._aggregate(server_round, replies)


class _Watched(Wrapper):
    """A strategy that creates the recording when the first round begins, and records the rounds that the user selected.

    At the beginning of a round it raises ValueError if the weights sent do not fit the network the user named, if clients are
    sent different weights, or if the round was recorded before.
    """

    def __init__(self, inner: Strategy, network: nn.Module, name: str, start: Callable[[], RecordingStrategy]) -> None:
        super().__init__(inner)
        self._shapes = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
        self._optional = frozenset(models.list_buffers(network))
        self._name, self._start = name, start
        self._recording: RecordingStrategy | None = None
        self._round = 0

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        self._check(arrays)
        if server_round <= self._round:
            raise ValueError(f"round {server_round} is recorded already; record() a new strategy in another folder for a new run")
        if self._recording is None:
            self._recording = self._start()
        self._round = server_round
        messages = list(self._recording.configure_train(server_round, arrays, config, grid))
        for message in messages:
            for sent in message.content.array_records.values():
                if sent is not arrays and dict(sent) != dict(arrays):
                    raise ValueError(
                        f"node {message.metadata.dst_node_id} is sent arrays other than the global weights, but a recording "
                        "stores only one set of weights per round; use a strategy that sends all clients the same weights and no "
                        "other arrays"
                    )
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return (self._recording or self.inner).aggregate_train(server_round, replies)

    def _check(self, arrays: ArrayRecord) -> None:
        sent = {key: tuple(array.shape) for key, array in arrays.items()}
        part = f"; {PART_ADVICE}" if sent and all(self._shapes.get(key) == shape for key, shape in sent.items()) else ""
        for key in sorted(sent.keys() | self._shapes.keys()):
            here, there = self._shapes.get(key), sent.get(key)
            if here == there or (there is None and key in self._optional):
                continue
            raise ValueError(
                f"the server sends {_describe_shape(key, there)}, and the model {self._name} has {_describe_shape(key, here)}; "
                f"give record() the network that is trained{part}"
            )


def _describe_shape(name: str, shape: tuple[int, ...] | None) -> str:
    return f"no {name!r}" if shape is None else f"{name!r} of shape {shape}"


def _list_proximal(strategy: object, training: Training) -> list[str]:
    """Return a sentence if clients add FedProx's proximal term to their loss, which attacks do not simulate; else an empty list.

    The gradient of this term is zero in a round's first step.
    """
    weight = getattr(find_innermost(strategy) if isinstance(strategy, Strategy) else strategy, "proximal_mu", 0)
    if not weight or training.steps == 1:
        return []
    return [
        f"attacks do not simulate the proximal term of FedProx (proximal_mu={weight:g}), which acts from the second local step "
        "on, so that a search fits less closely"
    ]


def _check_new(folder: Path, where: str) -> None:
    if (folder / "recording").exists():
        raise ValueError(
            f"{folder}{where} holds a recording already; choose another folder, or remove it with `fedsim delete {folder}`"
        )


def _explain_relative(out: Path | str) -> str:
    return (
        f" ({str(out)!r} is relative and starts in the folder of this process; with `flwr run`, that is where the local "
        "SuperLink was started, also for later runs)"
    )


def _check_interface(strategy: object) -> None:
    if not is_older(strategy) and not (hasattr(strategy, "configure_train") and hasattr(strategy, "aggregate_train")):
        kind = type(strategy)
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} is not a Flower strategy: record() needs one of flwr.serverapp.strategy, or "
            "of the older flwr.server.strategy"
        )


def _find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
