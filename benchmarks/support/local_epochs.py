"""Rows of the tables `local_epochs` and `several_batches` of batches.py: Inverting Gradients with and without simulated steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attacker.attacks import inverting_gradients
from fedsim import models
from support.attacked import compare_attacks
from support.contract import Options, ResultRow
from support.single_cases import make_client
from support.splits import Part, load_images

STEPS = 2400
"""Gradient evaluations of a search; one that simulates n local steps counts as n."""
CONVOLUTIONS = tuple(f"support.calibration.networks:{name}" for name in ("strided", "convnet"))
"""Networks with smooth activations and strides, and with ReLU and max pooling."""


@dataclass(frozen=True, kw_only=True)
class EpochSetting:
    """The clients of one row, each with an untrained network.

    epochs: number of local epochs. rate: learning rate. data: name of the data set. images: number of images of a client.
    batch: number of images of a local step. clients: number of clients.
    """

    network: str
    epochs: int
    rate: float
    data: str
    images: int
    batch: int
    clients: int
    momentum: float = 0.0


def list_epoch_settings(*, quick: bool) -> list[EpochSetting]:
    """Return the settings of the table `local_epochs`, whose local steps are on all images of a client. With `quick`, one."""
    rows = [
        EpochSetting(network=network, epochs=epochs, rate=rate, data=data, images=images, batch=images, clients=clients)
        for network in ("lenet_cpl", "cnn6")
        for epochs, rate in ((3, 0.01), (5, 0.1))
        for data, images, clients in (("cifar10", 1, 6), ("lfw", 2, 3), ("cifar10", 4, 2))
    ]
    return [replace(rows[0], clients=1)] if quick else rows


def list_shuffled_settings(*, quick: bool) -> list[EpochSetting]:
    """Return the settings of the table `several_batches`, whose local epochs have two batches each. With `quick`, one."""
    rows = [
        EpochSetting(network=network, epochs=epochs, rate=rate, data=data, images=4, batch=2, clients=2, momentum=momentum)
        for network, rate in (("lenet_cpl", 0.01), ("cnn6", 0.05), *((name, 0.05) for name in CONVOLUTIONS))
        for epochs, momentum in ((1, 0.9), (2, 0.0))
        for data in ("cifar10", "lfw")
    ]
    return [replace(rows[0], clients=1)] if quick else rows


def make_epoch_row(options: Options, setting: EpochSetting, part: Part = "report") -> ResultRow:
    """Return one row: mean PSNR in dB and images recovered, with simulated steps, with steps taken for one, and by the null.

    Steps that are taken for one are attacked with and without a polish, which may fit what one step cannot explain.
    part: part of the data that the images are from.
    """
    count = setting.images
    images = load_images(options, setting.data, count * setting.clients, part=part)
    if setting.network in CONVOLUTIONS:
        models.admit(setting.network)
    client = make_client(setting.network, images.data, seed=options.seed, batch=setting.batch)
    training = replace(client.training, steps=None, epochs=setting.epochs, learning_rate=setting.rate, momentum=setting.momentum)
    client, rng = replace(client, training=training), torch.Generator().manual_seed(options.seed)
    cases = []
    for i, (x, y) in enumerate(zip(images.x.split(count), images.y.split(count), strict=True)):
        batches = [(x[rows], y[rows]) for rows in _draw_batches(setting, rng)]
        cases.append(client.make_case(batches, f"client {i}"))
    steps = 60 if options.quick else STEPS
    attacks = {
        "simulated": inverting_gradients(steps=steps),
        "one batch": inverting_gradients(steps=steps, local_steps="one_batch"),
        "one batch, unpolished": inverting_gradients(steps=steps, local_steps="one_batch", polish=0.0),
        "null": inverting_gradients(steps=steps).null(),
    }
    row: ResultRow = {"network": setting.network.rpartition(":")[2], "epochs": setting.epochs, "rate": setting.rate}
    row |= {"momentum": setting.momentum, "data": images.name, "images of a client": count, "batch": setting.batch}
    return row | {"images": len(images)} | compare_attacks(attacks, cases, images, count, options) | {"part": images.part}


def _draw_batches(setting: EpochSetting, rng: torch.Generator) -> Iterator[torch.Tensor]:
    """Draw the indices of the images of each local step, in a new order in each epoch."""
    for _ in range(setting.epochs):
        yield from torch.randperm(setting.images, generator=rng).split(setting.batch)
