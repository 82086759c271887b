"""The L-BFGS memory: pairs of steps and gradient changes for a batch of independent problems.

Shapes: P problems, D coordinates of a problem, C pairs that memory is allocated for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import OptimiserState

FIRST_CAPACITY = 16
"""Number of pairs that memory is allocated for at first. The capacity doubles as needed up to the limit, since short searches
with large latents need no more than the first one."""


@dataclass
class History:
    """The L-BFGS memory of each problem, and the product of its inverse Hessian approximation with a gradient.

    limit:          maximum number of pairs per problem.
    min_curvature:  a pair is stored only if <step, change> > min_curvature * ||step|| * ||change||.
    steps, changes: differences of latents and of gradients, (P, C, D), stored as a ring buffer per problem; the next pair of
                    problem p is written at index `count[p] % limit`. C is increased before an index reaches it.
    products:       inner products <step i, change j>, (P, C, C); valid only if pair i is not newer than pair j.
    count:          number of pairs stored since the start or since `forget`, those overwritten included, (P,).
    scale:          initial inverse Hessian of L-BFGS, a multiple of the identity, (P, 1).
    width:          number of the C indices in use: the largest `count` of a problem at the last `add`, at most `limit`.
    """

    limit: int
    min_curvature: float
    steps: Tensor
    changes: Tensor
    products: Tensor
    count: Tensor
    scale: Tensor
    width: int = 0

    @classmethod
    def empty(cls, like: Tensor, *, limit: int, min_curvature: float) -> "History":
        """Return an empty memory for latents shaped like `like`, (P, D)."""
        (problems, size), capacity = like.shape, min(FIRST_CAPACITY, limit)
        return cls(
            limit,
            min_curvature,
            like.new_zeros(problems, capacity, size),
            like.new_zeros(problems, capacity, size),
            like.new_zeros(problems, capacity, capacity),
            torch.zeros(problems, dtype=torch.long, device=like.device),
            like.new_ones(problems, 1),
        )

    def add(self, step: Tensor, change: Tensor) -> None:
        """Store one pair per problem, step (P, D) and change (P, D) of the gradient, if <step, change> is large enough."""
        curvature = (step * change).sum(dim=1)
        positive = curvature > self.min_curvature * norm(step) * norm(change)
        squares = change.square().sum(dim=1)
        positive &= torch.minimum(curvature, squares) > torch.finfo(step.dtype).tiny  # denormal numbers lose precision
        self.scale = torch.where(positive[:, None], (curvature / squares)[:, None], self.scale)
        self._make_room()
        rows, place = torch.arange(len(step), device=step.device), self.count % self.limit
        for kept, new in ((self.steps, step), (self.changes, change)):
            kept[rows, place] = torch.where(positive[:, None], new, kept[rows, place])
        column = _compute_products(self.steps, change)
        self.products[rows, :, place] = torch.where(positive[:, None], column, self.products[rows, :, place])
        self.count = self.count + positive
        self.width = min(int(self.count.max()), self.limit)

    def compute_direction(self, gradient: Tensor) -> Tensor:
        """Return the quasi-Newton direction (P, D) for gradients (P, D): minus the inverse Hessian approximation times gradient.

        The two loops of L-BFGS (Nocedal 1980) are written as two triangular systems, R a = S q and
        R^T c = diag(R) a - scale Y r, with q the negative gradient, R the upper triangle of `products` in chronological order,
        S the steps, Y the changes, and r = q - Y^T a. This needs far fewer kernel calls, which makes small problems faster.
        """
        if not self.width:
            return -self.scale * gradient
        steps, changes = self.steps[:, : self.width], self.changes[:, : self.width]
        order, back = self._order()
        products = self.products[:, : self.width, : self.width]
        ordered = products.gather(1, order[:, :, None].expand_as(products)).gather(2, order[:, None, :].expand_as(products))
        diagonal = ordered.diagonal(dim1=1, dim2=2)
        upper = ordered.triu() + torch.diag_embed((diagonal == 0).to(diagonal.dtype))  # 1 for unused pairs
        a = _solve(upper, -_compute_products(steps, gradient).gather(1, order), upper=True)
        q = -gradient - _combine(changes, a.gather(1, back))
        right = diagonal * a - self.scale * _compute_products(changes, q).gather(1, order)
        c = _solve(upper.transpose(1, 2), right, upper=False)
        return self.scale * q + _combine(steps, c.gather(1, back))

    def _order(self) -> tuple[Tensor, Tensor]:
        """Return the ring buffer's indices from the oldest pair to the newest, and the inverse permutation, (P, width) each."""
        oldest = torch.where(self.count >= self.width, self.count, 0)[:, None]
        places = torch.arange(self.width, device=self.count.device)
        return (places + oldest) % self.width, (places - oldest) % self.width

    def forget(self, problems: Tensor) -> None:
        """Drop the pairs of the problems where the mask (P,) is true, and reset their `scale` to 1."""
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

    def _widen(self, pairs: int) -> None:
        """Allocate memory for `pairs` more pairs, one tensor at a time, since two copies of all might not fit."""
        for name, places in (("steps", (0, 0, 0, pairs)), ("changes", (0, 0, 0, pairs)), ("products", (0, pairs, 0, pairs))):
            setattr(self, name, torch.nn.functional.pad(getattr(self, name), places))

    def keep(self, rows: Tensor) -> None:
        for name in _TENSOR_FIELDS:
            setattr(self, name, getattr(self, name)[rows])

    def get_state(self) -> OptimiserState:
        """Return the memory as tensors by name, for a checkpoint, without its unused part; `of` reads them back."""
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
    def of(cls, state: OptimiserState, *, limit: int, min_curvature: float) -> "History":
        """Return the memory saved by `get_state`, allocated as large as it was: other tensor sizes could change rounding."""
        width = int(state["width"])
        history = cls(limit, min_curvature, **{name: state[name] for name in _TENSOR_FIELDS}, width=width)
        history._widen(int(state["room"]) - width)
        return history


_TENSOR_FIELDS = ("steps", "changes", "products", "count", "scale")


def norm(t: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(t, dim=1)
    return length


def _compute_products(vectors: Tensor, vector: Tensor) -> Tensor:
    """Return the inner products (P, C) of `vectors` (P, C, D) with `vector` (P, D), in the order that is faster on a CPU."""
    return torch.bmm(vector[:, None], vectors.transpose(1, 2))[:, 0]


def _combine(vectors: Tensor, weights: Tensor) -> Tensor:
    """Return, for each problem, the sum of its C `vectors`, (P, C, D), weighted by its `weights`, (P, C), as (P, D)."""
    return torch.bmm(weights[:, None], vectors)[:, 0]


def _solve(triangle: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    solution: Tensor = torch.linalg.solve_triangular(triangle, right[:, :, None], upper=upper)
    return solution[:, :, 0]
