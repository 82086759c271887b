"""Defenses in units of the gradient, as papers give them."""

import math

from torch import Generator

from defenses.base import Defense, State, Update


def to_gradient(update: Update, learning_rate: float) -> Update:
    """The gradient that an update of one step of plain SGD stands for."""
    return {name: t / -learning_rate for name, t in update.items()}


def to_update(gradient: Update, learning_rate: float) -> Update:
    """The update of one step of plain SGD. A zero is +0.0: what a defense left out stays free on the wire."""
    return {name: t * -learning_rate + 0.0 for name, t in gradient.items()}


def in_gradient_units(defense: Defense, learning_rate: float) -> Defense:
    """Apply a defense to update / (-learning_rate), and turn what comes out back into an update.

    defense:       in units of the gradient: in_gradient_units(clip(4) | gaussian(0.01), 0.1).
    learning_rate: of the clients' training; positive. An experiment fills in its own where it is left out. Of several local
                   steps the quotient stands for the sum of their gradients.
    Source: Wei et al. 2020, algorithm 1.
    """
    if not isinstance(defense, Defense):
        raise ValueError(f"in_gradient_units: defense must be one, as in in_gradient_units(clip(1), 0.1), got {defense!r}")
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"in_gradient_units: learning_rate must be positive and finite, got {learning_rate}")

    def init(template: Update) -> State:
        return defense.init(template)

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        sent, after = defense.apply(to_gradient(update, learning_rate), state, rng)
        return to_update(sent, learning_rate), after

    return Defense(init, apply)
