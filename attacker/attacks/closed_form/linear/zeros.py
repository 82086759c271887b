"""Zero patterns: which neurons are on along a direction in the span of a gradient, and whether an example can cause that."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.low_rank import BEYOND, Factors

FAR = 100.0
"""Largest value that counts as zero, in standard deviations of noise, if all other values are much larger."""

NEAR = 1e-3
"""Of a unit row, how much of it along a sampled direction still counts as none; such a direction has the rounding of few rows."""

FEW = 4
"""Smallest number of zeros of a direction that is informative."""


class Pattern(NamedTuple):
    """Of K directions: on (M, K), which neurons are not zero in them. told: (M, K), of which neurons noise lets this be told."""

    on: Tensor
    told: Tensor

    def of(self, columns: Sequence[int]) -> "Pattern":
        columns = list(columns)
        return Pattern(self.on[:, columns], self.told[:, columns])


def pattern(q: Tensor, factors: Factors) -> Pattern:
    """The zeros of directions q (R, K). A zero is told where noise is small beside what the direction has elsewhere."""
    d, noise = (factors.coordinates @ q).abs(), factors.noise[:, None] * q.norm(dim=0)
    on = d > BEYOND * noise
    typical = (d * on).sum(dim=0) / on.sum(dim=0).clamp(min=1)
    on = d > nothing(noise, typical)
    return Pattern(on, on | (BEYOND * noise < typical / 10))


def nothing(noise: Tensor, typical: Tensor | float) -> Tensor:
    """Up to where a value is taken for zero: for more where all others are far larger, as rounding differs between directions."""
    return torch.maximum(BEYOND * noise, torch.minimum(FAR * noise, NEAR * torch.as_tensor(typical).to(noise)))


def agreement(q: Tensor, seen: Pattern, forward: Tensor, constant: Tensor | None) -> Tensor:
    """(R,) of each direction of q (R, R), the share of neurons that are zero in it exactly where its example turns them off.

    0 where that can be told of few neurons, or where all are on, which says nothing.
    """
    p, info = torch.linalg.inv_ex(q)
    if int(info) or not bool(torch.isfinite(p).all()):
        return torch.zeros(q.shape[1], dtype=q.dtype, device=q.device)
    z = forward @ p.T
    enough = ((seen.told & ~seen.on).sum(dim=0) >= FEW) & (seen.on.sum(dim=0) >= 1)
    count = seen.told.sum(dim=0).clamp(min=1)
    if constant is not None:
        result: Tensor = ((seen.on == (z * torch.sign(p @ constant) > 0)) & seen.told).sum(dim=0) / count * enough
        return result
    both = torch.stack([((seen.on == (side * z > 0)) & seen.told).sum(dim=0) for side in (1, -1)])
    return both.amax(dim=0) / count * enough


def separable(seen: Pattern, forward: Tensor) -> Tensor:
    """(K,) of each direction, how well a plane tells the neurons that are on in it from the others: 1 where it is of an example.

    A neuron is on where w x + b > 0, and all w and b are known: what is on for one example lies on one side of a plane. What is
    on for either of two, as in a mixture of their directions, does not. The mean of the shares that are right, among both kinds.
    """
    on, off = seen.on, seen.told & ~seen.on
    x, both = unit_rows(forward), seen.told.to(forward.dtype)
    enough = (on.sum(dim=0) > 0) & (off.sum(dim=0) >= FEW)
    side = x @ logistic(x, on.to(x.dtype), both, ridges=(1.0, 0.1, 0.01, 1e-3, 1e-4)).T > 0
    return (balanced(side, on, off) * enough).nan_to_num(nan=0.0)


def balanced(side: Tensor, on: Tensor, off: Tensor) -> Tensor:
    right = (side & on).sum(dim=0) / on.sum(dim=0).clamp(min=1) + (~side & off).sum(dim=0) / off.sum(dim=0).clamp(min=1)
    return right / 2


def unit_rows(forward: Tensor) -> Tensor:
    result: Tensor = forward / forward.norm(dim=1, keepdim=True).clamp(min=torch.finfo(forward.dtype).tiny)
    return result


def logistic(x: Tensor, y: Tensor, weight: Tensor, ridges: tuple[float, ...] = (0.05,)) -> Tensor:
    """(K, R) weights of K ridge logistic regressions of y (M, K) in [0, 1] on x (M, R), by Newton's method.

    weight: (M, K), of each row in each. ridges: one after the other, each from where the last one ended.
    """
    w = x.new_zeros(y.shape[1], x.shape[1])
    eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    for ridge in ridges:
        for _ in range(6):
            s = torch.sigmoid(w @ x.T)
            hessian = (x.T * (s * (1 - s) * weight.T)[:, None]) @ x + ridge * eye
            slope = (weight.T * (y.T - s)) @ x - ridge * w
            w = w + torch.linalg.solve(hessian, slope[..., None])[..., 0]
    return w
