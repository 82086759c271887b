"""A federation run: an experiment with the folders and devices of its parties."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from time import gmtime, strftime

import numpy as np
import torch
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray
from torch import Tensor, nn

from defenses.gradients import GradientSpec
from defenses.inputs import InputsSpec
from defenses.networks import NetworkSpec
from defenses.registry import references
from fedsim import data as datasets
from fedsim import models
from fedsim.config.experiment import Experiment, read, validate
from fedsim.data import client_parts as parts
from fedsim.data import partition
from fedsim.data.public_pool import load_public_images
from fedsim.engine.locations import SIMULATION_LOCATIONS, PartyLocations
from fedsim.recording.files import make_private, write_bytes, write_json
from fedsim.recording.manifest import Manifest, make_name
from fedsim.recording.masked_vectors import MASKED_CODEC
from fedsim.recording.observation import DataSpec, ModelSpec
from fedsim.recording.round_metrics import read_metrics
from fedsim.recording.run_check import check_run
from fedsim.recording.safe_files import read_json
from fedsim.recording.selection import RecordSelection
from fedsim.recording.training import Training
from fedsim.server.checkpoint import count_rounds
from fedsim.strategies import names as strategies
from fedsim.training.local import train

STATEFUL_STRATEGIES = ("FedAdagrad", "FedAdam", "FedAvgM", "FedYogi")
"""Strategies whose state has up to three tensors per tensor of the model."""


class UnfinishedRun(ValueError):
    """Error for a run that was stopped before its last round and that the user did not ask to resume."""


@dataclass(frozen=True, kw_only=True)
class FederationRun:
    """An experiment, with the folders and devices on which one party (server, client or whole simulation) runs it.

    out:         folder of the run.
    device:      "cpu", a CUDA device such as "cuda", or "auto" for CUDA if available.
    client_seed: seed of the clients' secrets, from which each client draws its noise and other random choices. None draws the
                 secrets from the operating system. It is no part of the experiment.
    threads:     PyTorch's intra-op threads of one client; None does not change them.
    resume:      whether to continue an unfinished run.
    locations:   data set and folders of this party; by default everybody has the data, and everything is in `out`.
    code:        names `module:function` of code that the local user allowed to be imported.
    """

    experiment: Experiment
    out: Path
    device: str = "auto"
    client_seed: int | None = None
    threads: int | None = 1
    resume: bool = False
    locations: PartyLocations = SIMULATION_LOCATIONS
    code: tuple[str, ...] = field(default_factory=references.list_admitted)

    def admit_code(self) -> None:
        """Allow the names `self.code` in a Ray worker, as the user allowed them in the command. Nothing is imported yet."""
        references.remember_admitted(*self.code)

    def make_model_spec(self) -> ModelSpec:
        named = self.experiment.model
        network = str(NetworkSpec.parse(self.experiment.network))
        return ModelSpec(name=named.name, arguments=named.arguments, network=network)

    def load_data(self) -> datasets.Dataset:
        return self.locations.load_dataset() or datasets.load(self.experiment.data.name, **self.experiment.data.arguments)

    def split(self) -> list[NDArray[np.int64]]:
        """Load and split the experiment's data set; return a list with the indices (n,) of each client's training examples."""
        return _split(self.experiment.to_toml())

    def count_examples(self) -> list[int]:
        """Return a list of the number of examples that each client trains on.

        With canaries, which are pairs of examples for an audit of leakage, a client trains on one of each pair, and the other is
        not counted. If `locations.public` is set, as on a server without data, the sizes are read there, in ascending order
        instead of the clients' order.
        Raises ValueError if that folder lists another number of clients than the experiment.
        """
        canaries = self.experiment.clients.canaries
        if self.locations.public is None:
            return [len(part) - canaries for part in self.split()]
        found = parts.read_sizes(self.locations.public)
        if len(found) != self.experiment.clients.count:
            raise ValueError(
                f"{self.locations.public} lists the sizes of {len(found)} clients, and clients.count = "
                f"{self.experiment.clients.count}; run fedsim split again, or correct clients.count"
            )
        return [size - canaries for size in found]

    def resolve_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def build_strategy(self) -> Strategy:
        named, clients = self.experiment.strategy, self.experiment.clients
        return strategies.build(named.name, clients=clients.count, fraction=clients.fraction, **named.arguments)

    def check(self) -> None:
        """Raise an error, mostly ValueError, if data, network, loss, defenses, strategy, sizes and device do not suit each other.

        Data, network and defenses are loaded and tried on at most two examples. This is done before a run, so that the run does
        not fail later.
        """
        with _name_setting("data", self.experiment.data.name):
            data = self.load_data()
            x, y = _take_sample(data, 1)
            x = data.spec.normalise(x)
        with _name_setting("model", self.experiment.model.name), torch.no_grad():
            model = models.build(self.make_model_spec(), data.spec)
            models.find_loss(self.experiment.training.loss)(model.eval()(x), y)
        self._require_mode(model, data.spec)
        with _name_setting("inputs", self.experiment.inputs):
            load_public_images(InputsSpec.parse(self.experiment.inputs), data)
        with _name_setting("gradient", self.experiment.gradient):
            self._try_rule(model, data)
        with _name_setting("defense", self.experiment.defense):
            self.experiment.parse_defense().build().init(dict(model.named_parameters()))
        with _name_setting("strategy", self.experiment.strategy.name):
            self.build_strategy()
        with _name_setting("partition", self.experiment.partition.name):
            sizes = self.count_examples()
        training, canaries = self.experiment.training, self.experiment.clients.canaries
        fewest = min(sizes) + canaries
        if fewest < 2 * canaries:
            raise ValueError(
                f"clients.canaries = {canaries} requires {2 * canaries} examples per client, two for each canary, but the "
                f"smallest client has only {fewest}; lower clients.canaries to at most {fewest // 2}"
            )
        if training.drop_last and min(sizes) < training.batch_size:
            raise ValueError(
                f"a client holds {min(sizes)} examples, which do not fill one batch of {training.batch_size}, "
                "and training.drop_last is set; lower batch_size or use fewer clients"
            )
        agreement = self.experiment.settle_agreement()
        if agreement and training.epochs and max(sizes) > agreement.max_weight:
            raise ValueError(
                f"a client holds {max(sizes)} examples, and secure_aggregation.max_weight is {agreement.max_weight}; "
                f"set it to {max(sizes)} or more"
            )
        if self.device not in ("auto", "cpu") and not (self.device.startswith("cuda") and torch.cuda.is_available()):
            raise ValueError(f"device {self.device!r} is not available on this machine; use cpu")

    def _require_mode(self, model: nn.Module, spec: DataSpec) -> Training:
        """Return the training settings with a mode, "train" or "eval".

        If none is stated, it is "eval". Raises ValueError if none is stated and the network computes differently in the two
        modes. The random blocks that a network defense, such as dropout, adds to the network are left out here, since they are in
        training mode whenever a client trains.
        """
        named = self.make_model_spec()
        bare = models.build_layout(replace(named, network=""), spec) if named.network else model
        return models.require_mode(bare, self.experiment.training, spec)

    def _try_rule(self, model: nn.Module, data: datasets.Dataset) -> None:
        """Try the experiment's gradient defense, such as DP-SGD, in a local step on at most two examples; do nothing without one.

        Raises the error of the defense, unchanged, if it does not suit the network.
        """
        spec = GradientSpec.parse(self.experiment.gradient)
        if spec.step is not None:
            weights, rng = dict(model.named_parameters()), torch.Generator().manual_seed(0)
            with torch.random.fork_rng(devices=[]):
                train(model, weights, [_take_sample(data, 2)], self.experiment.training, data.spec, rule=spec.build(), rng=rng)

    def is_done(self) -> bool:
        """Return whether this experiment is finished in `out`; False if it has not begun, or is unfinished and `resume` is set.

        Raises ValueError if `out` holds another experiment or other files, and `UnfinishedRun` if this experiment was stopped
        before its last round and `resume` is not set.
        """
        if not self.out.exists() or not any(map(_has_begun, self.out.iterdir())):
            return False
        check_run(self.out)
        path = self.out / "experiment.toml"
        if not path.exists() or read(path).state_mode() != self.experiment.state_mode():
            raise ValueError(f"{self.out} holds another run, or other files; choose another --out, or delete them")
        done, rounds = count_rounds(self.out / "state"), self.experiment.rounds
        if done is None and (rows := read_metrics(self.out)):  # its checkpoint is missing
            done = rows[-1]["round"]
        if done == rounds:
            return True
        if self.resume:
            return False
        raise UnfinishedRun(
            f"{self.out} holds an unfinished run, {done or 0} of {rounds} rounds; continue it with --resume, or delete it "
            "first with `fedsim delete`"
        )

    def _count_model_bytes(self) -> int:
        model = models.build_layout(self.make_model_spec(), self.load_data().spec)
        shared = self.experiment.training.buffers == "shared"
        values: int = sum(t.numel() for t in (*model.parameters(), *(model.buffers() if shared else ())))
        return 4 * values

    def _count_checkpoint_bytes(self) -> int:
        strategy = self.experiment.strategy
        kept = 3 * (strategy.name in STATEFUL_STRATEGIES) + ("central" in strategy.arguments)
        return self._count_model_bytes() * (1 + kept)

    def _count_round_bytes(self) -> int:
        """Return the approximate number of bytes of a recorded round.

        These are the model, the largest number of recorded updates and, with secure aggregation, their sum.
        """
        clients, wanted = self.experiment.clients, self.parse_wanted()
        limits = [clients.drawn]
        limits += [] if wanted.clients is None else [len(wanted.clients)]
        limits += [] if wanted.at_most is None else [wanted.at_most]
        more = 1 if self.experiment.secure_aggregation else 0  # the recorded sum
        return (self._count_model_bytes() + 2000) * (1 + min(limits) + more)

    def count_bytes(self, number: int) -> int:
        """Return about how many bytes round `number` writes: the checkpoint, and its recording if it is wanted."""
        wanted = self.parse_wanted().rounds
        return self._count_checkpoint_bytes() + (self._count_round_bytes() if wanted is None or number in wanted else 0)

    def count_megabytes(self) -> float:
        """Return the approximate disk space in MB that the remaining rounds need together.

        It is the space for all rounds that are recorded, and once for two checkpoints, since a new checkpoint is complete before
        the previous one is removed.
        """
        first, stop, wanted = (count_rounds(self.out / "state") or 0) + 1, self.experiment.rounds + 1, self.parse_wanted().rounds
        ranges = (range(first, stop),) if wanted is None else wanted.ranges
        recorded = sum(len(range(max(numbers.start, first), min(numbers.stop, stop))) for numbers in ranges)
        return (recorded * self._count_round_bytes() + 2 * self._count_checkpoint_bytes()) / 1e6

    def parse_wanted(self) -> RecordSelection:
        """Return which rounds and clients are recorded, by the experiment's settings."""
        return RecordSelection.parse(self.experiment.record.rounds, self.experiment.record.clients)

    def prepare(self) -> None:
        """Create the folder `out` if it does not exist, and write the experiment with all defaults to experiment.toml there.

        Unless `locations.public` is set, the client seed is stored too, if none is stored yet. Raises ValueError if `out` holds a
        finished run, another experiment or other files, and `UnfinishedRun` for an unfinished run if `resume` is not set.
        """
        if self.is_done():
            raise ValueError(f"{self.out} holds a finished run already; choose another folder")
        check_run(make_private(self.out))
        write_bytes(self.out / "experiment.toml", self.experiment.to_toml().encode())
        if self.locations.public is None and not self._simulation.exists():  # otherwise the clients run on other machines
            make_private(self._simulation.parent, below=self.out)
            write_json(self._simulation, {"client_seed": self.client_seed}, below=self.out)

    def settle(self) -> "FederationRun":
        """Return a copy of this run that has the client seed with which the run in its folder began.

        A resumed run therefore needs no `--client-seed`. If no seed is stored in the folder, this run itself is returned.
        Raises ValueError if this run has another client seed than the one in the folder.
        """
        if not self._simulation.exists():
            return self
        began: int | None = read_json(self._simulation)["client_seed"]
        if self.client_seed not in (None, began):
            raise ValueError(
                f"--client-seed {self.client_seed}: the run in {self.out} began with {began}; omit the option to resume it"
            )
        return replace(self, client_seed=began)

    @property
    def _simulation(self) -> Path:
        return self.out / "clients" / "simulation.json"

    def make_manifest(self, spec: DataSpec) -> Manifest:
        e, agreement = self.experiment, self.experiment.settle_agreement()
        return Manifest(
            name=make_name(self.out.name),
            model=self.make_model_spec(),
            data=spec,
            training=self._require_mode(models.build_layout(self.make_model_spec(), spec), spec),
            defense=e.parse_defense(),
            gradient=str(GradientSpec.parse(e.gradient)),
            inputs=str(InputsSpec.parse(e.inputs)),
            secure_aggregation=agreement.to_json() if agreement else False,
            codec=MASKED_CODEC if agreement else e.parse_defense().choose_codec(),
            created=strftime("%Y-%m-%dT%H:%M:%SZ", gmtime()),
            software={package: version(package) for package in ("flwr", "torch", "numpy")},
        )


def _has_begun(path: Path) -> bool:
    """Return whether a path shows that a run has begun: not a partial file of a crash, nor an empty, just mounted `recording`."""
    return path.suffix != ".partial" and not (path.name == "recording" and path.is_dir() and not any(path.iterdir()))


def _take_sample(data: datasets.Dataset, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` training examples (n, *shape) and labels (n,) for a trial step; zeros if this party has none."""
    if len(data.train):
        return data.train[:count]
    return torch.zeros(count, *data.spec.shape), torch.zeros(count, dtype=torch.int64)


@contextmanager
def _name_setting(key: str, value: str) -> Iterator[None]:
    """Turn a TypeError into a ValueError that names a setting of the experiment.

    A TypeError is raised if an argument in the setting is a list or a text instead of a number, for example.
    """
    try:
        yield
    except TypeError as error:
        raise ValueError(
            f"an argument in the setting {key} = {value!r} of the experiment has the wrong type: {error}; correct this setting"
        ) from error


@lru_cache(maxsize=4)
def _split(experiment: str) -> list[NDArray[np.int64]]:
    """Return the indices (n,) of each client's training examples. experiment: as TOML text, so that the result can be cached."""
    e = validate(tomllib.loads(experiment), source="experiment")
    examples = datasets.load(e.data.name, **e.data.arguments).train
    return partition.split(examples, e.clients.count, seed=e.seed, name=e.partition.name, **e.partition.arguments)
