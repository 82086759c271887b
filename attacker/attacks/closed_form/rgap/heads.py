"""Solution of the last layer for one example: its input features f, and k = dL/dlogits (R-GAP, section 3.1.1).

For one example, dL/dW = k f^T. With a bias, k is the gradient of the bias. Without one, k and f are known up to a factor, which
follows from the loss. Several factors may be possible: the factor of the example, and the factor of a twin (R-GAP, appendix B), a
multiple of f with the same gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log

import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.system import broadcast_like

LOSS_EQUATION_MINIMISER = 1.2784645427610738
"""The mu that minimises -mu / (1 + exp(mu)); it solves exp(mu) (mu - 1) = 1."""
LOSS_EQUATION_MINIMUM = -0.2784645427610738
"""The minimum of -mu / (1 + exp(mu)); R-GAP, figure 1. The gradient of one example never lies below it."""

GRID_POINTS = 512
"""Number of values of 1 - p_y up to 0.5 between which roots are bracketed; above 0.5 there are as many less one, mirrored."""
MAX_REFINED_EXTREMA = 3
"""Number of local extrema near zero per problem that are refined, because two roots may lie close to each other there."""
MIN_LABEL_ENTRY = 0.25
"""Smallest magnitude of an entry that may belong to the label, relative to the largest entry."""
MIN_LOSS_SHARE = 1e-14
"""Smallest 1 - p_y that is searched for, with p_y the probability of the label."""
MAX_SECOND_SINGULAR_VALUE = 1e-3
"""Largest second singular value, relative to the first, of a gradient that counts as the gradient of one example."""


@dataclass(frozen=True)
class HeadReading:
    """One solution of the last layer for each of N problems, which are gradients of one example each.

    features: inputs of the layer, (N, F). k: dL/dlogits, (N, K). y: labels, (N,) int64.
    valid:    (N,) whether the solution exists and is nearly as plausible as the best one.
    clamped:  (N,) whether no single example with label y has exactly this gradient, so that the nearest solution was used.
    misfit:   (N,) distance between k and dL/dlogits at these features, relative to the norm of k, see `_compute_misfit`; set to 0
              for a single logit without a bias.
    """

    features: Tensor
    k: Tensor
    y: Tensor
    valid: Tensor
    clamped: Tensor
    misfit: Tensor

    def where(self, condition: Tensor, other: "HeadReading") -> "HeadReading":
        """Return this solution for problems where `condition` (N,) is true, and `other` for the rest."""
        pairs = {key: (value, getattr(other, key)) for key, value in vars(self).items()}
        return HeadReading(**{key: torch.where(broadcast_like(condition, a), a, b) for key, (a, b) in pairs.items()})


def read_heads(
    loss: str, weight: Tensor, bias: Tensor | None, gradient: Tensor, bias_gradient: Tensor | None
) -> list[HeadReading]:
    """Return the solutions of the last layer for N problems (gradients of one example each), the most plausible first.

    Each entry of the list holds one solution for every problem. `valid` is false for a problem for which there is none, or for
    which another solution has a far smaller misfit. Where no example has exactly this gradient, the nearest possible solution
    counts as one, and `clamped` is set.
    If the gradient of the layer's bias is given and not zero for at least one problem, the list has one entry. It is valid for
    all problems, but has NaN features for the problems in which the gradient of the bias is zero.
    Otherwise, the solutions for two or more logits are ordered by misfit for each problem.
    For a single logit without a bias, the list has one solution for each label, the likelier label first (guessed from the
    gradient's sign), then their twins.
    Raises ValueError for a single logit with a bias whose gradient is None, or zero for all problems.
    loss: name of the loss. weight, gradient: (1 or N, K, F) and (N, K, F) in float64. bias, bias_gradient: (1 or N, K) and
    (N, K), or None.
    """
    if bias is not None and bias_gradient is not None and bool((bias_gradient != 0).any()):
        return [_solve_from_bias(loss, weight, bias, gradient, bias_gradient)]
    if loss == "logistic" and bias is not None:
        raise ValueError(
            "R-GAP needs the gradient of the last layer's bias if the model has a single logit, and it is zero or the client did "
            "not send it; a search, such as the attack cpl, does not need it"
        )
    if loss == "logistic":
        return _solve_from_product(weight, gradient)
    return _solve_from_direction(weight, bias, gradient)


def has_rank_above_one(gradient: Tensor) -> Tensor:
    """Return a mask (N,): whether dL/dW (N, K, F) of the last layer clearly has a rank above one, so is not of one example."""
    values = torch.linalg.eigvalsh(gradient @ gradient.mT).clamp(min=0)
    if values.shape[1] < 2:
        return torch.zeros(len(gradient), dtype=torch.bool, device=gradient.device)
    several: Tensor = values[:, -2] > MAX_SECOND_SINGULAR_VALUE**2 * values[:, -1]
    return several


def solve_logistic(s: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve -mu / (1 + exp(mu)) = s for mu (R-GAP, eq. 11).

    The left side has its minimum, LOSS_EQUATION_MINIMUM, at mu = LOSS_EQUATION_MINIMISER. For s >= 0 there is one solution, at
    most 0. For s between the minimum and 0 there are two (twins), below and above the minimiser. For lower s there is none, and
    the minimiser is returned in its place. Returns (lower solution, upper solution, whether the upper one exists, whether s is
    below the minimum), each of the shape of s.
    """
    clamped = s < LOSS_EQUATION_MINIMUM
    inside = s.clamp(min=LOSS_EQUATION_MINIMUM)
    low = torch.where(inside > 0, -2 * inside, torch.zeros_like(s))
    high = torch.where(inside > 0, -inside, torch.full_like(s, LOSS_EQUATION_MINIMISER))
    lower = _bisect(lambda mu: -mu / (1 + mu.exp()) - inside, low, high)
    maximum = 2 * (-inside).clamp(min=1e-300, max=1).log().neg() + 2
    upper = _bisect(
        lambda mu: mu / (1 + mu.exp()) + inside,
        torch.full_like(s, LOSS_EQUATION_MINIMISER),
        maximum.clamp(min=LOSS_EQUATION_MINIMISER),
    )
    return lower, upper, (inside < 0) & ~clamped, clamped


def _bisect(f: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """Return the elementwise root of a decreasing function in [low, high], by bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        above = f(middle) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def _solve_from_bias(loss: str, weight: Tensor, bias: Tensor, gradient: Tensor, k: Tensor) -> HeadReading:
    features = (k[:, None] @ gradient)[:, 0] / k.square().sum(dim=1, keepdim=True)
    y = (k[:, 0] < 0).long() if loss == "logistic" else k.argmin(dim=1)
    never = torch.zeros(len(k), dtype=torch.bool, device=k.device)
    return HeadReading(features, k, y, ~never, never, _compute_misfit(loss, weight, bias, features, k, y))


def _solve_from_product(weight: Tensor, gradient: Tensor) -> list[HeadReading]:
    """Return the solutions for a single logit without bias: one for each label and each root of the loss equation.

    The loss equation is the one that `solve_logistic` solves, with s the scalar product of the weight and its gradient.
    """
    lower, upper, two, clamped = solve_logistic((weight * gradient).sum(dim=(1, 2)))
    first = gradient[:, 0].sum(dim=1) < 0  # right if most features are positive
    heads = []
    for mu, valid in ((lower, torch.ones_like(two)), (upper, two)):
        for y in (first.long(), 1 - first.long()):
            k = torch.where(y == 1, -1.0, 1.0) / (1 + mu.exp())
            features = gradient[:, 0] / k[:, None]
            heads.append(HeadReading(features, k[:, None], y, valid, clamped, torch.zeros_like(mu)))
    return heads


def _solve_from_direction(weight: Tensor, bias: Tensor | None, gradient: Tensor) -> list[HeadReading]:
    """Return the solutions for two or more logits: k = c u with u the first left singular vector of dL/dW.

    The factor c follows from the loss, softmax(W f + b) - e_y = k, for each candidate of the label y.
    """
    rough = torch.linalg.eigh(gradient @ gradient.mT)[1][:, :, -1:]
    u = (gradient @ (gradient.mT @ rough))[..., 0]  # one power iteration makes small entries accurate as well
    u = u / u.norm(dim=1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    heads: list[HeadReading] = []
    for y, possible in _list_candidate_labels(u):
        readings = _solve_scale(weight, bias, gradient, u, y)
        heads += [replace(head, valid=head.valid & possible) for head in readings]
    return _sort_by_misfit(heads)


def _list_candidate_labels(u: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return one or two pairs (candidates for the label (N,), mask (N,) of the problems for which they are candidates).

    u: (N, K), dL/dlogits up to a factor. The label's entry is the only one with its sign, and is minus the sum of all others, so
    that it has the largest magnitude. That entry is the first candidate. If the magnitude of the largest entry of the other sign
    is more than MIN_LABEL_ENTRY times that of the first candidate, rounding may have swapped the two entries, and the entry of
    the other sign is the second candidate. If no entry has the other sign, the label's entry was rounded to zero, so that the
    entry with the smallest magnitude is the candidate.
    """
    longest = u.abs().argmax(dim=1)
    across = (-u.gather(1, longest[:, None]).sign() * u).clamp(min=0)
    is_candidate = (across > 0).any(dim=1)
    near = across.amax(dim=1) > MIN_LABEL_ENTRY * u.abs().amax(dim=1)
    labels = [(torch.where(is_candidate, longest, u.abs().argmin(dim=1)), torch.ones_like(near))]
    return [*labels, (across.argmax(dim=1), near)] if bool(near.any()) else labels


def _mask_label(y: Tensor, like: Tensor) -> Tensor:
    """Return a mask with the shape (N, K) and data type of `like`: 0 at the label y (N,), 1 at all other classes."""
    return torch.ones_like(like).scatter(1, y[:, None], 0)


def _solve_scale(weight: Tensor, bias: Tensor | None, gradient: Tensor, u: Tensor, y: Tensor) -> list[HeadReading]:
    """Return the solutions for labels y (N,), where k = dL/dlogits is c u: u (N, K) is given, the factor c is sought.

    A factor c is a solution if 1 - p_y equals the sum of the entries of k other than the label's, with p_y the label's
    probability that follows from c. If no c is a solution, the c with the smallest difference of the two sides is used, and
    marked as `clamped`. The sum is equal to -k_y, but more accurate: for a confident prediction, p_y - 1 loses most digits in
    float32.
    """
    v = (u[:, None] @ gradient)[:, 0]  # f = v / c
    slope, offset = (weight @ v[..., None])[..., 0], torch.zeros_like(u) if bias is None else bias.expand_as(u)
    others = _mask_label(y, u)
    share = (u * others).sum(dim=1)  # 1 - p_y = c * share

    def compute_excess(q: Tensor) -> Tensor:
        """Return (1 - p_y) - q, (N, M), where p_y is computed from the features that follow from assuming 1 - p_y = q (N, M)."""
        c = q / share[:, None]
        p = (slope[:, None] / c[..., None] + offset[:, None]).softmax(dim=-1)
        return (p * others[:, None]).sum(dim=-1) - q

    exponents = torch.linspace(log(MIN_LOSS_SHARE), log(0.5), GRID_POINTS, dtype=u.dtype, device=u.device).exp()
    grid = _add_extrema(torch.cat([exponents, 1 - exponents[:-1].flip(0)]).expand(len(u), -1), compute_excess)
    value = compute_excess(grid)
    crossing = (value[:, :-1] > 0) != (value[:, 1:] > 0)
    maximum = max(1, int(crossing.sum(dim=1).max()))
    order = crossing.to(torch.int8).topk(maximum, dim=1).indices
    scales = crossing.gather(1, order)
    low, high = grid.gather(1, order), grid.gather(1, order + 1)
    falling = torch.where(value.gather(1, order) > 0, 1.0, -1.0)
    q = _bisect(lambda middle: falling * compute_excess(middle), low, high)
    nearest = grid.gather(1, value.abs().argmin(dim=1, keepdim=True))
    none = ~scales.any(dim=1)
    q = torch.where(none[:, None], nearest, q)
    heads = []
    for i in range(maximum):
        c = (q[:, i] / share)[:, None]
        features, k = v / c, u * c
        valid = scales[:, i] | none if i == 0 else scales[:, i]
        heads.append(HeadReading(features, k, y, valid, none, _compute_misfit("cross_entropy", weight, bias, features, k, y)))
    return heads


def _add_extrema(grid: Tensor, excess: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `grid` (N, M) with MAX_REFINED_EXTREMA points added where `excess` comes closest to 0 without a change of sign.

    Two roots between neighbouring points of the grid lie on the two sides of such an extremum, and would be missed. The result,
    (N, M + MAX_REFINED_EXTREMA), is sorted.
    """
    value = excess(grid)
    left, middle, right = (value[:, i : i - 2 or None].abs() for i in range(3))
    sides = value[:, :-2].sign() + value[:, 1:-1].sign() + value[:, 2:].sign()
    turning = (middle <= left) & (middle <= right) & (sides.abs() == 3)
    at = torch.where(turning, middle, torch.inf).topk(MAX_REFINED_EXTREMA, dim=1, largest=False).indices
    low, high, sign = grid.gather(1, at), grid.gather(1, at + 2), value.gather(1, at + 1).sign()
    for _ in range(40):
        a, b = low + (high - low) * 0.382, low + (high - low) * 0.618
        nearer = sign * excess(a) < sign * excess(b)
        low, high = torch.where(nearer, low, a), torch.where(nearer, b, high)
    return torch.cat([grid, (low + high) / 2], dim=1).sort(dim=1).values


def _sort_by_misfit(heads: list[HeadReading]) -> list[HeadReading]:
    """Return the solutions sorted by misfit for each problem, the best first.

    Solutions with a misfit above 10 * (the best misfit) + 1e-6 are marked as not valid. Entries at the end of the list that are
    valid for no problem are left out.
    """
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


def _compute_misfit(loss: str, weight: Tensor, bias: Tensor | None, features: Tensor, k: Tensor, y: Tensor) -> Tensor:
    """Return the distance (N,) between k and dL/dlogits at these features, relative to the norm of k.

    With several logits, the label's entry of k is left out of both norms: it is minus the sum of the others, and less accurate.
    """
    logits = (weight @ features[..., None])[..., 0] + (0 if bias is None else bias)
    if loss == "logistic":
        sign = 1 - 2 * y[:, None]
        off, whole = sign * torch.sigmoid(sign * logits) - k, k
    else:
        off, whole = (logits.softmax(dim=1) - k) * _mask_label(y, k), k * _mask_label(y, k)
    share: Tensor = off.norm(dim=1) / whole.norm(dim=1).clamp(min=torch.finfo(k.dtype).tiny)
    return share
