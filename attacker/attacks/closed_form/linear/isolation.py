"""Examples that are alone at some neuron: there a row of [dL/dW, dL/db] is a multiple of [x, 1] and of nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.low_rank import BEYOND, ROUNDING

FAR = 100.0
"""How many standard deviations apart two directions may be where that is still very near, see `NEAR`."""

NEAR = 1e-5
"""Of unit directions, how near they must be for that."""

WIDEST = 0.02
"""As far apart as they may be whatever the noise."""

PAIRS = 4096
"""Pairs of rows that are compared at a time."""


@dataclass(frozen=True)
class Groups:
    """Rows that point the same way: directions (K, F) of length 1, and of how many rows each, (K,), most first.

    chance: (K,) how many rows would be in each by chance, had all rows random directions.
    """

    directions: Tensor
    count: Tensor
    chance: Tensor

    @property
    def confirmed(self) -> Tensor:
        """(K,) whether far more rows agree than would by chance."""
        return (self.count > 1) & (self.count - 1 > 5 * self.chance)


def parallel_rows(rows: Tensor, noise: Tensor, live: Tensor) -> Groups:
    """Group the live ones of rows (M, F) by direction, up to their sign and noise (M,), the standard deviation of their values.

    Rows of different examples, or of several at once, are not parallel but by chance: rows that agree confirm each other.
    """
    kept, level = rows[live], noise[live]
    if not len(kept):
        return Groups(rows.new_zeros(0, rows.shape[1]), torch.zeros(0, dtype=torch.long, device=rows.device), rows.new_zeros(0))
    length = kept.norm(dim=1)
    unit, error = kept / length[:, None], level * rows.shape[1] ** 0.5 / length
    cosine = unit @ unit.T
    first, second = (cosine.abs() > 0.99).triu(diagonal=1).nonzero(as_tuple=True)
    side = torch.sign(cosine[first, second])[:, None]
    near = torch.zeros_like(cosine, dtype=torch.bool)
    for start in range(0, len(first), PAIRS):
        part = slice(start, start + PAIRS)
        a, b = first[part], second[part]
        near[a, b] = (unit[a] - side[part] * unit[b]).norm(dim=1) <= _allowed(error[a], error[b])
    near = near | near.T | torch.eye(len(unit), dtype=torch.bool, device=rows.device)
    return _grouped(unit, error, near)


def _grouped(unit: Tensor, error: Tensor, near: Tensor) -> Groups:
    """Greedily the row with most neighbours and these, until all rows are in a group."""
    free = torch.ones(len(unit), dtype=torch.bool, device=unit.device)
    directions, counts, chances = [], [], []
    while bool(free.any()):
        neighbours = (near & free).sum(dim=1) * free
        centre = neighbours.argmax()
        members = near[centre] & free
        weight = 1 / error[members].clamp(min=torch.finfo(unit.dtype).tiny).square()
        side = torch.sign(unit[members] @ unit[members][0])
        mean = ((weight * side / weight.max())[:, None] * unit[members]).sum(dim=0)
        directions.append(mean / mean.norm())
        counts.append(int(members.sum()))
        chances.append((_allowed(error[centre], error[free]) ** (unit.shape[1] - 1)).sum())
        free = free & ~members
    return Groups(torch.stack(directions), torch.tensor(counts, device=unit.device), torch.stack(chances))


def _allowed(first: Tensor, second: Tensor) -> Tensor:
    """How far apart two unit directions with these standard deviations may be to be the same."""
    both = first.hypot(second)
    return torch.maximum(BEYOND * both, (FAR * both).clamp(max=NEAR)).clamp(max=WIDEST)


def rounding_of(rows: Tensor) -> Tensor:
    """(M,) the standard deviation of what storing rows (M, F) in float32 leaves of each of their values."""
    return (ROUNDING * rows.square().mean(dim=1).sqrt()).clamp(min=torch.finfo(rows.dtype).tiny)


def independent(directions: Tensor, *, least: float = 1e-4) -> list[int]:
    """Which of unit directions (K, F) lie outside of the span of those before them, by more than `least`."""
    found: list[int] = []
    basis = directions.new_zeros(0, directions.shape[1])
    for i, direction in enumerate(directions):
        left = direction - basis.T @ (basis @ direction)
        if float(left.norm()) > least:
            left = left - basis.T @ (basis @ left)
            basis = torch.cat([basis, (left / left.norm())[None]])
            found.append(i)
        if len(found) == directions.shape[1]:
            break
    return found
