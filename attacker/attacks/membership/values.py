"""The values that are compared: coordinates of updates and of the gradients of candidates, at most `MAX_VALUES` of each."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Generator, Tensor
from torch.func import vmap

from attacker.attacks.membership.pool import Pool
from attacker.attacks.simulation.client import find_omitted
from attacker.attacks.simulation.gradients import build_gradient
from fedsim import models
from fedsim.recording.observation import Observation

Chosen = Mapping[str, Tensor]
"""Chosen coordinates: by parameter name, sorted indices into the flattened tensor."""
MAX_VALUES = 20_000
"""Largest number of values of a gradient that are compared. If there are more, this many are drawn at random."""
MAX_CHUNK = 50
"""Largest number of candidates whose gradients are computed at once."""
CHUNK_VALUES = 2**25
"""Largest number of values of all gradients that are computed at once. A single candidate's gradient may have more values."""


def group_by_model(observations: Sequence[Observation]) -> list[list[Observation]]:
    """Return the observations in groups of one round with equal weights and buffers sent, in the order of the rounds."""
    groups: list[list[Observation]] = []
    for observation in sorted(observations, key=lambda o: (o.round, o.client)):
        same = next((group for group in groups if _have_same_model(group[0], observation)), None)
        if same is None:
            groups.append([observation])
        else:
            same.append(observation)
    return groups


def _have_same_model(first: Observation, second: Observation) -> bool:
    return first.round == second.round and _are_equal(first.weights, second.weights) and _are_equal(first.buffers, second.buffers)


def _are_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first is second or (first.keys() == second.keys() and all(torch.equal(first[name], t) for name, t in second.items()))


def group_by_values(observations: Sequence[Observation], rng: Generator) -> Iterator[tuple[Chosen, list[Observation]]]:
    """Yield pairs of chosen coordinates and the observations for which these are chosen. observations: of one model."""
    groups: list[tuple[Chosen, list[Observation]]] = []
    for observation in observations:
        chosen = choose_values([observation], rng)
        same_values = next((group for other, group in groups if _are_equal(other, chosen)), None)
        if same_values is None:
            groups.append((chosen, [observation]))
        else:
            same_values.append(observation)
    yield from groups


def choose_values(observations: Sequence[Observation], rng: Generator) -> dict[str, Tensor]:
    """Return the coordinates to compare: a dict from parameter name to sorted indices into the flattened parameter.

    They are the coordinates that were sent in at least one of the observations, or MAX_VALUES of these, drawn at random, if there
    are more. Coordinates of parameters that the defense hides or that clients do not train are left out. The draw depends on the
    seed of `rng` and on the first round only, so that it is the same for all clients that send all coordinates.
    """
    first = observations[0]
    omitted = find_omitted(first, models.build_layout(first.model, first.data))
    shapes = {name: w.shape for name, w in first.weights.items() if name not in omitted}
    usable = torch.zeros(sum(shape.numel() for shape in shapes.values()), dtype=torch.bool)
    for observation in observations:
        sent = observation.sent or {name: torch.ones(shape, dtype=torch.bool) for name, shape in shapes.items()}
        usable |= torch.cat([sent[name].reshape(-1) for name in shapes])
    rows = usable.nonzero()[:, 0]
    if len(rows) > MAX_VALUES:
        drawn = torch.Generator().manual_seed((rng.initial_seed() * 1_000_003 + first.round) % 2**62)
        rows = rows[torch.randperm(len(rows), generator=drawn)[:MAX_VALUES].sort().values]
    chosen, start = {}, 0
    for name, shape in shapes.items():
        chosen[name] = rows[(rows >= start) & (rows < start + shape.numel())] - start
        start += shape.numel()
    return chosen


def flatten(tensors: Mapping[str, Tensor], chosen: Chosen) -> Tensor:
    """Return the chosen values of tensors by name as one vector (M,)."""
    return torch.cat([tensors[name].reshape(-1)[rows.to(tensors[name].device)] for name, rows in chosen.items()])


def compute_gradients(observation: Observation, pool: Pool, chosen: Chosen, device: str) -> Tensor:
    """Return the chosen values of the gradients of all candidates at the weights sent, (P, M), float64.

    Batch norm uses the statistics that the client was sent, since the statistics of the client's batches are unknown.
    """
    model = models.build(observation.model, observation.data).eval().to(device)
    compute = build_gradient(model, observation.data, observation.training.loss)
    weights = {name: w.to(device) for name, w in observation.weights.items()}
    buffers = {name: b.to(device) for name, b in (dict(model.named_buffers()) | dict(observation.buffers)).items()}

    def compute_chosen(x: Tensor, y: Tensor) -> Tensor:
        return flatten(compute(weights, x, y, buffers), chosen).double()

    size = max(1, min(MAX_CHUNK, CHUNK_VALUES // sum(w.numel() for w in weights.values())))
    gradients = torch.empty(len(pool), sum(map(len, chosen.values())), dtype=torch.float64, device=device)
    for start in range(0, len(pool), size):
        rows = slice(start, start + size)
        with torch.no_grad():
            gradients[rows] = vmap(compute_chosen)(pool.x[rows, None].to(device), pool.y[rows, None].to(device))
    return gradients
