"""Readings of the last layer's gradient: the features that entered it, and dL/dlogits (R-GAP, section 3.1.1).

For one example, dL/dW = k f^T with k = dL/dlogits. With a bias, k is the gradient of the bias. Without one, k and f are known up
to a factor, which the loss determines. For two classes there may be two solutions: the example and its twin (R-GAP, appendix B).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

TURN = 1.2784645427610738
"""The mu that minimises -mu / (1 + exp(mu)): exp(mu) (mu - 1) = 1."""
LOWEST = -0.2784645427610738
"""The minimum of -mu / (1 + exp(mu)); R-GAP, figure 1. No gradient of one example is below it."""

GRID = 512
TURNS = 3
NEAR = 0.25
"""Smallest magnitude of the label's entry, relative to the largest entry."""
FAINTEST = 1e-14
"""Smallest 1 - p_y that is searched for."""
SECOND = 1e-3
"""Largest second singular value, relative to the first, of a gradient of one example."""


@dataclass(frozen=True)
class HeadReading:
    """One solution for each of N last layers.

    features: (N, F). k: (N, K), dL/dlogits. y: (N,) int64 labels. valid: (N,) whether the solution exists.
    clamped:  (N,) whether no example gives exactly this gradient, so that the nearest possible one was used.
    misfit:   (N,) distance between k and dL/dlogits of these features, relative to its norm.
    """

    features: Tensor
    k: Tensor
    y: Tensor
    valid: Tensor
    clamped: Tensor
    misfit: Tensor

    def where(self, condition: Tensor, other: "HeadReading") -> "HeadReading":
        """Itself where `condition` (N,) holds, `other` elsewhere."""
        pairs = {key: (value, getattr(other, key)) for key, value in vars(self).items()}
        return HeadReading(
            **{key: torch.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b) for key, (a, b) in pairs.items()}
        )


def read_heads(
    loss: str, weight: Tensor, bias: Tensor | None, gradient: Tensor, bias_gradient: Tensor | None
) -> list[HeadReading]:
    """Return all solutions of N last layers, likelier ones first: for ambiguous labels, then for twins.

    weight, gradient: (1 or N, K, F) and (N, K, F). bias, bias_gradient: (1 or N, K) and (N, K), or None. In float64.
    """
    if bias is not None and bias_gradient is not None and bool((bias_gradient != 0).any()):
        return [_from_bias(loss, weight, bias, gradient, bias_gradient)]
    if loss == "logistic" and bias is not None:
        raise ValueError(
            "the gradient of the last layer's bias is zero or was not sent, and without it a single logit says too little"
        )
    if loss == "logistic":
        return _from_product(weight, gradient)
    return _from_direction(weight, bias, gradient)


def more_than_one(gradient: Tensor) -> Tensor:
    """Return (N,) booleans: whether dL/dW (N, K, F) of the last layer has rank above one, which several examples cause."""
    values = torch.linalg.eigvalsh(gradient @ gradient.mT).clamp(min=0)
    if values.shape[1] < 2:
        return torch.zeros(len(gradient), dtype=torch.bool, device=gradient.device)
    several: Tensor = values[:, -2] > SECOND**2 * values[:, -1]
    return several


def logistic_roots(s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve -mu / (1 + exp(mu)) = s for mu (R-GAP, eq. 11).

    For s > 0 there is one solution, below 0. For s in (LOWEST, 0) there are two, below and above `TURN` (twins). Below LOWEST
    there is none, and TURN is the nearest. Returns (lower, upper, whether upper exists, whether s < LOWEST), each of the shape
    of s.
    """
    clamped = s < LOWEST
    inside = s.clamp(min=LOWEST)
    low = torch.where(inside > 0, -2 * inside, torch.zeros_like(s))
    high = torch.where(inside > 0, -inside, torch.full_like(s, TURN))
    lower = _bisect(lambda mu: -mu / (1 + mu.exp()) - inside, low, high)
    most = 2 * (-inside).clamp(min=1e-300, max=1).log().neg() + 2
    upper = _bisect(lambda mu: mu / (1 + mu.exp()) + inside, torch.full_like(s, TURN), most.clamp(min=TURN))
    return lower, upper, (inside < 0) & ~clamped, clamped


def _bisect(f: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, rounds: int = 80) -> Tensor:
    """Return the zero of a decreasing function, elementwise."""
    for _ in range(rounds):
        middle = (low + high) / 2
        above = f(middle) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _from_bias(loss: str, weight: Tensor, bias: Tensor, gradient: Tensor, k: Tensor) -> HeadReading:
    features = (k[:, None] @ gradient)[:, 0] / k.square().sum(dim=1, keepdim=True)
    y = (k[:, 0] < 0).long() if loss == "logistic" else k.argmin(dim=1)
    never = torch.zeros(len(k), dtype=torch.bool, device=k.device)
    return HeadReading(features, k, y, ~never, never, _misfit(loss, weight, bias, features, k, y))


def _from_product(weight: Tensor, gradient: Tensor) -> list[HeadReading]:
    """Return the solutions for a single logit without bias: each label and each root."""
    lower, upper, two, clamped = logistic_roots((weight * gradient).sum(dim=(1, 2)))
    first = gradient[:, 0].sum(dim=1) < 0  # right where features are positive for the most part
    heads = []
    for mu, valid in ((lower, torch.ones_like(two)), (upper, two)):
        for y in (first.long(), 1 - first.long()):
            k = torch.where(y == 1, -1.0, 1.0) / (1 + mu.exp())
            features = gradient[:, 0] / k[:, None]
            heads.append(HeadReading(features, k[:, None], y, valid, clamped, torch.zeros_like(mu)))
    return heads


def _from_direction(weight: Tensor, bias: Tensor | None, gradient: Tensor) -> list[HeadReading]:
    """Return the solutions for several logits: k = c u, u the left singular vector of dL/dW, softmax(W f + b) - e_y = k."""
    rough = torch.linalg.eigh(gradient @ gradient.mT)[1][:, :, -1:]
    u = (gradient @ (gradient.mT @ rough))[..., 0]  # so that small entries, too, are right in all their digits
    u = u / u.norm(dim=1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    heads: list[HeadReading] = []
    for y, possible in _labels(u):
        readings = _scaled(weight, bias, gradient, u, y)
        heads += [replace(head, valid=head.valid & possible) for head in readings]
    return _as_good(heads)


def _labels(u: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Candidates (N,) for the label, and whether they are any: its entry of u (N, K) alone has its sign, and is minus the
    sum of all others.

    The longest; and, where that may be longer for rounding alone, the longest of the other sign. Where all have one sign,
    1 - p_y was lost in rounding, and the label is where nothing is.
    """
    longest = u.abs().argmax(dim=1)
    across = (-u.gather(1, longest[:, None]).sign() * u).clamp(min=0)
    found = (across > 0).any(dim=1)
    near = across.amax(dim=1) > NEAR * u.abs().amax(dim=1)
    labels = [(torch.where(found, longest, u.abs().argmin(dim=1)), torch.ones_like(near))]
    return [*labels, (across.argmax(dim=1), near)] if bool(near.any()) else labels


def _but(y: Tensor, like: Tensor) -> Tensor:
    """(N, K): 0 at the label, 1 elsewhere."""
    return torch.ones_like(like).scatter(1, y[:, None], 0)


def _scaled(weight: Tensor, bias: Tensor | None, gradient: Tensor, u: Tensor, y: Tensor) -> list[HeadReading]:
    """The readings with k = c u: all crossings of 1 - p_y and the sum of the other entries of k.

    Not -k_y, which is the same but for rounding: of a confident example, float32 has few digits of p_y - 1.
    """
    v = (u[:, None] @ gradient)[:, 0]  # f = v / c
    slope, offset = (weight @ v[..., None])[..., 0], torch.zeros_like(u) if bias is None else bias.expand_as(u)
    others = _but(y, u)
    share = (u * others).sum(dim=1)  # 1 - p_y = c * share

    def excess(q: Tensor) -> Tensor:
        """(N, M): 1 - p_y of the features that q (N, M) = 1 - p_y stands for, less q."""
        c = q / share[:, None]
        p = (slope[:, None] / c[..., None] + offset[:, None]).softmax(dim=-1)
        return (p * others[:, None]).sum(dim=-1) - q

    exponents = torch.linspace(log(FAINTEST), log(0.5), GRID, dtype=u.dtype, device=u.device).exp()
    grid = _with_turns(torch.cat([exponents, 1 - exponents[:-1].flip(0)]).expand(len(u), -1), excess)
    value = excess(grid)
    crossing = (value[:, :-1] > 0) != (value[:, 1:] > 0)
    most = max(1, int(crossing.sum(dim=1).max()))
    order = crossing.to(torch.int8).topk(most, dim=1).indices
    found = crossing.gather(1, order)
    low, high = grid.gather(1, order), grid.gather(1, order + 1)
    falling = torch.where(value.gather(1, order) > 0, 1.0, -1.0)
    q = _bisect(lambda middle: falling * excess(middle), low, high)
    nearest = grid.gather(1, value.abs().argmin(dim=1, keepdim=True))
    none = ~found.any(dim=1)
    q = torch.where(none[:, None], nearest, q)
    heads = []
    for i in range(most):
        c = (q[:, i] / share)[:, None]
        features, k = v / c, u * c
        valid = found[:, i] | none if i == 0 else found[:, i]
        heads.append(HeadReading(features, k, y, valid, none, _misfit("cross_entropy", weight, bias, features, k, y)))
    return heads


def _with_turns(grid: Tensor, excess: Callable[[Tensor], Tensor]) -> Tensor:
    """`grid` (N, M) and, for each problem, where the function comes nearest to 0 and turns: two crossings may hide there."""
    value = excess(grid)
    left, middle, right = (value[:, i : i - 2 or None].abs() for i in range(3))
    sides = value[:, :-2].sign() + value[:, 1:-1].sign() + value[:, 2:].sign()
    turning = (middle <= left) & (middle <= right) & (sides.abs() == 3)
    at = torch.where(turning, middle, torch.inf).topk(TURNS, dim=1, largest=False).indices
    low, high, sign = grid.gather(1, at), grid.gather(1, at + 2), value.gather(1, at + 1).sign()
    for _ in range(40):
        a, b = low + (high - low) * 0.382, low + (high - low) * 0.618
        nearer = sign * excess(a) < sign * excess(b)
        low, high = torch.where(nearer, low, a), torch.where(nearer, b, high)
    return torch.cat([grid, (low + high) / 2], dim=1).sort(dim=1).values


def _as_good(heads: list[HeadReading]) -> list[HeadReading]:
    """For each problem its readings by how well they fit, the best first; of the others those that fit as well."""
    misfits = torch.stack([torch.where(h.valid, h.misfit, torch.inf) for h in heads])
    order = misfits.argsort(dim=0, stable=True)
    enough = 1e-6 + 10 * misfits.amin(dim=0)
    chosen: list[HeadReading] = []
    for rank in range(len(heads)):
        head = heads[0]
        for i, other in enumerate(heads[1:], start=1):
            head = other.where(order[rank] == i, head)
        head = replace(head, valid=head.valid & (head.misfit <= enough)) if rank else head
        if rank and not bool(head.valid.any()):
            break
        chosen.append(head)
    return chosen


def _misfit(loss: str, weight: Tensor, bias: Tensor | None, features: Tensor, k: Tensor, y: Tensor) -> Tensor:
    """Of all entries but the label's, which says nothing that the others do not, in fewer digits; or of the only one."""
    logits = (weight @ features[..., None])[..., 0] + (0 if bias is None else bias)
    if loss == "logistic":
        sign = 1 - 2 * y[:, None]
        off, whole = sign * torch.sigmoid(sign * logits) - k, k
    else:
        off, whole = (logits.softmax(dim=1) - k) * _but(y, k), k * _but(y, k)
    share: Tensor = off.norm(dim=1) / whole.norm(dim=1).clamp(min=torch.finfo(k.dtype).tiny)
    return share
