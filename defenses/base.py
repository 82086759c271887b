"""The type of defenses that clients apply to their updates, chains of defenses, and helpers: norms, masks and ranks."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

Tensors = Mapping[str, Tensor]
"""A dict from name to tensor."""

Update = Mapping[str, Tensor]
"""Local minus global weights, by parameter name."""

State = Mapping[str, Tensor]
"""State of a defense between two rounds of one client: tensors by name. It is flat so that any framework can store it."""

Scope = Literal["tensor", "global"]

Mask = Mapping[str, Tensor]
"""Boolean tensors in the shape of an update, by parameter name."""


class Defense(NamedTuple):
    """A transformation that a client applies to its update before sending it.

    init:  maps a template shaped like an update to the state before the first round.
    apply: maps (update, state, rng) to the update to send and the next state. It leaves `update` and `state` as they are, and may
           draw from `rng`.
    """

    init: Callable[[Update], State]
    apply: Callable[[Update, State, Generator], tuple[Update, State]]


def stateless(function: Callable[[Update, Generator], Update]) -> Defense:
    """Return a defense that applies `function` (update, rng) and keeps no state between rounds."""
    return Defense(init=lambda template: {}, apply=lambda update, state, rng: (function(update, rng), state))


def chain(*defenses: Defense) -> Defense:
    """Return the defense that applies `defenses` from left to right. `chain()` returns the update as it is."""

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
    """Return the Euclidean norm of all tensors of `update` as one vector: a 0-d tensor in float32 or higher precision.

    `update` must have at least one tensor.
    """
    norm: Tensor = torch.linalg.vector_norm(torch.stack([tensor_norm(t) for t in update.values()]))
    return norm


def tensor_norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm as a 0-d tensor in float32 or higher precision, since squares can overflow float16."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm


# --- norms and ranks: of each tensor separately, or of the whole update as one vector ---


def check_scope(name: str, scope: str) -> None:
    """Raise ValueError if `scope` is neither "tensor" nor "global". name: name of the defense, for the message."""
    if scope not in get_args(Scope):
        raise ValueError(f"{name}: scope must be 'tensor' or 'global', got {scope!r}")


def choose_masks(update: Update, scope: Scope, choose: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return boolean masks by parameter name, chosen for each tensor (scope "tensor") or for all concatenated ("global").

    choose: maps a vector (n,) to booleans (n,).
    Tensors are processed in alphabetical order of their names, so that random draws do not depend on the order of `update`.
    """
    names = sorted(update)
    if scope == "tensor":
        return {name: choose(update[name].flatten()).reshape(update[name].shape) for name in names}
    chosen = choose(torch.cat([update[name].flatten() for name in names]))
    parts = torch.split(chosen, [update[name].numel() for name in names])
    return {name: part.reshape(update[name].shape) for name, part in zip(names, parts, strict=True)}


def compute_magnitudes(values: Tensor) -> Tensor:
    """Return absolute values for ranking. NaN becomes infinity, so that it ranks among the largest."""
    return values.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def find_kth_largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return the k-th largest of (n,) values as a 0-d tensor; 1 <= k <= n."""
    return torch.kthvalue(magnitudes, magnitudes.numel() - k + 1).values


def compute_share(share: float, count: int) -> Fraction:
    """Return share * count as an exact fraction, with `share` as written in decimals: 0.07 * 100 is 7, not 7.000000000000001."""
    return Fraction(str(float(share))) * count
