"""Rows of the tables `local_epochs`, `several_batches` and `several_rounds` of batches.py, with and without simulated steps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attacker.attacks import Case, agic, inverting_gradients
from attacker.scoring.metrics import is_recovered, psnr
from fedsim import models
from support.attacked import compare_attacks, match_examples, run_attack
from support.contract import Options, ResultRow
from support.single_cases import LocalClient, make_client
from support.splits import Images, load_images

CONVOLUTIONS = tuple(f"support.calibration.networks:{name}" for name in ("strided", "convnet"))
"""Networks with smooth activations and strides, and with ReLU and max pooling."""


@dataclass(frozen=True, kw_only=True)
class EpochSetting:
    """The clients of one row, each with an untrained network.

    epochs: number of local epochs. rate: learning rate. data: name of the data set. images: number of images of a client.
    batch: number of images of a local step. clients: number of clients. rounds: number of rounds.
    evaluations: gradient evaluations of a search; one that simulates n local steps counts as n.
    """

    network: str
    epochs: int
    rate: float
    data: str
    images: int
    batch: int
    clients: int
    momentum: float = 0.0
    rounds: int = 1
    evaluations: int = 2400


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


def list_round_settings(*, quick: bool) -> list[EpochSetting]:
    """Return the settings of the table `several_rounds`, whose local epochs have two batches each. With `quick`, one."""
    rows = [
        EpochSetting(network=network, epochs=epochs, rate=rate, data=data, images=4, batch=2, clients=2, rounds=2 if quick else 4)
        for network, rate, epochs in (("lenet_cpl", 0.05, 1), (CONVOLUTIONS[0], 0.05, 1), (CONVOLUTIONS[1], 0.1, 2))
        for data in ("cifar10", "lfw")
    ]
    rows += [replace(row, evaluations=4800) for row in rows[:2]]
    return [replace(rows[0], clients=1)] if quick else rows


def make_epoch_row(options: Options, setting: EpochSetting) -> ResultRow:
    """Return one row: mean PSNR in dB and images recovered, with simulated steps, with steps taken for one, and by the null.

    Steps that are taken for one are attacked with and without a polish, which may fit what one step cannot explain.
    """
    images, cases = _make_cases(options, setting)
    steps = 60 if options.quick else setting.evaluations
    attacks = {
        "simulated": inverting_gradients(steps=steps),
        "one batch": inverting_gradients(steps=steps, local_steps="one_batch"),
        "one batch, unpolished": inverting_gradients(steps=steps, local_steps="one_batch", polish=0.0),
        "null": inverting_gradients(steps=steps).null(),
    }
    return _describe(setting, images) | compare_attacks(attacks, cases, images, setting.images, options) | {"part": images.part}


def make_rounds_row(options: Options, setting: EpochSetting) -> ResultRow:
    """Return one row: mean PSNR in dB and images recovered from all rounds together, beside single rounds, and by the null.

    "best alone" is Inverting Gradients on each round alone, and for each client the answer that explains the largest share of
    its gradient; "one batch" is AGIC with all local steps of a round taken for one.
    """
    images, cases = _make_cases(options, setting)
    steps = 60 if options.quick else setting.evaluations
    attacks = {
        "together": agic(steps=steps, beta=1.0),
        "one batch": agic(steps=steps, beta=1.0, local_steps="one_batch", compare="same"),
        "null": agic(steps=steps, beta=1.0).null(),
    }
    row = _describe(setting, images) | {"rounds": setting.rounds}
    row |= compare_attacks(attacks, cases, images, setting.images, options)
    rounds = [Case((observation,)) for case in cases for observation in case.observations]
    answers, seconds = run_attack(inverting_gradients(steps=steps), rounds, options)
    each = [answers[k : k + setting.rounds] for k in range(0, len(answers), setting.rounds)]
    best = [max(found, key=lambda answer: float(answer.explained[0])) for found in each]
    guesses = torch.cat([match_examples(one, x)[0] for one, x in zip(best, images.x.split(setting.images), strict=True)])
    row |= {
        "psnr best alone": float(psnr(guesses, images.x).mean()),
        "recovered best alone": int(is_recovered(guesses, images.x, images.data).sum()),
        "cpu_seconds best alone": seconds,
    }
    return row | {"part": images.part}


def _describe(setting: EpochSetting, images: Images) -> ResultRow:
    """Return the entries of a row that name its clients and images."""
    row: ResultRow = {"network": setting.network.rpartition(":")[2], "epochs": setting.epochs, "rate": setting.rate}
    row |= {"momentum": setting.momentum, "data": images.name, "images of a client": setting.images, "batch": setting.batch}
    return row | {"images": len(images), "evaluations": setting.evaluations}


def _make_cases(options: Options, setting: EpochSetting) -> tuple[Images, list[Case]]:
    """Return the images, and a case for each client. After a round, the server adds the mean of its updates to the weights."""
    images = load_images(options, setting.data, setting.images * setting.clients, part="report")
    if setting.network in CONVOLUTIONS:
        models.admit(setting.network)
    client: LocalClient = make_client(setting.network, images.data, seed=options.seed, batch=setting.batch)
    training = replace(client.training, steps=None, epochs=setting.epochs, learning_rate=setting.rate, momentum=setting.momentum)
    client, rng = replace(client, training=training), torch.Generator().manual_seed(options.seed)
    seen: list[Case] = [Case(()) for _ in range(setting.clients)]
    for number in range(1, setting.rounds + 1):
        updates = []
        for i, (x, y) in enumerate(zip(images.x.split(setting.images), images.y.split(setting.images), strict=True)):
            updates.append(client.compute_update([(x[rows], y[rows]) for rows in _draw_batches(setting, rng)]))
            observation = client.observe(updates[-1], number, f"client {i}", (), setting.images)
            seen[i] = Case((*seen[i].observations, observation))
        client = client.add({name: sum(u[name] for u in updates) / len(updates) for name in updates[0]})
    return images, seen


def _draw_batches(setting: EpochSetting, rng: torch.Generator) -> Iterator[torch.Tensor]:
    """Draw the indices of the images of each local step, in a new order in each epoch."""
    for _ in range(setting.epochs):
        yield from torch.randperm(setting.images, generator=rng).split(setting.batch)
