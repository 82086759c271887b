"""The base of defenses that clients apply to their updates: pairs of pure functions, composed with `chain`."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Generator, Tensor

Update = Mapping[str, Tensor]
"""Local minus global weights, by parameter name."""

State = Mapping[str, Tensor]
"""State of a defense between two rounds of one client: tensors by name. It is flat so that any framework can store it."""


class Defense(NamedTuple):
    """A transformation that a client applies to its update before sending it.

    init:  maps a template shaped like an update to the state before the first round.
    apply: maps (update, state, rng) to the update to send and the next state. Does not change its arguments.
    """

    init: Callable[[Update], State]
    apply: Callable[[Update, State, Generator], tuple[Update, State]]


def stateless(function: Callable[[Update, Generator], Update]) -> Defense:
    """Return a defense that applies `function` and keeps no state between rounds."""
    return Defense(init=lambda template: {}, apply=lambda update, state, rng: (function(update, rng), state))


def chain(*defenses: Defense) -> Defense:
    """Return the defense that applies `defenses` from left to right; `chain()` is the identity."""

    def init(template: Update) -> State:
        return {f"{i}/{name}": tensor for i, defense in enumerate(defenses) for name, tensor in defense.init(template).items()}

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        after: dict[str, Tensor] = {}
        for i, defense in enumerate(defenses):
            prefix = f"{i}/"
            own = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            update, own_after = defense.apply(update, own, rng)
            after |= {prefix + name: tensor for name, tensor in own_after.items()}
        return update, after

    return Defense(init, apply)


identity = chain()


def global_norm(update: Update) -> Tensor:
    """Return the Euclidean norm of all tensors of `update` as one vector: a 0-d tensor in float32 or higher precision."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack([tensor_norm(t) for t in update.values()]))
    return norm


def tensor_norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm as a 0-d tensor in float32 or higher precision, since squares overflow float16."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm
