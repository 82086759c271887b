"""Simulated rounds of clients that train on known examples, as the server sees them: updates of clients, or secure sums."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from support.single_cases import LocalBatch, LocalClient, make_client
from support.splits import Images
from torch import Generator, Tensor

from attacker.attacks import Case
from defenses import DefenseSpec
from fedsim.recording import DataSpec, Observation, Training
from fedsim.recording.masked_vectors import SUM_CLIENT


def make_mlp_client(data: DataSpec, training: Training, *, hidden: int = 256, seed: int = 0) -> LocalClient:
    """Return a client whose network is an MLP with one hidden layer of `hidden` neurons with ReLU, and random weights."""
    return replace(make_client("mlp", data, arguments={"hidden": [hidden]}, seed=seed), training=training)


def pretrain(client: LocalClient, images: Images, *, steps: int, seed: int = 0) -> LocalClient:
    """Return the client with weights after `steps` more steps of SGD, in shuffled batches of 32 at a learning rate of 0.05.

    The settings of the client's own training stay as they are.
    """
    rng, batches = Generator().manual_seed(seed), []
    while len(batches) < steps:
        order = torch.randperm(len(images), generator=rng)
        batches += [(images.x[rows], images.y[rows]) for rows in order.split(32)]
    training = Training(learning_rate=0.05, batch_size=32, steps=steps)
    return client.add(replace(client, training=training).compute_update(batches[:steps]))


def kill_neurons(client: LocalClient, share: float) -> LocalClient:
    """Return the client with part of its MLP's hidden neurons dead: incoming weights 0, bias -1, so that ReLU gives 0.

    share: share of the neurons, rounded down; the first ones are changed.
    """
    weights = {name: w.clone() for name, w in client.weights.items()}
    names = [name for name in weights if name.startswith("1.")]
    dead = int(share * len(weights[names[0]]))
    for name in names:
        weights[name][:dead] = -1.0 if name.endswith("bias") else 0.0
    return replace(client, weights=weights)


def record_epochs(
    client: LocalClient, images: Images, sizes: Sequence[int], name: str, *, seed: int, defense: str = ""
) -> tuple[Case, list[list[int]]]:
    """Simulate a client that trains on `images` for some epochs, and return its rounds and the indices of each round's examples.

    In each round, the client trains on the next batch of its shuffled epoch. The update that it sends is added to the global
    weights. sizes: batch size of each epoch. name: name of the client. defense: as in an experiment, "" for none; it keeps no
    state between rounds.
    """
    rng, rounds, used = Generator().manual_seed(seed), list[Observation](), []
    for size in sizes:
        client = replace(client, training=replace(client.training, batch_size=size))
        for rows in torch.randperm(len(images), generator=rng).split(size):
            update = client.compute_update([(images.x[rows], images.y[rows])])
            rounds.append(client.observe(update, len(rounds) + 1, name, (name,), len(rows), defense))
            used.append(rows.tolist())
            client = client.add(rounds[-1].update)
    return Case(tuple(rounds)), used


def record_same_examples(client: LocalClient, images: Images, rounds: int, *, defense: str = "", seed: int = 0) -> list[Case]:
    """Return one case per image: the rounds of a client that holds this image only and uses it in every round.

    A client's defense keeps its state, such as values not sent yet, from round to round. After each round, the mean of what all
    clients sent in it is added to the global weights. rounds: number of rounds. defense: as in an experiment, "" for none.
    """
    spec = DefenseSpec.parse(defense)
    built = spec.build()
    template = {name: torch.zeros_like(w) for name, w in client.weights.items()}
    states = [built.init(template) for _ in range(len(images))]
    observations: list[list[Observation]] = [[] for _ in range(len(images))]
    for number in range(1, rounds + 1):
        for i in range(len(images)):
            update = client.compute_update([(images.x[i : i + 1], images.y[i : i + 1])])
            rng = Generator().manual_seed(seed + 1000 * number + i)
            sent, states[i] = built.apply(update, states[i], rng)
            observations[i].append(client.observe_sent(sent, number, f"c{i}", (), 1, spec))
        client = client.add(average([own[-1].update for own in observations]))
    return [Case(tuple(own)) for own in observations]


def record_sums(
    client: LocalClient, rounds: Sequence[Mapping[str, Sequence[LocalBatch]]], *, defense: str = "", rounding: float = 0.0
) -> Case:
    """Simulate rounds of secure aggregation, and return a case with what the server sees of each.

    `defense` (as in an experiment, "" for none) is applied to the unweighted mean of the clients' updates. The server sees the
    result, and adds it to the global weights. client: network and settings of all clients. rounds: for each round, a dict from
    the name of a client to its batches. rounding: step to which each client rounds the values of its update before they are
    summed; 0 for none.
    """
    observations = list[Observation]()
    for number, batches in enumerate(rounds, start=1):
        updates = [client.compute_update(own) for own in batches.values()]
        if rounding:
            updates = [{name: (u.double() / rounding).round() * rounding for name, u in update.items()} for update in updates]
        mean = {name: u.float() for name, u in average(updates).items()}
        count = sum(len(y) for own in batches.values() for _, y in own)
        observations.append(client.observe(mean, number, SUM_CLIENT, tuple(sorted(batches)), count, defense))
        client = client.add(observations[-1].update)
    return Case(tuple(observations))


def average(updates: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the unweighted mean of updates."""
    return {name: torch.stack([update[name] for update in updates]).mean(dim=0) for name in updates[0]}
