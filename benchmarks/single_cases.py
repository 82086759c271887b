"""Images of the data sets that are at hand, and what a server sees of a client that takes one step on one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contract import Options
from torch import Tensor

from attacker.attacks import Case
from defenses import DefenseSpec
from fedsim import datasets, models
from fedsim.training import train
from fedsim.wire import DataSpec, ModelSpec, Observation, Training
from fedsim.wire.codec import encode

FILES = {
    "cifar10": "cifar10/test.npz",
    "cifar100": "cifar100/cifar100_4k.npz",
    "lfw": "lfw/lfw32.npz",
    "mnist": "mnist/mnist10k.npz",
}
PHOTOS: tuple[str, dict[str, Any]] = ("photos", {"size": 32})
EMBEDDED: dict[str, tuple[str, dict[str, Any]]] = {"photos": PHOTOS, "cifar10": PHOTOS, "cifar100": PHOTOS, "lfw": PHOTOS}
EMBEDDED |= {"mnist": ("digits", {})}
"""What stands in for a file that is not there."""


@dataclass(frozen=True)
class Images:
    """name: of the data set. x: (N, *shape) in [0, 1]. y: (N,) int64. data: what the model's builder is told."""

    name: str
    x: Tensor
    y: Tensor
    data: DataSpec

    def __len__(self) -> int:
        return len(self.x)

    def of_two_classes(self) -> "Images":
        """With odd and even labels for classes, and so one logit."""
        return replace(self, y=self.y % 2, data=replace(self.data, num_classes=2))

    def first(self, count: int) -> "Images":
        return replace(self, x=self.x[:count], y=self.y[:count])

    def of(self, rows: Sequence[int]) -> "Images":
        return replace(self, x=self.x[list(rows)], y=self.y[list(rows)])


def images(asked: Options, name: str, count: int) -> Images:
    """So many of a data set of `FILES`, evenly spread over the file in --data, or over what is embedded; photos are."""
    path = asked.data / FILES[name] if asked.data and name in FILES else None
    if path is not None and path.exists():
        found = datasets.load(f"npz:{path}")
    else:
        if path is not None:
            print(f"{path} does not exist: {EMBEDDED[name][0]} instead")
        found = datasets.load(EMBEDDED[name][0], **EMBEDDED[name][1])
    chosen = np.linspace(0, len(found.train) - 1, count).round().astype(int)
    x, y = found.train[chosen]
    return Images(Path(found.name.removeprefix("npz:")).parent.name or found.name, x, y, found.spec)


@dataclass(frozen=True)
class Client:
    """A network, its weights and how it is trained; `case` is what one example of it leads to."""

    model: ModelSpec
    data: DataSpec
    training: Training
    weights: Mapping[str, Tensor]

    def case(self, batches: Sequence[tuple[Tensor, Tensor]], key: str, defense: str = "") -> Case:
        """What the server would see after local steps on `batches`, one after the other. defense: as in an experiment.

        Of a client that trains for epochs, `batches` are those of all epochs.
        """
        model = models.build(self.model, self.data)
        trained = train(model, self.weights, batches, self.training, self.data)
        spec = DefenseSpec.parse(defense, learning_rate=self.training.learning_rate) if defense else DefenseSpec()
        update = trained.update
        if spec.steps:
            built = spec.build()
            update, _ = built.apply(update, built.init(update), torch.Generator().manual_seed(0))
        return Case(
            (
                Observation(
                    round=1,
                    client=key,
                    cohort=(),
                    num_examples=sum(len(y) for _, y in batches) // (self.training.epochs or 1),
                    model=self.model,
                    data=self.data,
                    training=self.training,
                    defenses=spec,
                    weights=self.weights,
                    payload=encode(update, spec.codec()),
                ),
            )
        )


def client(
    name: str,
    data: DataSpec,
    *,
    loss: str = "cross_entropy",
    seed: int = 0,
    steps: int = 1,
    batch: int = 1,
    arguments: Mapping[str, Any] | None = None,
) -> Client:
    """With weights drawn from `seed`. arguments: of the model."""
    spec = ModelSpec(name=name, arguments=arguments or {})
    weights = {key: p.detach() for key, p in models.build(spec, data, seed=seed).named_parameters()}
    training = Training(learning_rate=1.0 if steps == 1 else 0.01, batch_size=batch, steps=steps, loss=loss)
    return Client(spec, data, training, weights)
