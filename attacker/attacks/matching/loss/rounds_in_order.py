"""The comparison of candidates with all rounds of a client in order, for defenses with a state such as error feedback.

The residual, the part of an update that such a defense does not send, enters the messages of later rounds. For a candidate, the
attacker can simulate it. One autograd graph therefore holds the gradients of all rounds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap

from attacker.attacks.gradients.products import GradientTensors
from attacker.attacks.matching.loss.problems import Decode, ProblemRow, map_problems
from attacker.attacks.matching.loss.view import View
from defenses.channel import ChannelState

MAX_STACKED_WEIGHTS = 2e7
"""Number of weights of all rounds together up to which their gradients are computed at once by `vmap`. For twenty rounds of a
LeNet, `vmap` takes a fifth of the time of a loop over rounds, which spends most time on calls of PyTorch."""


class RoundsInOrder:
    """All rounds of a batch of cases, compared with candidates in order. views: one per round, in order."""

    def __init__(self, views: Sequence[View]) -> None:
        self.views = views
        first, size = views[0], sum(w.numel() for view in views for w in view.weights.values())
        alike = all(view.shared and view.same_buffers and view.sizes == first.sizes for view in views)
        stacked = (
            alike and not (first.simulation.surrogate or first.bottleneck) and size <= MAX_STACKED_WEIGHTS and len(views) > 1
        )
        self.weights = _stack([view.weights for view in views]) if stacked else None
        self.buffers = _stack([view.buffers for view in views]) if stacked else {}

    def evaluate(self, z: Tensor, per_problem: ProblemRow, decode: Decode) -> tuple[Tensor, Tensor]:
        """Return the sum over rounds of the weighed distances at latents z (P, D): first its gradient by z, then its values (P,).

        per_problem: the data of the problems, as `CaseBatch.build_problem` returns it.
        """
        shared = {name: value for name, value in per_problem.items() if name != "views"}
        rows = [per_problem["views"][str(o)] for o in range(len(self.views))]
        state: ChannelState = {}
        value = torch.zeros_like(z[:, 0])
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            gradients = self._compute_gradients(*decode(z, shared), z, rows)
            for view, row, gradient in zip(self.views, rows, gradients, strict=True):
                distance, state = map_problems(view.follow_round, gradient, row, state)
                value = value + view.weigh(distance, row, shared)
            if not value.requires_grad:  # no part of the gradient was sent
                return torch.zeros_like(z), value
            (slope,) = torch.autograd.grad(value.sum(), z)
        return slope, value.detach()

    def _compute_gradients(self, x: Tensor, y: Tensor, z: Tensor, rows: Sequence[ProblemRow]) -> Sequence[GradientTensors]:
        """Return for each round a dict from name to gradients (P, *shape) of all problems, before the defense changes them."""
        if self.weights is None:
            return [view.compute_gradients(x, y, z, row) for view, row in zip(self.views, rows, strict=True)]
        compute = self.views[0].gradient

        def compute_round(weights: GradientTensors, buffers: GradientTensors, places: Tensor) -> GradientTensors:
            return vmap(lambda x, y, at: compute(weights, x[at], y[at], buffers))(x, y, places)

        gradients = vmap(compute_round)(self.weights, self.buffers, torch.stack([row["places"] for row in rows]))
        return [{name: g[o] for name, g in gradients.items()} for o in range(len(rows))]


def _stack(each: Sequence[GradientTensors]) -> GradientTensors:
    return {name: torch.stack([gradient[name] for gradient in each]) for name in each[0]}
