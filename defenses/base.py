"""What a client does to its update before it leaves: pure pairs of functions, put together with `chain`."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Generator, Tensor

Update = Mapping[str, Tensor]
"""Local minus global weights, by parameter name."""

State = Mapping[str, Tensor]
"""What a defense keeps between two rounds of one client, by name: flat, so that any framework can store it."""


class Defense(NamedTuple):
    """What a client does to its update before it leaves.

    init:  from an update-shaped template, the state before round one.
    apply: from (update, state, rng), the update to send and the next state. Changes none of its arguments.
    """

    init: Callable[[Update], State]
    apply: Callable[[Update, State, Generator], tuple[Update, State]]


def stateless(function: Callable[[Update, Generator], Update]) -> Defense:
    """A defense that remembers nothing between rounds."""
    return Defense(init=lambda template: {}, apply=lambda update, state, rng: (function(update, rng), state))


def chain(*defenses: Defense) -> Defense:
    """Apply `defenses` from left to right; `chain()` is the identity."""

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
    """Euclidean norm of all tensors of `update` taken as one vector; a 0-d tensor of float32 or finer."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack([tensor_norm(t) for t in update.values()]))
    return norm


def tensor_norm(tensor: Tensor) -> Tensor:
    """Euclidean norm, 0-d, in float32 or finer: the squares of a float16 soon exceed its range."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm
