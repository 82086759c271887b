"""What L-BFGS remembers of the curvature of many problems at once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import State

FIRST_CAPACITY = 16
"""Pairs for which there is room at first; it doubles up to the limit: short searches of large latents need no more."""


@dataclass
class History:
    """The last pairs of each problem, and the product of the inverse Hessian that they make with a gradient.

    steps, changes: differences of latents and of gradients, (P, C, D); those of problem p in a ring, the next at `count[p]`.
    products:       (P, C, C), step i times change j, right where pair i is no newer than pair j.
    count:          (P,), pairs so far; width: of no problem are more places in use.
    scale:          (P, 1), the multiple of the identity that the pairs correct.
    limit:          pairs that are remembered at most.
    least:          a pair is remembered where step times change is above this share of both lengths' product.
    """

    limit: int
    least: float
    steps: Tensor
    changes: Tensor
    products: Tensor
    count: Tensor
    scale: Tensor
    width: int = 0

    @classmethod
    def empty(cls, like: Tensor, *, limit: int, least: float) -> "History":
        """For latents (P, D)."""
        (problems, size), capacity = like.shape, min(FIRST_CAPACITY, limit)
        return cls(
            limit,
            least,
            like.new_zeros(problems, capacity, size),
            like.new_zeros(problems, capacity, size),
            like.new_zeros(problems, capacity, capacity),
            torch.zeros(problems, dtype=torch.long, device=like.device),
            like.new_ones(problems, 1),
        )

    def add(self, step: Tensor, change: Tensor) -> None:
        """Remember the pairs (P, D) that have positive curvature."""
        curvature = (step * change).sum(dim=1)
        positive = curvature > self.least * norm(step) * norm(change)
        squares = change.square().sum(dim=1)
        positive &= torch.minimum(curvature, squares) > torch.finfo(step.dtype).tiny  # below which numbers lose their digits
        self.scale = torch.where(positive[:, None], (curvature / squares)[:, None], self.scale)
        self._make_room()
        rows, place = torch.arange(len(step), device=step.device), self.count % self.limit
        for kept, new in ((self.steps, step), (self.changes, change)):
            kept[rows, place] = torch.where(positive[:, None], new, kept[rows, place])
        column = _products(self.steps, change)
        self.products[rows, :, place] = torch.where(positive[:, None], column, self.products[rows, :, place])
        self.count = self.count + positive
        self.width = min(int(self.count.max()), self.limit)

    def direction(self, gradient: Tensor) -> Tensor:
        """(P, D), the step to the minimum of the model: the two loops of L-BFGS (Nocedal 1980) as two triangular systems.

        The loops' numbers solve R a = S q and R^T c = diag(R) a - scale Y r, with R the upper triangle of `products` in the
        order of time, S the steps, Y the changes, and r = q - Y^T a. It takes four passes through memory, as the loops do, in
        so few calls that small problems gain most.
        """
        if not self.width:
            return -self.scale * gradient
        steps, changes = self.steps[:, : self.width], self.changes[:, : self.width]
        order, back = self._order()
        products = self.products[:, : self.width, : self.width]
        ordered = products.gather(1, order[:, :, None].expand_as(products)).gather(2, order[:, None, :].expand_as(products))
        diagonal = ordered.diagonal(dim1=1, dim2=2)
        upper = ordered.triu() + torch.diag_embed((diagonal == 0).to(diagonal.dtype))  # places that are not in use yet
        a = _solve(upper, -_products(steps, gradient).gather(1, order), upper=True)
        q = -gradient - _combined(changes, a.gather(1, back))
        right = diagonal * a - self.scale * _products(changes, q).gather(1, order)
        c = _solve(upper.transpose(1, 2), right, upper=False)
        return self.scale * q + _combined(steps, c.gather(1, back))

    def _order(self) -> tuple[Tensor, Tensor]:
        """(P, width), the places from the oldest pair to the newest, and for each place its number in that order."""
        oldest = torch.where(self.count >= self.width, self.count, 0)[:, None]
        places = torch.arange(self.width, device=self.count.device)
        return (places + oldest) % self.width, (places - oldest) % self.width

    def forget(self, problems: Tensor) -> None:
        """Drop the pairs of the problems where the mask (P,) is true."""
        for kept in (self.steps, self.changes, self.products):
            kept[problems] = 0
        self.count = torch.where(problems, 0, self.count)
        self.scale = torch.where(problems[:, None], 1, self.scale)

    def _make_room(self) -> None:
        room = self.steps.shape[1]
        if self.width < room or room == self.limit:
            return
        more = min(room, self.limit - room)
        self._widen(more)

    def _widen(self, more: int) -> None:
        """Room for so many pairs more, in new memory. One tensor after the other: both histories twice may be too much."""
        for name, places in (("steps", (0, 0, 0, more)), ("changes", (0, 0, 0, more)), ("products", (0, more, 0, more))):
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), places))

    def keep(self, rows: Tensor) -> None:
        for name in _ROWS:
            setattr(self, name, getattr(self, name)[rows])

    def state(self) -> State:
        """Without the places that are not in use, which are most of a history at first."""
        used = slice(self.width)
        return {
            "steps": self.steps[:, used],
            "changes": self.changes[:, used],
            "products": self.products[:, used, used],
            "count": self.count,
            "scale": self.scale,
            "width": torch.tensor(self.width),
            "room": torch.tensor(self.steps.shape[1]),
        }

    @classmethod
    def of(cls, state: State, *, limit: int, least: float) -> "History":
        """With as much room as it had: products of another number of vectors may be rounded otherwise."""
        width = int(state["width"])
        history = cls(limit, least, **{name: state[name] for name in _ROWS}, width=width)
        history._widen(int(state["room"]) - width)
        return history


_ROWS = ("steps", "changes", "products", "count", "scale")


def norm(t: Tensor) -> Tensor:
    """(P,), the lengths of vectors (P, D)."""
    length: Tensor = torch.linalg.vector_norm(t, dim=1)
    return length


def _products(vectors: Tensor, one: Tensor) -> Tensor:
    """(P, C): each of the vectors (P, C, D) times `one` (P, D). In this order `bmm` is four times as fast on a CPU."""
    return torch.bmm(one[:, None], vectors.transpose(1, 2))[:, 0]


def _combined(vectors: Tensor, weights: Tensor) -> Tensor:
    """(P, D): the sum of the vectors (P, C, D), times `weights` (P, C)."""
    return torch.bmm(weights[:, None], vectors)[:, 0]


def _solve(triangle: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(triangle, right[:, :, None], upper=upper)
    return solution[:, :, 0]
