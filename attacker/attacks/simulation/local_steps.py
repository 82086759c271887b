"""Simulation of a client's local training: steps on a batch each (Geiping et al. 2020), and epochs whose order is unknown.

Epochs use the same examples in orders that the server does not know. By the method of Dimitrov et al. 2022, "Data leakage in
federated averaging", each epoch is reconstructed with separate examples, a prior penalises differences between epochs in
quantities that do not depend on the order, and at the end similar examples are matched across epochs and averaged.
"""

from collections.abc import Callable, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacker.attacks.simulation.client import convert_to_gradient
from attacker.attacks.simulation.gradients import NO_BUFFERS, Gradients
from defenses.rules import Gradient, Weights
from fedsim.recording.training import Training


def assign_rows(sizes: Sequence[int], examples: int) -> list[list[int]]:
    """Return each step's example indices, in order and repeated. sizes: batch sizes of the steps. examples: their number."""
    rows, at = [], 0
    for size in sizes:
        rows.append([(at + i) % examples for i in range(size)])
        at += size
    return rows


def build_stepped_gradient(
    gradient: Gradients, training: Training, sizes: Sequence[int], frozen: frozenset[str] = frozenset()
) -> Gradients:
    """Return a gradient function that simulates several local steps and converts the resulting update by `convert_to_gradient`.

    A received update is converted in the same way, so that both can be compared.
    gradient: computes the gradient of one batch. sizes: batch sizes, one per step. frozen: names of parameters that are not
    trained.
    Source: Geiping et al. 2020, section 6 and eq. 5; the local optimisers follow `torch.optim`.
    """

    def train(weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NO_BUFFERS) -> Gradient:
        batches = assign_rows(sizes, len(x))

        def differentiate(at: Weights, s: int) -> Gradient:
            return gradient(at, x[batches[s]], y[batches[s]], buffers)

        _, update = follow_steps(differentiate, weights, training, len(sizes), frozen)
        return convert_to_gradient(update, weights, training, len(sizes))

    return train


def follow_steps(
    differentiate: Callable[[Weights, int], Gradient],
    weights: Weights,
    training: Training,
    steps: int,
    frozen: frozenset[str] = frozenset(),
) -> tuple[list[Weights], Gradient]:
    """Return the weights at the beginning of each local step, and the update after all of them.

    differentiate: function of the weights and the index of a step that returns the gradient of the step's batch.
    frozen: names of parameters that are not trained.
    """
    optimiser = LocalOptimiser(training)
    path: list[Weights] = [weights]
    update = {name: torch.zeros_like(w) for name, w in weights.items()}
    for s in range(steps):
        gradient = {name: g for name, g in differentiate(path[-1], s).items() if name not in frozen}
        change = optimiser.step(gradient, path[-1])
        update = {name: u + change[name] if name in change else u for name, u in update.items()}
        path.append({name: w + update[name] for name, w in weights.items()})
    return path[:-1], update


def simulate_one_step(gradient: Gradient, weights: Weights, training: Training) -> Gradient:
    """Return the gradient that `convert_to_gradient` recovers from the update of one local step on `gradient`.

    The result is `gradient` itself if clients train by SGD without clipping of the gradient, since the conversion undoes the
    learning rate and the weight decay.
    """
    if training.is_linear:
        return gradient
    return convert_to_gradient(LocalOptimiser(training).step(gradient, weights), weights, training, 1)


class LocalOptimiser:
    """A differentiable client optimiser: SGD, Adam or AdamW as in `torch.optim`, with optional clipping of the gradient norm.

    For Adam and AdamW, the derivative of a surrogate is used, see `_compute_direction`.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.steps = 0
        self.first: Gradient = {}
        self.second: Gradient = {}

    def step(self, gradient: Gradient, weights: Weights) -> Gradient:
        """Return the change of the weights in one step, by parameter name, and advance the optimiser's state."""
        training, rate = self.training, self.training.compute_rate(self.steps)
        self.steps += 1
        if training.clip_norm is not None:
            gradient = clip_gradient(gradient, training.clip_norm)
        decay = training.weight_decay
        if decay and training.optimiser != "adamw":
            gradient = {name: g + decay * weights[name] for name, g in gradient.items()}
        if training.optimiser == "sgd":
            return {name: -rate * g for name, g in self._apply_momentum(gradient).items()}
        change = {name: -rate * direction for name, direction in self._apply_adam(gradient).items()}
        if training.optimiser == "adamw":
            change = {name: c - rate * decay * weights[name] for name, c in change.items()}
        return change

    def _apply_momentum(self, gradient: Gradient) -> Gradient:
        momentum = self.training.momentum
        if not momentum:
            return gradient
        old = self.first
        self.first = {name: momentum * old[name] + g if old else g for name, g in gradient.items()}
        if not self.training.nesterov:
            return self.first
        return {name: g + momentum * self.first[name] for name, g in gradient.items()}

    def _apply_adam(self, gradient: Gradient) -> Gradient:
        (b1, b2), t = self.training.betas, self.steps
        old, squares = self.first, self.second
        self.first = {name: (b1 * old[name] if old else 0) + (1 - b1) * g for name, g in gradient.items()}
        self.second = {
            name: (b2 * squares[name] if squares else 0) + (1 - b2) * g.detach().square() for name, g in gradient.items()
        }
        return {
            name: _compute_direction(m / (1 - b1**t), (self.second[name] / (1 - b2**t)).sqrt() + self.training.eps)
            for name, m in self.first.items()
        }


def _compute_direction(mean: Tensor, length: Tensor) -> Tensor:
    """Return Adam's direction `mean / length` with a surrogate derivative that gradient-based search can use.

    The exact derivative is nearly zero, like that of the sign function, because `length` grows with `mean`. The surrogate treats
    `length` as a constant, no smaller than its mean over the tensor.
    mean: first moment. length: root of the second moment plus epsilon.
    """
    smooth = mean / length.maximum(length.mean()).detach()
    return smooth + (mean / length - smooth).detach()


def clip_gradient(gradient: Gradient, norm: float) -> Gradient:
    """Return the gradient scaled to a norm of at most `norm` over all tensors, as `torch.nn.utils.clip_grad_norm_` does."""
    whole = torch.stack([g.square().sum() for g in gradient.values()]).sum()
    factor = (norm / (torch.where(whole > 0, whole, 1.0).sqrt() + 1e-6)).clamp(max=1)
    return {name: factor * g for name, g in gradient.items()}


def count_separate_epochs(weight: float, training: Training) -> int:
    """Return the number of separate sets of examples: one per epoch, or one if `weight` is 0 or clients train by steps."""
    return (training.epochs or 1) if weight else 1


def measure_disagreement(x: Tensor, epochs: int) -> Tensor:
    """Return the mean squared difference between the mean examples of two epochs, averaged over all pairs of epochs, 0-d.

    x: (epochs * N, *shape), the examples of one epoch after the other, for at least two epochs.
    Source: Dimitrov et al. 2022, equation 8, with the mean as the order-invariant function g.
    """
    means = x.reshape(epochs, -1, *x.shape[1:]).mean(dim=1)
    between: Tensor = (means[:, None] - means[None]).square().mean() * epochs / (epochs - 1)
    return between


def merge_epochs(x: Tensor, y: Tensor, epochs: int) -> tuple[Tensor, Tensor]:
    """Return N examples (N, *shape) and their labels from the separate examples of all epochs.

    The examples of each later epoch are assigned one to one to the examples of the first epoch, by the Hungarian method on
    squared distances, where possible to examples with the same hard label. Assigned examples are averaged. The labels of the
    first epoch are returned.
    x: (epochs * N, *shape). y: (epochs * N,), or soft labels (epochs * N, K).
    """
    if epochs == 1:
        return x, y
    first, *later = x.detach().reshape(epochs, -1, *x.shape[1:])
    labels = y[: len(first)]
    total = first.clone()
    for other in later:
        cost = torch.cdist(first.flatten(1), other.flatten(1)).square().double()
        if labels.ndim == 1:
            cost = cost.masked_fill(labels[:, None] != labels[None], 1e9)
        rows, columns = linear_sum_assignment(cost.nan_to_num(1e12).cpu().numpy())
        total[torch.from_numpy(rows)] += other[torch.from_numpy(columns)]
    return total / epochs, labels
