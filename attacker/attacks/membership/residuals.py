"""Regression of a client's updates on the simulated updates of candidate examples, for defenses with error feedback.

Such a defense keeps the part of an update that it does not send, and adds it to later updates, which therefore contain values of
earlier rounds. The larger a candidate's coefficient, the more likely the candidate is one of the client's examples.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Generator, Tensor
from torch.func import vmap

from attacker.attacks.cases import Case
from attacker.attacks.membership.pool import Pool
from attacker.attacks.membership.regression import Coefficients, Regression
from attacker.attacks.membership.values import Chosen, choose_values, compute_gradients, flatten
from attacker.attacks.simulation.client import build_channel, compute_total_step, find_schedule
from defenses.channel import Channel
from fedsim import models
from fedsim.recording.observation import Observation

UNCLIPPED_FACTOR = 1e-9
"""Factor on simulated updates, so that a defense that clips leaves them unchanged and the simulation is linear."""


def keeps_values(case: Case) -> bool:
    """Return whether the defense sends some coordinates of an update, which are known, and keeps the others for later rounds."""
    first = case.observations[0]
    channel = build_channel(first, models.build_layout(first.model, first.data))
    nothing = {name: torch.zeros_like(u) for name, u in first.update.items()}
    return bool(first.sent) and bool(channel.follow_round(nothing, {}, channel.learn(first.update))[1])


def fit_residuals(case: Case, pool: Pool, rng: Generator, device: str) -> Iterator[tuple[Observation, Coefficients]]:
    """Yield the observations of a case in order, each with the coefficients of the candidates in its update.

    The value that a client sends of a coordinate is the sum of the coordinate's updates in all rounds since it was last sent,
    each computed at the weights of its round. The attacker simulates this sum for each candidate alone. Since it is known which
    coordinates were sent, the simulation is linear: what a client sends is the sum of what it would send for each example alone.
    Rounds before the first of the case are assumed to have left nothing.
    """
    first = case.observations[0]
    channel = build_channel(first, models.build_layout(first.model, first.data))
    chosen = choose_values(case.observations, rng)
    state: Mapping[str, Tensor] = {}
    for observation in case.observations:
        gradients = compute_gradients(observation, pool, chosen, device)
        decay = observation.training.decay * flatten(observation.weights, chosen).to(gradients)
        step = compute_total_step(observation.training, find_schedule(observation)[1])
        updates = -step * torch.cat([gradients, decay[None]])
        expected, state = _simulate(channel, observation, chosen, updates, state)
        sent = flatten(observation.sent, chosen).to(expected.device)
        seen = flatten(observation.update, chosen).to(expected)
        yield observation, Regression(expected[:-1, sent]).fit((seen - expected[-1])[sent])


def _simulate(
    channel: Channel, observation: Observation, chosen: Chosen, updates: Tensor, state: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return what the defense makes of each of several updates in a round, (P, M), and its state for each after the round.

    updates: the chosen values of the updates before the defense, (P, M). state: the state before the round, empty at first.
    """
    layout = {name: (len(rows), *[1] * (observation.weights[name].ndim - 1)) for name, rows in chosen.items()}
    parts = torch.split(updates, [len(rows) for rows in chosen.values()], dim=1)
    each = {name: UNCLIPPED_FACTOR * part.reshape(-1, *layout[name]) for name, part in zip(chosen, parts, strict=True)}
    known = {
        key: _restrict(fact.to(updates.device), key, observation.weights, chosen)
        for key, fact in channel.learn(observation.update).items()
    }
    follow = vmap(channel.follow_round, in_dims=(0, 0 if state else None, None))
    expected, after = follow(each, dict(state), known)
    return torch.cat([t.flatten(1) for t in expected.values()], dim=1) / UNCLIPPED_FACTOR, after


def _restrict(fact: Tensor, key: str, weights: Mapping[str, Tensor], chosen: Chosen) -> Tensor:
    """Return a fact about a defense (`Channel.learn`), such as which coordinates were sent, for the chosen coordinates only.

    A fact with one entry per entry of a parameter has the parameter's shape, and a `key` that ends in the parameter's name. The
    result is then (M, 1, ..., 1), with as many axes as the parameter, since some defenses treat vectors in another way. Any other
    fact is returned unchanged.
    weights: all weights of the model. chosen: indices of the M chosen coordinates in each flattened parameter, by name.
    """
    name = next((name for name in sorted(chosen, key=len, reverse=True) if f"/{key}".endswith(f"/{name}")), None)
    if name is None or fact.shape != weights[name].shape:
        return fact
    rows = chosen[name].to(fact.device)
    return fact.reshape(-1)[rows].reshape(len(rows), *[1] * (fact.ndim - 1))
