"""Rows of the table `local_epochs` of batches.py: Inverting Gradients with and without the simulation of local steps."""

from dataclasses import replace

from attacker.attacks import inverting_gradients
from support.attacked import compare_attacks
from support.contract import Options, ResultRow
from support.single_cases import make_client
from support.splits import Part, load_images

NETWORKS = ("lenet_cpl", "cnn6")
TRAININGS = ((3, 0.01), (5, 0.1))
"""Number of local epochs, and learning rate."""
CLIENTS = (("cifar10", 1, 6), ("lfw", 2, 3), ("cifar10", 4, 2))
"""Data set, number of images of a client, and number of clients of each row."""
STEPS = 2400
"""Gradient evaluations of a search; one that simulates n local steps counts as n."""


def list_epoch_settings(*, quick: bool) -> list[tuple[str, int, float, str, int, int]]:
    """Return network, epochs, learning rate, data set, images of a client and number of clients of each row.

    With `quick`, one row.
    """
    rows = [(network, *training, *client) for network in NETWORKS for training in TRAININGS for client in CLIENTS]
    return [(*rows[0][:5], 1)] if quick else rows


def make_epoch_row(
    options: Options, network: str, epochs: int, rate: float, name: str, batch: int, clients: int, part: Part = "report"
) -> ResultRow:
    """Return one row: mean PSNR in dB and images recovered, with simulated steps, with steps taken for one, and by the null.

    Steps that are taken for one are attacked with and without a polish, which may fit what one step cannot explain.

    Every client has an untrained network, and trains for several epochs whose only step is on all of its images.
    epochs: number of local epochs. rate: learning rate. name: data set. batch: number of images of a client. part: part of the
    data that the images are from.
    """
    images = load_images(options, name, batch * clients, part=part)
    client = make_client(network, images.data, seed=options.seed, batch=batch)
    client = replace(client, training=replace(client.training, steps=None, epochs=epochs, learning_rate=rate))
    pairs = zip(images.x.split(batch), images.y.split(batch), strict=True)
    cases = [client.make_case([pair] * epochs, f"client {i}") for i, pair in enumerate(pairs)]
    steps = 60 if options.quick else STEPS
    attacks = {
        "simulated": inverting_gradients(steps=steps),
        "one batch": inverting_gradients(steps=steps, local_steps="one_batch"),
        "one batch, unpolished": inverting_gradients(steps=steps, local_steps="one_batch", polish=0.0),
        "null": inverting_gradients(steps=steps).null(),
    }
    row: ResultRow = {"network": network, "epochs": epochs, "rate": rate, "data": images.name, "batch": batch}
    return row | {"images": len(images)} | compare_attacks(attacks, cases, images, batch, options) | {"part": images.part}
