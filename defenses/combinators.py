"""Defenses that wrap another defense: error feedback, and defenses that are stated in units of the gradient, as in papers."""

import math

from torch import Generator

from defenses.base import Defense, State, Update


def add_feedback(compressor: Defense) -> Defense:
    """Return a defense that sends C(u + e) and keeps the residual e' = u + e - C(u + e) for the next round, from e = 0.

    C is the defense `compressor`, and u is the update of the round. Up to rounding, the sum of all sent updates plus the residual
    equals the sum of all updates: entries are delayed, not lost.
    Source: Karimireddy et al. 2019, algorithm 2; first in Seide et al. 2014.
    """

    def init(template: Update) -> State:
        inner = compressor.init(template)
        return _join_states({name: t.new_zeros(t.shape) for name, t in template.items()}, inner)

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        due = {name: t + state[f"residual/{name}"] for name, t in update.items()}
        kept = {name.removeprefix("inner/"): t for name, t in state.items() if name.startswith("inner/")}
        sent, inner = compressor.apply(due, kept, rng)
        return sent, _join_states({name: t - sent[name] for name, t in due.items()}, inner)

    return Defense(init, apply)


def to_gradient(update: Update, learning_rate: float) -> Update:
    """Return update / (-learning_rate): the gradient, if the update is that of one step of plain SGD."""
    return {name: t / -learning_rate for name, t in update.items()}


def to_update(gradient: Update, learning_rate: float) -> Update:
    """Return -learning_rate * gradient, the update of one step of plain SGD. Zeros become +0.0, which sparse codecs omit."""
    return {name: t * -learning_rate + 0.0 for name, t in gradient.items()}


def in_gradient_units(defense: Defense, learning_rate: float) -> Defense:
    """Apply a defense to update / (-learning_rate), and convert the result back into an update.

    Returns this defense, a `Defense`.
    defense:       defense in units of the gradient; in a specification, in_gradient_units(clip(4) | gaussian(0.01), 0.1).
    learning_rate: learning rate of the clients' training; positive and finite. In the specification of an experiment's defense it
                   may be left out, and the experiment's learning rate is used. For several local steps of plain SGD,
                   update / (-learning_rate) is the sum of the gradients of these steps.
    Source: Wei et al. 2020, algorithm 1.
    """
    if not isinstance(defense, Defense):
        raise ValueError(
            f"in_gradient_units: the first argument must be a defense, as in in_gradient_units(clip(1), 0.1), got {defense!r}"
        )
    if not 0 < learning_rate < math.inf:
        raise ValueError(f"in_gradient_units: learning_rate must be positive and finite, got {learning_rate}")

    def init(template: Update) -> State:
        return defense.init(template)

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        sent, after = defense.apply(to_gradient(update, learning_rate), state, rng)
        return to_update(sent, learning_rate), after

    return Defense(init, apply)


def _join_states(residual: Update, inner: State) -> State:
    return {f"residual/{name}": t for name, t in residual.items()} | {f"inner/{name}": t for name, t in inner.items()}
