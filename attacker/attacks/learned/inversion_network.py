"""Networks that map the update of a client to its examples, trained on simulated clients (Wu et al. 2023, arXiv 2210.10880).

The attacker simulates clients on public images: the gradient at the weights that were sent, the declared gradient rule, and the
declared defense with fresh randomness in every epoch. Nothing else about a defense is used, so that the method applies to all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Generator, Tensor, nn
from torch.func import vmap

from attacker.attacks.membership.pool import Pool
from attacker.attacks.networks.forward import run_forward_pass
from attacker.attacks.simulation.client import build_network, compute_total_step, find_omitted, get_buffers
from attacker.attacks.simulation.gradients import PLAIN_RULE, build_gradient
from defenses.rules import GradientProblem
from fedsim import models
from fedsim.recording.observation import Observation

FEATURES = 4096
"""Largest number of inputs of the network. The values of larger updates are added, with random signs, to random inputs."""
BATCH = 64
"""Simulated clients in each step of the training, and in each call that computes their gradients."""
LEARNING_RATE = 3e-4
HELD_OUT_SHARE = 0.1
"""Share of the simulated clients that choose the best epoch. Their images are not trained on."""
MAX_FEATURE = 5.0
"""Largest magnitude of an input of the network, in standard deviations."""
LABEL_WEIGHT = 0.01
"""Weight of the cross-entropy of labels beside the mean squared error of images."""


@dataclass(frozen=True, kw_only=True)
class InversionTraining:
    """The settings of a training.

    simulations: number of simulated clients. Of these, the share HELD_OUT_SHARE is held out to choose the best epoch.
    epochs: number of epochs, each of which trains once on every other simulated client. hidden: width of the two hidden layers.
    knows_defense: whether the defense that the observation declares is applied to the simulated updates.
    """

    simulations: int
    epochs: int
    hidden: int
    knows_defense: bool


@dataclass(frozen=True)
class InversionNetwork:
    """A trained network that maps the update of a client to its examples.

    encode: maps an update by parameter name to features (F,). mean, scale: (F,), by which features are standardised before they
    enter the network. shape: of an example. losses: (T,) loss on held-out simulated clients after each epoch; the network is the
    one after the epoch with the smallest loss.
    """

    network: nn.Module
    encode: Callable[[Mapping[str, Tensor]], Tensor]
    mean: Tensor
    scale: Tensor
    shape: tuple[int, ...]
    losses: Tensor

    def invert(self, update: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the examples (B, *shape) in [0, 1] and the labels (B,) that the network infers from an update."""
        with torch.no_grad():
            x, logits = _split(self.network(_standardise(self.encode(update)[None], self.mean, self.scale)), self.shape)
        return x[0], logits[0].argmax(dim=1)


def train_inversion(
    observation: Observation, pool: Pool, training: InversionTraining, rng: Generator, device: str
) -> InversionNetwork:
    """Return a network trained to map updates to examples, on simulated clients with the weights and settings of an observation.

    Each simulated client has as many images of the pool as the observation reports examples. The observation's own update is not
    used. Initial weights and all draws depend on `rng` alone.
    """
    model = build_network(observation).to(device)
    encode = build_encoder(observation, find_omitted(observation, model), rng, device)
    count, batch = training.simulations, observation.num_examples or 1
    held_out = max(1, int(HELD_OUT_SHARE * count))
    order = torch.randperm(len(pool), generator=rng)
    border = max(1, int(HELD_OUT_SHARE * len(pool)))
    rows = torch.cat(
        [
            order[:border][_draw(border, held_out, batch, rng)],
            order[border:][_draw(len(pool) - border, count - held_out, batch, rng)],
        ]
    )
    clean = simulate_updates(observation, model, pool.x[rows], pool.y[rows], rng, device)
    defense = observation.defenses.build() if training.knows_defense and observation.defenses.steps else None

    def see(indices: Tensor) -> Tensor:
        """Return the features of simulated updates (N, features), each after the defense with fresh randomness."""
        encoded = []
        for i in indices.tolist():
            update: Mapping[str, Tensor] = {name: u[i] for name, u in clean.items()}
            if defense is not None:
                update, _ = defense.apply(update, defense.init(update), rng)
            encoded.append(encode(update))
        return torch.stack(encoded)

    first = see(torch.arange(held_out, count))
    mean, scale = first.mean(dim=0), first.std(dim=0).clamp(min=1e-12)
    x, y = pool.x[rows].to(device), pool.y[rows].to(device)
    network = _build_mlp(first.shape[1], training.hidden, batch, observation, rng).to(device)
    optimiser = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    test = _standardise(see(torch.arange(held_out)), mean, scale)
    best, losses = {name: p.clone() for name, p in network.state_dict().items()}, []
    for epoch in range(training.epochs):
        fresh = first if epoch == 0 or defense is None else see(torch.arange(held_out, count))
        seen = _standardise(fresh, mean, scale)
        for part in torch.split(torch.randperm(count - held_out, generator=rng), BATCH):
            optimiser.zero_grad()
            loss = compute_loss(network(seen[part]), x[held_out + part], y[held_out + part])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        with torch.no_grad():
            losses.append(float(compute_loss(network(test), x[:held_out], y[:held_out])))
        if losses[-1] == min(losses):
            best = {name: p.clone() for name, p in network.state_dict().items()}
    network.load_state_dict(best)
    return InversionNetwork(
        network.requires_grad_(False), encode, mean, scale, tuple(observation.data.shape), torch.tensor(losses)
    )


def simulate_updates(
    observation: Observation, model: nn.Module, x: Tensor, y: Tensor, rng: Generator, device: str
) -> dict[str, Tensor]:
    """Return the updates (N, *shape) by parameter name of N clients, after one local step of SGD, before their defense.

    x, y: their examples (N, B, *shape) and labels (N, B). Gradient rules, such as DP-SGD, draw from `rng`.
    """
    weights = {name: observation.weights[name].to(device) for name, _ in model.named_parameters()}
    buffers, _ = get_buffers(model, [observation])
    rule, data, training = observation.gradient.build(), observation.data, observation.training
    if rule == PLAIN_RULE:
        compute = build_gradient(model, data, training.loss, rule)
        batches = zip(torch.split(x, BATCH), torch.split(y, BATCH), strict=True)
        parts = [vmap(lambda a, b: compute(weights, a, b, buffers))(a.to(device), b.to(device)) for a, b in batches]
        gradient = {name: torch.cat([part[name] for part in parts]).detach() for name in weights}
    else:
        tracked = {name: w.clone().requires_grad_() for name, w in weights.items()}
        problem = GradientProblem(
            model, lambda w, x: run_forward_pass(model, {**buffers, **w}, data.normalise(x)), models.find_loss(training.loss)
        )
        each = [rule.gradient(problem, tracked, a.to(device), b.to(device), rng)[0] for a, b in zip(x, y, strict=True)]
        gradient = {name: torch.stack([part[name] for part in each]).detach() for name in weights}
    step = compute_total_step(training, 1)
    return {name: -step * (g + training.decay * weights[name]) for name, g in gradient.items()}


def build_encoder(
    observation: Observation, omitted: frozenset[str], rng: Generator, device: str
) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return a function from an update to the inputs (F,) of the network, F at most FEATURES, without the parameters `omitted`.

    The inputs are the values of the update or, if there are more, random sums of them: each value is added to one input, with a
    random sign.
    """
    names = [name for name in observation.weights if name not in omitted]
    size = sum(observation.weights[name].numel() for name in names)
    if size <= FEATURES:
        return lambda update: torch.cat([update[name].flatten().float().to(device) for name in names])
    place = torch.randint(FEATURES, (size,), generator=rng).to(device)
    sign = (2 * torch.randint(2, (size,), generator=rng) - 1).float().to(device)

    def hash_values(update: Mapping[str, Tensor]) -> Tensor:
        values = torch.cat([update[name].flatten().float().to(device) for name in names])
        return values.new_zeros(FEATURES).index_add_(0, place, sign * values)

    return hash_values


def compute_loss(output: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over clients of the loss of the best assignment of answers to examples, 0-d.

    The loss is the mean squared error of images plus LABEL_WEIGHT times the cross-entropy of labels. output: of the network.
    x, y: the examples (N, B, *shape) and labels (N, B).
    """
    images, logits = _split(output, tuple(x.shape[2:]))
    pairs = (images[:, :, None] - x[:, None]).flatten(3).square().mean(dim=3)
    pairs = pairs - LABEL_WEIGHT * logits.log_softmax(dim=2).gather(2, y[:, None].expand(-1, y.shape[1], -1))
    orders = torch.tensor(list(permutations(range(x.shape[1]))), device=x.device)
    each = pairs[:, torch.arange(x.shape[1], device=x.device)[None], orders].mean(dim=2)
    return each.amin(dim=1).mean()


def _draw(images: int, clients: int, batch: int, rng: Generator) -> Tensor:
    """Return random indices (clients, batch) from 0 to `images` - 1. Every image is drawn once before any is drawn again."""
    need = clients * batch
    drawn = torch.cat([torch.randperm(images, generator=rng) for _ in range(-(-need // images))])
    return drawn[:need].reshape(clients, batch)


def _build_mlp(features: int, hidden: int, batch: int, observation: Observation, rng: Generator) -> nn.Module:
    data = observation.data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**31, (), generator=rng)))
        return nn.Sequential(
            nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, batch * (data.size + data.num_classes)), nn.Unflatten(1, (batch, data.size + data.num_classes)),
        )  # fmt: skip


def _split(output: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return images (N, B, *shape) in [0, 1] and logits (N, B, K) of the network's output (N, B, size + K)."""
    size = torch.Size(shape).numel()
    return output[..., :size].sigmoid().reshape(*output.shape[:-1], *shape), output[..., size:]


def _standardise(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return ((features - mean) / scale).clamp(-MAX_FEATURE, MAX_FEATURE)
