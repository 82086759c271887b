"""Observations made from updates, and the rounds of clients that train on given examples, as the server sees them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from generators import seeded
from torch import Tensor, nn

from attacker.attacks import Case
from defenses import DefenseSpec
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.recording.codec import encode
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.training.local import train

LocalBatch = tuple[Tensor, Tensor]
"""Examples x and labels y of one local step."""


def make_observation(
    update: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    model: ModelSpec,
    data: DataSpec,
    training: Training,
    defense: str = "",
    client: str = "c",
    **facts: Any,
) -> Observation:
    """Return what the server sees of an update, by default that of the only client of the first round.

    defense: what the client declares; `update` is sent as it is given.
    facts:   other fields of the observation. By default, the prescribed steps decide the number of examples.
    """
    spec = DefenseSpec.parse(defense)
    fields = {"round": 1, "cohort": (client,), "num_examples": training.batch_size * (training.steps or 1), **facts}
    return Observation(
        client=client,
        model=model,
        data=data,
        training=training,
        defenses=spec,
        weights=dict(weights),
        payload=encode(dict(update), spec.choose_codec()),
        **fields,
    )


def draw_weights(model: ModelSpec, data: DataSpec, seed: int = 0) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in models.build(model, data, seed=seed).named_parameters()}


def observe_rounds(
    rounds: Sequence[Sequence[LocalBatch]],
    *,
    model: ModelSpec,
    data: DataSpec,
    defense: str = "",
    client: str = "c",
    seed: int = 0,
    noise_seed: int = 0,
    weights: Mapping[str, Tensor] | None = None,
    **training: Any,
) -> Case:
    """Return the rounds of a client that takes one step on each batch of a round, and whose updates are added to the weights.

    weights: those of the first round; by default drawn with `seed`. noise_seed: seed of the defense's randomness, to which the
    number of the round is added. training: fields of `Training`, by default a learning rate of 0.1.
    """
    network, spec, found = models.build(model, data), DefenseSpec.parse(defense), list[Observation]()
    weights, built = weights or draw_weights(model, data, seed), spec.build()
    state = built.init(dict(weights))
    for number, batches in enumerate(rounds, start=1):
        settings = _make_training(batches, training)
        update = train(network, weights, batches, settings, data).update
        sent, state = built.apply(update, state, seeded(noise_seed + number))
        facts = {"round": number, "client": client, "num_examples": sum(len(y) for _, y in batches)}
        found.append(make_observation(sent, weights, model=model, data=data, training=settings, defense=defense, **facts))
        weights = {name: w + sent[name] for name, w in weights.items()}
    return Case(tuple(found))


def observe_loss(loss: Tensor, network: nn.Module, *, model: ModelSpec, data: DataSpec, training: Training) -> Observation:
    """Return the observation of a client that takes one step along the gradient of `loss`, whatever `training` states."""
    gradient = torch.autograd.grad(loss, list(network.parameters()))
    weights = {name: p.detach() for name, p in network.named_parameters()}
    update = {name: -training.learning_rate * g for name, g in zip(weights, gradient, strict=True)}
    return make_observation(update, weights, model=model, data=data, training=training)


def observe_steps(*batches: LocalBatch, **settings: Any) -> Observation:
    """Return the observation of a client that takes one step on each of the batches. settings: as for `observe_rounds`."""
    return observe_rounds([batches], noise_seed=98, **settings).observations[0]


def make_image_case(index: int = 0, **settings: Any) -> tuple[Case, Tensor, Tensor]:
    """Return an attack's input (case) for one smooth 8x8 grey image on a small LeNet, the image and its label."""
    data = DataSpec(shape=(1, 8, 8), num_classes=4)
    grid = torch.linspace(0, 1, 8)
    x = (0.5 + 0.4 * torch.sin(3 * grid[:, None] + index) * torch.cos(2 * grid[None] - index))[None, None]
    y = torch.tensor([index % 4])
    observation = observe_steps((x, y), model=ModelSpec(name="lenet_dlg"), data=data, client=f"c{index}", **settings)
    return Case((observation,)), x, y


def observe_sums(
    rounds: Sequence[Mapping[str, Sequence[LocalBatch]]], *, model: ModelSpec, data: DataSpec, seed: int = 0, **training: Any
) -> Case:
    """Return the secure sums of rounds, which are added to the weights.

    rounds: for each round, a dict from the name of a client to its batches. seed, training: as for `observe_rounds`.
    """
    network, weights, found = models.build(model, data), draw_weights(model, data, seed), list[Observation]()
    for number, cohort in enumerate(rounds, start=1):
        settings = _make_training(next(iter(cohort.values())), training)
        updates = [train(network, weights, batches, settings, data).update for batches in cohort.values()]
        update = {name: torch.stack([one[name] for one in updates]).mean(dim=0) for name in weights}
        count = sum(len(y) for batches in cohort.values() for _, y in batches)
        facts = {"round": number, "client": SUM_CLIENT, "cohort": tuple(cohort), "num_examples": count}
        found.append(make_observation(update, weights, model=model, data=data, training=settings, **facts))
        weights = {name: w + update[name] for name, w in weights.items()}
    return Case(tuple(found))


def _make_training(batches: Sequence[LocalBatch], settings: Mapping[str, Any]) -> Training:
    return Training(**{"learning_rate": 0.1, "batch_size": len(batches[0][1]), "steps": len(batches), **settings})
