"""Inference of labels from the update of several local steps, together with the step in which each example was used.

Label rules (`rules`) read labels off one gradient. The update of several local steps is no such gradient if the learning rate is
large: a step makes the network predict the labels that it has seen, and later steps undo a part of that. Here the local training
is simulated for assumed labels and an assumed order, without any knowledge of the examples:

    1. The whole network is trained on random inputs with these labels, in this order. At the weights of each step s, the mean
       m_s of the features (inputs of the head) and the directions U in which they vary are computed.
    2. The head alone is trained in the same order, on features m_s + U z_i of example i. The z_i, standard normal a priori, are
       fitted so that the simulated update of the head comes close to the observed one (Gauss-Newton).

The order and the labels with the lowest cost, the sum of squared errors and of squared z, are found by best-first search.

Shapes: n examples, T steps, K classes, F features, Q directions, D dimensions of the subspace of m_s and U, S orders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import vmap

from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.probes import compute_head_inputs, draw_inputs
from attacker.attacks.optimisers.gauss_newton import differentiate_along
from attacker.attacks.simulation.client import choose_simulated_steps, convert_to_gradient, count_ordered_steps, find_frozen
from attacker.attacks.simulation.gradients import build_gradient
from attacker.attacks.simulation.local_steps import follow_steps
from attacker.attacks.simulation.step_orders import StepOrder, identify, list_neighbours
from defenses.networks import StochasticModule
from defenses.rules import Gradient, Weights
from fedsim import models

DIRECTIONS = 8
"""Largest number Q of directions in which features vary."""
PROBES, STEP_PROBES = 64, 16
"""Number of random inputs from which the directions are computed, and the means of each step."""
TOLERANCE = 0.1
"""Assumed standard deviation of the error of the simulated update's entries, relative to the root mean square of the observed."""
START_SPREAD = 0.1
"""Standard deviation of z at the start of a fit; examples with equal labels and steps would remain equal if they began equal."""
FIT_STEPS, RANKING_STEPS, MAX_HALVINGS = 4, 1, 6
"""Gauss-Newton steps of a fit and of a ranking, and the largest number of times that a step is halved."""
MAX_FITTED, FITTED_AT_ONCE, MAX_IDLE = 240, 12, 4
"""Number of orders that are fitted at most, in one stage of the search, and number of stages without progress that end it."""
MAX_LIKELY_COST, MAX_COST = 8.0, 32.0
"""Ratios of the cost to its expected value: above the first, a search without progress goes on; above the second, no order is
returned. On tuning images, true orders had ratios of up to 7."""
MAX_FITTED_WEIGHTS = 5e7
"""Largest number of weights, over the networks of all orders that are fitted, beyond the first FITTED_AT_ONCE orders."""
ATTEMPTS = 2
"""Largest number of searches, each with other random inputs."""
MAX_CELLS = 2e6
"""Largest number of entries of the Jacobians that are computed at once. With 20 examples in ten steps, ten times as many took 1.2
times as long, and seven times fewer 1.3 times."""
MAX_ALL_CELLS = 6e7
"""Largest number of entries of the Jacobians that one search computes, so that it takes about ten seconds at most. It leaves 240
fits to clients of eight examples in four steps and ten classes. Without it, 20 examples in ten steps took more than two minutes,
and 100 classes would take hours."""


class InferredOrder(NamedTuple):
    """An order of a client's examples, its cost, and how much the local steps matter (`StepLabels.measure_effect`)."""

    order: StepOrder
    cost: float
    effect: float


class HeadTraining(NamedTuple):
    """The simulated local training of the head in an assumed order, for one order, or with a first axis for several.

    means: mean features of each step, (T, D). directions: (Q, D). weight: of the head, (K, D). target: observed gradient of the
    head's weight divided by `scale`, the mean length of the means, and of its bias if it has one, (K, D) or (K, D + 1).
    tolerance: assumed standard deviation of the error of an entry, ().
    """

    means: Tensor
    directions: Tensor
    weight: Tensor
    target: Tensor
    scale: Tensor
    tolerance: Tensor


@dataclass(frozen=True, eq=False)
class FittedOrder:
    """An order, the values z (n, Q) that were fitted to it, the cost, and the training of the head from which it follows."""

    order: StepOrder
    z: Tensor
    cost: float
    training: HeadTraining


def can_infer_order(observed: ObservedGradients) -> bool:
    """Return whether the order in which a client used its examples can be inferred from its update.

    It can if the client trained by SGD, with or without momentum, for 2 to `MAX_SIMULATED_STEPS` steps in whole epochs of at most
    `MAX_ORDERED_EXAMPLES` examples, with one logit for each class, and if no defense is known, nor a network that draws random
    numbers.
    """
    training, count = observed.training, observed.count
    steps = max(count_ordered_steps(training, count), choose_simulated_steps(training, count))
    several = len(observed.sizes) == observed.steps == steps > 1 and training.loss == "cross_entropy"
    trained = models.find_head(observed.model, observed.data)[0] not in find_frozen(observed.model, training)
    draws = any(isinstance(module, StochasticModule) for module in observed.model.modules())
    return several and trained and training.is_linear and not (observed.defended or draws)


def infer_step_order(observed: ObservedGradients, i: int, labels: Tensor, rng: Generator, *, known: bool) -> InferredOrder | None:
    """Return the order in which the client of case i of `observed` used its examples, and their labels.

    None if it cannot be inferred (`can_infer_order`), or if no order is found that explains the update of the head (MAX_COST).
    labels: (N,), with which the search begins. known: whether these labels are kept.
    """
    if not can_infer_order(observed):
        return None
    examples = tuple(k % observed.count for k in range(sum(observed.sizes)))
    for _ in range(ATTEMPTS):
        problem = StepLabels(observed, i, rng)
        best = problem.search(StepOrder(examples, tuple(labels.tolist())), known=known)
        if best.cost <= MAX_COST * best.z.numel():
            return InferredOrder(best.order, best.cost, problem.measure_effect(best.order))
    return None


class StepLabels:
    """The search for the labels and the order of case i of `observed`. rng: source of the random inputs.

    cells: number of entries of the Jacobians that were computed so far.
    """

    def __init__(self, observed: ObservedGradients, i: int, rng: Generator) -> None:
        self.observed, self.sizes, self.rng = observed, observed.sizes, rng
        state = observed.get_state(i)
        self.weights, self.buffers = state["weights"], state["buffers"]
        self.names = models.find_head(observed.model, observed.data)
        self.gradient = {name: observed.gradients[name][i].cpu().double() for name in self.names if name is not None}
        self.differentiate = build_gradient(observed.model, observed.data, observed.training.loss)
        self.inputs = draw_inputs(observed.data, max(self.sizes), rng).to(observed.device)
        self.probes = draw_inputs(observed.data, PROBES, rng).to(observed.device)
        features = self._compute_features(self.weights, PROBES)
        _, lengths, main = torch.linalg.svd(features - features.mean(dim=0), full_matrices=False)
        self.directions = (lengths[:, None] * main)[:DIRECTIONS] / len(features) ** 0.5
        self.z = START_SPREAD * torch.randn(observed.count, len(self.directions), generator=rng, dtype=torch.double)
        self.frozen = find_frozen(observed.model, observed.training)
        weights = sum(w.numel() for w in self.weights.values())
        self.fits = max(FITTED_AT_ONCE, min(MAX_FITTED, int(MAX_FITTED_WEIGHTS / weights)))
        self.cells = 0

    @property
    def classes(self) -> int:
        return len(self.gradient[self.names[0]])

    def search(self, start: StepOrder, *, known: bool = False) -> FittedOrder:
        """Return the fit with the lowest cost, over orders and labels.

        In each stage, the neighbours of the best order whose neighbours were not looked at yet are ranked, and the best of them
        are fitted. If the first fit is not good, random orders are fitted as well. The search ends early if the cost is at most
        that expected of the true order, the number of values z, or if no more orders can be fitted (`MAX_ALL_CELLS`).
        known: whether the labels of `start` are kept.
        """
        best, expected = self.fit([start])[0], self.z.numel()
        fitted = {identify(start, self.sizes): best}
        new = self.fit(self._draw_orders(best, known)) if best.cost > MAX_LIKELY_COST * expected else []
        expanded, idle = set[object](), 0
        while True:
            fitted |= {identify(one.order, self.sizes): one for one in new}
            lowest = min([best, *new], key=lambda one: one.cost)
            best, idle = lowest, 0 if lowest is not best else idle + 1
            stuck = idle > MAX_IDLE and best.cost <= MAX_LIKELY_COST * expected
            left = {key: one for key, one in fitted.items() if key not in expanded}
            exhausted = len(fitted) >= self.fits or not self._count_affordable(best, FIT_STEPS)
            if best.cost <= expected or stuck or not left or exhausted:
                return best
            key = min(left, key=lambda key: left[key].cost)
            expanded.add(key)
            ranked = self._rank_neighbours(fitted[key], fitted, known)
            new = self.fit(ranked[: min(FITTED_AT_ONCE, self._count_affordable(best, FIT_STEPS))])

    def _count_affordable(self, fitted: FittedOrder, steps: int) -> int:
        """Return for how many orders the search can still make Gauss-Newton steps. fitted: any fit. steps: per order."""
        each = steps * fitted.z.numel() * (fitted.training.target.numel() + fitted.z.numel())
        return max(0, int((MAX_ALL_CELLS - self.cells) / each))

    def _draw_orders(self, start: FittedOrder, known: bool) -> list[StepOrder]:
        """Draw random orders with the labels of a start, of which each is replaced with probability 1/2 unless it is known."""
        count, epochs = len(start.order.labels), len(start.order.examples) // len(start.order.labels)
        classes = torch.tensor(self._list_worst_classes(start))
        drawn = []
        for _ in range(min(FITTED_AT_ONCE, self._count_affordable(start, FIT_STEPS))):
            examples = torch.cat([torch.randperm(count, generator=self.rng) for _ in range(epochs)])
            others = classes[torch.randint(len(classes), (count,), generator=self.rng)]
            kept = torch.full((count,), known) | (torch.rand(count, generator=self.rng) < 0.5)
            labels = torch.where(kept, torch.tensor(start.order.labels), others)
            drawn.append(StepOrder(tuple(examples.tolist()), tuple(labels.tolist())))
        return drawn

    def measure_effect(self, order: StepOrder) -> float:
        """Return how much the local steps matter: the mean over all tensors of |g - h|^2 / |g|^2, for random inputs.

        g is the gradient that explains the update of the steps with the labels of an order, h the mean of the gradients of their
        batches at the weights sent.
        """
        _, update = self._train_network(order)
        whole = convert_to_gradient(update, self.weights, self.observed.training, len(self.sizes))
        mean = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for y in self._split_labels(order):
            gradient = self.differentiate(self.weights, self.inputs[: len(y)], y, self.buffers)
            mean = {name: m + gradient[name] / len(self.sizes) for name, m in mean.items()}
        shares = [(g - mean[name]).square().sum() / g.square().sum() for name, g in whole.items() if g.any()]
        return float(torch.stack(shares).mean()) if shares else 0.0

    def fit(self, orders: Sequence[StepOrder]) -> list[FittedOrder]:
        """Simulate the training of the network for each order, and fit the z of its examples."""
        trainings = [self.simulate_network(order) for order in orders]
        if not trainings:
            return []
        stacked = HeadTraining(*map(torch.stack, zip(*trainings, strict=True)))
        z, cost = self._fit(orders, self.z.repeat(len(orders), 1, 1), stacked, FIT_STEPS)
        return [FittedOrder(*one) for one in zip(orders, z, cost.tolist(), trainings, strict=True)]

    def simulate_network(self, order: StepOrder) -> HeadTraining:
        """Train the network on random inputs with the labels of an order, and return the training of the head on its features."""
        means = [self._compute_features(at, STEP_PROBES).mean(dim=0) for at in self._train_network(order)[0]]
        return self._reduce(torch.stack(means))

    def _train_network(self, order: StepOrder) -> tuple[list[Weights], Gradient]:
        """Train the network on random inputs with the labels of an order.

        Return its weights at the beginning of each step, and the update.
        """
        labels = self._split_labels(order)

        def differentiate(at: Weights, s: int) -> Gradient:
            return self.differentiate(at, self.inputs[: self.sizes[s]], labels[s], self.buffers)

        return follow_steps(differentiate, self.weights, self.observed.training, len(self.sizes), self.frozen)

    def _split_labels(self, order: StepOrder) -> Sequence[Tensor]:
        """Return the labels of each local step."""
        labels = torch.tensor(order.labels, device=self.observed.device)[list(order.examples)]
        return torch.split(labels, list(self.sizes))

    def _compute_features(self, weights: Mapping[str, Tensor], count: int) -> Tensor:
        """Return the features (count, F) of the first probes, on the CPU."""
        data = self.observed.data
        with torch.no_grad():
            state = {**self.buffers, **weights}
            features, _ = compute_head_inputs(self.observed.model, data, state, data.normalise(self.probes[:count]))
        return features.cpu().double()

    def _reduce(self, means: Tensor) -> HeadTraining:
        """Return the training of the head in the subspace of the means (T, F) and of the directions."""
        basis, _ = torch.linalg.qr(torch.cat([means, self.directions]).T)
        weight, bias = self.names
        scale = means.norm(dim=1).mean().clamp(min=torch.finfo(means.dtype).tiny)
        target = self.gradient[weight] @ basis / scale
        if bias is not None:
            target = torch.cat([target, self.gradient[bias][:, None]], dim=1)
        head = self.weights[weight].cpu().double() @ basis
        return HeadTraining(
            means @ basis, self.directions @ basis, head, target, scale, TOLERANCE * target.square().mean().sqrt()
        )

    def _simulate_head(self, z: Tensor, used: Tensor, labels: Tensor, head: HeadTraining) -> Tensor:
        """Return the gradient (K, D) or (K, D + 1) of the head's local training, as `HeadTraining.target` holds the observed one.

        used: index of the example at each position of each step, (sum of sizes,). labels: (n,).
        """
        bias, batches = self.names[1], torch.split(used, list(self.sizes))
        start = {"weight": head.weight}
        if bias is not None:
            start["bias"] = self.weights[bias].cpu().double()
        y = (labels[:, None] == torch.arange(self.classes)).double()

        def differentiate(at: Weights, s: int) -> Gradient:
            features = head.means[s] + z[batches[s]] @ head.directions
            error = ((features @ at["weight"].T + at.get("bias", 0)).softmax(dim=-1) - y[batches[s]]) / self.sizes[s]
            gradient = {"weight": error.T @ features, "bias": error.sum(dim=0)}
            return {name: gradient[name] for name in start}

        _, update = follow_steps(differentiate, start, self.observed.training, len(batches))
        gradient = convert_to_gradient(update, start, self.observed.training, len(batches))
        rows = gradient["weight"] / head.scale
        return rows if bias is None else torch.cat([rows, gradient["bias"][:, None]], dim=1)

    def _measure(self, z: Tensor, used: Tensor, labels: Tensor, head: HeadTraining) -> Tensor:
        """Return the residuals, whose sum of squares is the cost: errors in units of the tolerance, and z."""
        missed = self._simulate_head(z, used, labels, head) - head.target
        return torch.cat([(missed / head.tolerance).flatten(), z.flatten()])

    def _differentiate(self, z: Tensor, used: Tensor, labels: Tensor, head: HeadTraining) -> Tensor:
        """Return the derivatives (R, n Q) of the R residuals by z."""
        units = torch.eye(z.numel(), dtype=z.dtype).reshape(-1, *z.shape)
        along = partial(differentiate_along, lambda at: self._measure(at, used, labels, head), z)
        slopes: Tensor = vmap(along, out_dims=1)(units)
        return slopes

    def _fit(self, orders: Sequence[StepOrder], z: Tensor, heads: HeadTraining, steps: int) -> tuple[Tensor, Tensor]:
        """Return z (S, n, Q) after some Gauss-Newton steps, and the costs (S,). heads: with a first axis for the orders."""
        used, labels = torch.tensor([o.examples for o in orders]), torch.tensor([o.labels for o in orders])
        cells = (heads.target[0].numel() + z[0].numel()) * z[0].numel()
        at_once, parts = max(1, int(MAX_CELLS / cells)), []
        self.cells += len(orders) * steps * cells
        for k in range(0, len(orders), at_once):
            part = slice(k, k + at_once)
            parts.append(self._step(z[part], (used[part], labels[part], HeadTraining(*(t[part] for t in heads))), steps))
        return torch.cat([z for z, _ in parts]), torch.cat([cost for _, cost in parts])

    def _step(self, z: Tensor, problem: tuple[Tensor, Tensor, HeadTraining], steps: int) -> tuple[Tensor, Tensor]:
        """Return z (S, n, Q) after some Gauss-Newton steps, each halved until the cost does not rise, and the costs (S,).

        problem: the examples used at each position, the labels, and the training of the head, each with a first axis for orders.
        """
        measure = vmap(self._measure)
        cost = measure(z, *problem).square().sum(dim=1)
        for _ in range(steps):
            residuals, slopes = measure(z, *problem), vmap(self._differentiate)(z, *problem)
            step = -torch.linalg.solve(slopes.mT @ slopes, slopes.mT @ residuals[..., None]).view_as(z)
            length = torch.ones_like(cost)
            for _ in range(MAX_HALVINGS):
                there = measure(z + length[:, None, None] * step, *problem).square().sum(dim=1)
                if (there <= cost).all():
                    break
                length = torch.where(there <= cost, length, length / 2)
            better = there <= cost
            z, cost = torch.where(better[:, None, None], z + length[:, None, None] * step, z), torch.where(better, there, cost)
        return z, cost

    def _list_worst_classes(self, fitted: FittedOrder) -> list[int]:
        """Return the classes whose rows of the target are explained worst, twice as many as there are examples, if there are."""
        used, labels = torch.tensor(fitted.order.examples), torch.tensor(fitted.order.labels)
        missed = self._simulate_head(fitted.z, used, labels, fitted.training) - fitted.training.target
        worst: list[int] = missed.norm(dim=1).argsort(descending=True)[: 2 * len(labels)].tolist()
        return worst

    def _rank_neighbours(self, best: FittedOrder, fitted: Mapping[object, FittedOrder], known: bool) -> list[StepOrder]:
        """Return the neighbours of an order that are not fitted, sorted by their costs for its features.

        Unless labels are known, they are changed to those of `_list_worst_classes`. If not all neighbours can be ranked
        (`_count_affordable`), they are drawn at random.
        """
        classes = [] if known else self._list_worst_classes(best)
        near = {identify(order, self.sizes): order for order in list_neighbours(best.order, self.sizes, classes)}
        orders = [order for key, order in near.items() if key not in fitted]
        if len(orders) > (most := self._count_affordable(best, RANKING_STEPS)):
            orders = [orders[k] for k in torch.randperm(len(orders), generator=self.rng)[:most].tolist()]
        if not orders:
            return []
        heads = HeadTraining(*(t.expand(len(orders), *t.shape) for t in best.training))
        _, cost = self._fit(orders, best.z.repeat(len(orders), 1, 1), heads, RANKING_STEPS)
        return [orders[k] for k in cost.argsort().tolist()]
