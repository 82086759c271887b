"""Simulation of a client's local steps, each on its own batch, as Inverting Gradients does with model updates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attacker.attacks.simulation.client import NOTHING, Gradient, Gradients, Weights, as_gradient
from fedsim.recording.observation import Training


def rows_of_steps(sizes: Sequence[int], examples: int) -> list[list[int]]:
    """Which of `examples` each step uses: one after the other, from the first again at the end of an epoch."""
    rows, at = [], 0
    for size in sizes:
        rows.append([(at + i) % examples for i in range(size)])
        at += size
    return rows


def after_local_steps(gradient: Gradients, training: Training, sizes: Sequence[int]) -> Gradients:
    """The gradient that an update of several local steps of SGD reads like, as `as_gradient` has it of a received one.

    gradient: of one batch. sizes: of the batches, in the order of steps.
    Source: Geiping et al. 2020, section 6 and eq. 5; momentum and weight decay as in `torch.optim.SGD`.
    """

    def trained(weights: Weights, x: Tensor, y: Tensor, buffers: Weights = NOTHING) -> Gradient:
        update = {name: torch.zeros_like(w) for name, w in weights.items()}
        velocity = update
        for rows in rows_of_steps(sizes, len(x)):
            at = {name: w + update[name] for name, w in weights.items()}
            slope = gradient(at, x[rows], y[rows], buffers)
            velocity = {
                name: training.momentum * v + slope[name] + training.weight_decay * at[name] for name, v in velocity.items()
            }
            update = {name: u - training.learning_rate * velocity[name] for name, u in update.items()}
        return as_gradient(update, weights, training, len(sizes))

    return trained
