"""Rows of the table `batch_norm` of batches.py: Inverting Gradients with and without the batch-norm statistics of clients."""

from dataclasses import replace
from typing import Any

from attacker.attacks import Case, inverting_gradients
from fedsim import models
from fedsim.training.local import train
from support.attacked import compare_attacks
from support.calibration import networks
from support.contract import Options, ResultRow
from support.single_cases import make_client
from support.splits import Images, load_images

NETWORKS = tuple(f"{networks.__name__}:{name}" for name in ("pooled_with_norm", "resnet8"))
CLIENTS = (("cifar10", 1, 6), ("cifar10", 4, 2), ("lfw", 2, 3), ("lfw", 8, 5))
"""Data set, batch size and number of clients of each row."""
SETTINGS: dict[str, Any] = {"steps": 400, "tv": 1e-2, "give_up": 0.0}
"""Arguments of the attack besides `batch_norm`; `tv` is that of the preset `tuned` for networks with batch norm."""


def list_statistics_settings(*, quick: bool) -> list[tuple[str, str, int, int]]:
    """Return the network, the data set, the batch size and the number of clients of each row. With `quick`, one row."""
    rows = [(network, *client) for network in NETWORKS for client in CLIENTS]
    return [(*rows[0][:3], 1)] if quick else rows


def make_statistics_row(options: Options, network: str, name: str, batch: int, clients: int) -> ResultRow:
    """Return one row: mean PSNR in dB and images recovered, with returned statistics, without them, and by the null.

    Every client has an untrained network in mode "train", takes one step on a batch, and returns the running statistics.
    name: data set. batch: number of images of a client.
    """
    images = load_images(options, name, batch * clients)
    cases = _make_cases(network, images, batch, options)
    settings = {**SETTINGS, "steps": 20} if options.quick else SETTINGS
    attacks = {
        "with": inverting_gradients(**settings),
        "without": inverting_gradients(**settings, batch_norm=0.0),
        "null": inverting_gradients(**settings).null(),
    }
    row: ResultRow = {"network": network.partition(":")[2], "data": images.name, "batch": batch, "images": len(images)}
    return row | compare_attacks(attacks, cases, images, batch, options) | {"part": images.part}


def _make_cases(network: str, images: Images, batch: int, options: Options) -> list[Case]:
    """Return a case for each batch of `images`: the update of one step in mode "train", and the statistics after it."""
    models.admit(network)
    client = make_client(network, images.data, seed=options.seed, batch=batch)
    client = replace(client, training=replace(client.training, mode="train", buffers="shared"))
    model = models.build(client.model, client.data, seed=options.seed)
    buffers = {name: dict(model.named_buffers())[name].clone() for name in models.list_buffers(model)}
    cases = []
    for i, step in enumerate(zip(images.x.split(batch), images.y.split(batch), strict=True)):
        trained = train(model, client.weights, [step], client.training, client.data, buffers=buffers)
        observation = client.observe(trained.update, 1, f"client {i}", (), batch)
        cases.append(Case((replace(observation, buffers=buffers, buffers_after=trained.buffers),)))
    return cases
