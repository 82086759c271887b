"""Simulated rounds of clients that train on known examples, as the server sees them: updates of clients, or secure sums."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from support.splits import Images
from torch import Generator, Tensor

from attacker.attacks import Case
from defenses import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.training.local import evaluate, train

LocalBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class RecordedNetwork:
    """A network with the clients' training settings and the global weights before the first simulated round."""

    model: ModelSpec
    data: DataSpec
    training: Training
    weights: Mapping[str, Tensor]

    def measure_accuracy(self, images: Images) -> float:
        """Return the share of `images` that are classified rightly with the weights before the first simulated round."""
        model = models.build(self.model, self.data)
        return evaluate(model, self.weights, images.x, images.y, self.data, self.training)["accuracy"]


def make_network(data: DataSpec, training: Training, *, hidden: int = 256, seed: int = 0) -> RecordedNetwork:
    """Return an MLP with one hidden layer of `hidden` neurons with ReLU, and random weights.

    training: settings of the clients' training.
    """
    spec = ModelSpec(name="mlp", arguments={"hidden": [hidden]})
    weights = {name: p.detach() for name, p in models.build(spec, data, seed=seed).named_parameters()}
    return RecordedNetwork(spec, data, training, weights)


def train_network(network: RecordedNetwork, images: Images, *, steps: int, seed: int = 0) -> RecordedNetwork:
    """Return the network with the weights after `steps` steps of SGD, in shuffled batches of 32 at a learning rate of 0.05.

    The settings of the clients' training stay as they are.
    """
    rng, batches = Generator().manual_seed(seed), []
    while len(batches) < steps:
        order = torch.randperm(len(images), generator=rng)
        batches += [(images.x[rows], images.y[rows]) for rows in order.split(32)]
    settings = Training(learning_rate=0.05, batch_size=32, steps=steps)
    update = train(models.build(network.model, network.data), network.weights, batches[:steps], settings, network.data).update
    return replace(network, weights={name: w + update[name] for name, w in network.weights.items()})


def kill_neurons(network: RecordedNetwork, share: float) -> RecordedNetwork:
    """Return the MLP with part of its hidden neurons dead: incoming weights 0, bias -1, so that ReLU gives 0 for any example.

    share: share of the neurons, rounded down; the first ones are changed.
    """
    weights = {name: w.clone() for name, w in network.weights.items()}
    names = [name for name in weights if name.startswith("1.")]
    dead = int(share * len(weights[names[0]]))
    for name in names:
        weights[name][:dead] = -1.0 if name.endswith("bias") else 0.0
    return replace(network, weights=weights)


def record_epochs(
    network: RecordedNetwork, images: Images, batch: int, epochs: int, client: str, *, seed: int, defense: str = ""
) -> tuple[Case, list[list[int]]]:
    """Simulate a client that trains on `images` for some epochs, and return its rounds and the indices of each round's examples.

    In each round, the client trains on the next batch of its shuffled epoch. The update that it sends is added to the global
    weights. batch: batch size. client: name of the client. defense: as in an experiment, "" for none; it keeps no state between
    rounds.
    """
    rng, rounds, used = Generator().manual_seed(seed), [], []
    weights = dict(network.weights)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=rng).split(batch):
            update = make_update(network, weights, [(images.x[rows], images.y[rows])])
            seen = observe(network, weights, update, len(rounds) + 1, client, (client,), len(rows), defense)
            rounds.append(seen)
            used.append(rows.tolist())
            weights = {name: w + seen.update[name] for name, w in weights.items()}
    return Case(tuple(rounds)), used


def record_same_examples(
    network: RecordedNetwork, images: Images, rounds: int, *, defense: str = "", seed: int = 0
) -> list[Case]:
    """Return one case per image: the rounds of a client that holds this image only and uses it in every round.

    A client's defense keeps its state, such as values not sent yet, from round to round. After each round, the mean of what all
    clients sent in it is added to the global weights. rounds: number of rounds. defense: as in an experiment, "" for none.
    """
    spec = DefenseSpec.parse(defense) if defense else DefenseSpec()
    built, weights = spec.build(), dict(network.weights)
    template = {name: torch.zeros_like(w) for name, w in weights.items()}
    states = [built.init(template) for _ in range(len(images))]
    found: list[list[Observation]] = [[] for _ in range(len(images))]
    for number in range(1, rounds + 1):
        for i in range(len(images)):
            update = make_update(network, weights, [(images.x[i : i + 1], images.y[i : i + 1])])
            drawn = Generator().manual_seed(seed + 1000 * number + i)
            sent, states[i] = built.apply(update, states[i], drawn)
            found[i].append(build_observation(network, weights, sent, number, f"c{i}", (), 1, spec))
        sent_by_all = [own[-1].update for own in found]
        weights = {name: w + torch.stack([sent[name] for sent in sent_by_all]).mean(dim=0) for name, w in weights.items()}
    return [Case(tuple(own)) for own in found]


def record_sums(
    network: RecordedNetwork,
    rounds: Sequence[Mapping[str, Sequence[LocalBatch]]],
    *,
    defense: str = "",
    rounding: float = 0.0,
) -> Case:
    """Simulate rounds of secure aggregation, and return a case with what the server sees of each.

    `defense` (as in an experiment, "" for none) is applied to the unweighted mean of the clients' updates. The server sees the
    result, and adds it to the global weights. rounds: for each round, a dict from the name of a client to its batches.
    rounding: step to which each client rounds the values of its update before they are summed; 0 for none.
    """
    weights, found = dict(network.weights), []
    for number, batches in enumerate(rounds, start=1):
        each = [make_update(network, weights, own) for own in batches.values()]
        if rounding:
            each = [{name: (u.double() / rounding).round() * rounding for name, u in one.items()} for one in each]
        update = {name: torch.stack([one[name] for one in each]).mean(dim=0).float() for name in weights}
        count = sum(len(y) for own in batches.values() for _, y in own)
        seen = observe(network, weights, update, number, SUM_CLIENT, tuple(sorted(batches)), count, defense)
        found.append(seen)
        weights = {name: w + seen.update[name] for name, w in weights.items()}
    return Case(tuple(found))


def make_update(network: RecordedNetwork, weights: Mapping[str, Tensor], batches: Sequence[LocalBatch]) -> dict[str, Tensor]:
    """Return the change of the weights of a client that starts from `weights` and takes one step on each batch in turn."""
    return train(models.build(network.model, network.data), weights, batches, network.training, network.data).update


def observe(
    network: RecordedNetwork,
    weights: Mapping[str, Tensor],
    update: Mapping[str, Tensor],
    number: int,
    client: str,
    cohort: tuple[str, ...],
    examples: int,
    defense: str,
) -> Observation:
    """Apply `defense` with a fresh state to an update or a mean of updates, and return what the server then sees.

    number: number of the round, also the seed of the defense's randomness. client: name of the sender. cohort: names of the
    clients in the round. examples: number of examples behind the update. defense: as in an experiment, "" for none.
    """
    spec = DefenseSpec.parse(defense) if defense else DefenseSpec()
    if spec.steps:
        built = spec.build()
        update, _ = built.apply(dict(update), built.init(dict(update)), Generator().manual_seed(number))
    return build_observation(network, weights, update, number, client, cohort, examples, spec)


def build_observation(
    network: RecordedNetwork,
    weights: Mapping[str, Tensor],
    update: Mapping[str, Tensor],
    number: int,
    client: str,
    cohort: tuple[str, ...],
    examples: int,
    spec: DefenseSpec,
) -> Observation:
    """Return what the server sees of an update to which the defense `spec` has been applied already.

    weights: global weights before the round. number: number of the round. client: name of the sender. cohort: names of the
    clients in the round. examples: number of examples behind the update.
    """
    return Observation(
        round=number,
        client=client,
        cohort=cohort,
        num_examples=examples,
        model=network.model,
        data=network.data,
        training=network.training,
        defenses=spec,
        weights=weights,
        payload=encode(update, spec.choose_codec()),
    )
