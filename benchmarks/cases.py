"""What a server would see of one client that trains on given examples, and the images that benchmarks take."""

from collections.abc import Sequence
from pathlib import Path

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

Images = tuple[str, Tensor]
"""A name, and images (N, C, H, W) in [0, 1]."""


def images(asked: Options, file: str, embedded: str, count: int, **arguments: int) -> Images:
    """`count` images, evenly spread, of `file` below --data; where it is not there, of an embedded data set, which is said."""
    path = asked.data / file if asked.data else None
    if path is not None and not path.exists():
        print(f"{path} does not exist: {embedded} instead")
    if path is not None and path.exists():
        with np.load(path, allow_pickle=False) as archive:
            found = archive["images"] if "images" in archive.files else archive["test_images"]
        every = torch.from_numpy(found).float() / 255
        every = every[:, None] if every.ndim == 3 else every.permute(0, 3, 1, 2)
        name = Path(file).parent.name
    else:
        data = datasets.load(embedded, **arguments)
        every, name = data.train[list(range(len(data.train)))][0], embedded
    at = np.linspace(0, len(every) - 1, min(count, len(every))).round().astype(int)
    return name, every[torch.from_numpy(at)]


def case_of(
    spec: ModelSpec,
    data: DataSpec,
    *batches: tuple[Tensor, Tensor],
    seed: int,
    name: str = "client",
    loss: str = "cross_entropy",
    defense: str = "",
    learning_rate: float = 1.0,
) -> Case:
    """One client that takes one step on each batch, from the weights that `seed` draws."""
    model = models.build(spec, data, seed=seed)
    weights = {key: p.detach() for key, p in model.named_parameters()}
    training = Training(learning_rate=learning_rate, batch_size=len(batches[0][1]), steps=len(batches), loss=loss)  # type: ignore[arg-type]
    update = train(model, weights, batches, training, data).update
    chosen = DefenseSpec.parse(defense, learning_rate=learning_rate)
    built = chosen.build()
    sent, _ = built.apply(update, built.init(update), torch.Generator().manual_seed(seed))
    observation = Observation(
        round=1,
        client=name,
        cohort=(),
        num_examples=sum(len(y) for _, y in batches),
        model=spec,
        data=data,
        training=training,
        defenses=chosen,
        weights=weights,
        payload=encode(sent),
    )
    return Case((observation,))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return float(np.mean(values)), float(np.std(values))
