"""Counts of a batch from features that explain the whole of the head's gradient: for models that are trained.

What the bias alone cannot tell on a trained model is the mean of the probabilities. The rows of the head's gradient can: they
are the sum over examples of (p_i - y_i) f_i, and p_i follows from f_i. So for given labels the most probable features are
found that give the observed gradient, and of all labels those whose features are most probable.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

SHRINKAGE = 0.1
"""How much of the covariance of features is taken to be the same in all directions."""

COARSE, FINE, FINEST = 0.3, 0.1, 0.02
"""What a fit may leave of the gradient, in units of its root mean square: first, and then; a finer one has worse local minima.

The last is for fewer examples than classes, whose features the gradient nearly determines.
"""

START = 0.1
"""How far apart features of equal labels start, in standard deviations: from one point they would never part."""

HALVINGS = 8
"""Of a step that makes matters worse."""

CHANGES, TRIAL = 8, 3
"""How many changes of one label are tried at a time, those first that promise most; and by how many steps."""

WORK = 5e7
"""Multiplications of one step of one candidate, above which a batch is too large for this method."""


@dataclass(frozen=True, eq=False)
class HeadFit:
    """What features and labels of a batch must explain; in the basis of the directions that the gradient and the head span.

    Outside of it features change neither the logits nor anything that was observed.

    target: (K - 1, D + 1) the head's gradient and its bias's, without the last row, as all rows add up to 0; (K - 1, D) without
            a bias. weight (K, D), offset (K,): the head.
    mean (D,), spread (D, D): features are mean + spread z with z standard normal.
    start:  (M, D) values of z that are some inputs'. examples: n.
    """

    target: Tensor
    weight: Tensor
    offset: Tensor
    mean: Tensor
    spread: Tensor
    start: Tensor
    examples: int

    @cached_property
    def scale(self) -> float:
        """The target's root mean square."""
        return float(self.target.square().mean().sqrt())

    @cached_property
    def work(self) -> float:
        """Multiplications of a step of one fit."""
        return float(self.examples * self.target.numel() ** 2 * len(self.mean))

    def extended(self, f: Tensor) -> Tensor:
        """Features with a 1 for the bias where there is one."""
        with_bias = self.target.shape[1] > self.weight.shape[1]
        return torch.cat([f, torch.ones_like(f[..., :1])], dim=-1) if with_bias else f


def head_fit(rows: Tensor, bias: Tensor | None, weight: Tensor, offset: Tensor, features: Tensor, examples: int) -> HeadFit:
    """From the head's gradient rows (K, F), bias (K,), its weight (K, F) and offset (K,), and features (M, F) of any inputs.

    Those inputs are what is known beforehand about features: their mean and covariance.
    """
    rows, weight, offset, features = (t.detach().cpu().double() for t in (rows, weight, offset, features))
    tiny = torch.finfo(rows.dtype).tiny
    both = torch.cat([weight / weight.norm().clamp(min=tiny), rows / rows.norm().clamp(min=tiny)])
    _, s, basis = torch.linalg.svd(both, full_matrices=False)
    basis = basis[s > 1e-6 * s[0]]
    seen = features @ basis.T
    mean, covariance = seen.mean(dim=0), torch.cov(seen.T).reshape(len(basis), len(basis))
    same = covariance.diagonal().mean().clamp(min=tiny)
    covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * same * torch.eye(len(basis), dtype=same.dtype)
    spread = torch.linalg.cholesky(covariance)
    start = torch.linalg.solve_triangular(spread, (seen - mean).T, upper=False).T
    target = rows @ basis.T if bias is None else torch.cat([rows @ basis.T, bias.detach().cpu().double()[:, None]], dim=1)
    return HeadFit(target[:-1], weight @ basis.T, offset, mean, spread, start, examples)


@dataclass(frozen=True, eq=False)
class Fitted:
    """Fits of S candidates: y (S, n, K) one-hot, z (S, n, D), cost (S,): minus the logarithm of how probable all of it is."""

    y: Tensor
    z: Tensor
    cost: Tensor

    def __getitem__(self, chosen: slice | Tensor) -> "Fitted":
        return Fitted(self.y[chosen], self.z[chosen], self.cost[chosen])


@dataclass(frozen=True, eq=False)
class _Parts:
    """Of a fit: f (S, n, D or D + 1), p and r = p - y (S, n, K), missed (S, K - 1, D or D + 1), log_p (S, n, K)."""

    f: Tensor
    p: Tensor
    r: Tensor
    missed: Tensor
    log_p: Tensor


def _parts(fit: HeadFit, z: Tensor, y: Tensor) -> _Parts:
    f = fit.mean + z @ fit.spread.T
    log_p = (f @ fit.weight.T + fit.offset).log_softmax(dim=-1)
    p, f = log_p.exp(), fit.extended(f)
    missed = torch.einsum("snk,snd->skd", (p - y)[..., :-1], f) / fit.examples - fit.target
    return _Parts(f, p, p - y, missed, log_p)


def cost(fit: HeadFit, z: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """(S,) of features z (S, n, D) and labels y (S, n, K): how improbable they are.

    Features are normal; an example's label has the probability that the model gives it, as a trained model is calibrated; and
    what is missed of the gradient is normal with `tolerance` for its standard deviation.
    """
    parts = _parts(fit, z, y)
    prior = 0.5 * z.square().sum(dim=(1, 2)) - (parts.log_p * y).sum(dim=(1, 2))
    return prior + 0.5 * parts.missed.square().sum(dim=(1, 2)) / tolerance**2


def fitted(fit: HeadFit, start: Fitted, share: float, steps: int) -> Fitted:
    """Up to so many Gauss-Newton steps from `start`; a step that makes a candidate worse is halved, or not made at all.

    share: of the target's root mean square that may be missed.
    """
    y, z, tolerance = start.y, start.z, share * fit.scale
    now = cost(fit, z, y, tolerance)
    for _ in range(steps):
        step, length = _step(fit, z, y, tolerance), torch.ones_like(now)
        for _ in range(HALVINGS):
            there = cost(fit, z + length[:, None, None] * step, y, tolerance)
            if (there <= now).all():
                break
            length = torch.where(there <= now, length, length / 2)
        better = there <= now
        z = torch.where(better[:, None, None], z + length[:, None, None] * step, z)
        now = torch.where(better, there, now)
    return Fitted(y, z, now)


def _step(fit: HeadFit, z: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """(S, n, D): the Gauss-Newton step, solved for the multipliers of the target's entries, which are fewer than z's."""
    parts, slope = _parts(fit, z, y), fit.weight @ fit.spread
    jacobian = (torch.diag_embed(parts.p) - parts.p[..., :, None] * parts.p[..., None, :]) @ slope
    lift = torch.zeros(fit.target.shape[1], fit.spread.shape[1], dtype=z.dtype)
    lift[: len(fit.spread)] = fit.spread
    change = parts.r[..., :-1, None, None] * lift + jacobian[..., :-1, None, :] * parts.f[..., None, :, None]
    change = change.flatten(2, 3) / fit.examples
    curvature = torch.eye(z.shape[-1], dtype=z.dtype) + slope.T @ jacobian
    root, _ = torch.linalg.cholesky_ex(curvature)
    white = torch.linalg.solve_triangular(root, change.mT, upper=False)
    downhill = torch.linalg.solve_triangular(root, (z + parts.r @ slope)[..., None], upper=False)[..., 0]
    system = torch.einsum("snem,snek->smk", white, white) + tolerance**2 * torch.eye(change.shape[2], dtype=z.dtype)
    wanted = torch.einsum("snem,sne->sm", white, downhill) - parts.missed.flatten(1)
    solved, _ = torch.linalg.solve_ex(system, wanted[..., None])
    step = torch.einsum("snem,sm->sne", white, solved[..., 0]) - downhill
    unwhitened: Tensor = torch.linalg.solve_triangular(root.mT, step[..., None], upper=True)[..., 0]
    return unwhitened


def most_probable(fit: HeadFit, starts: list[Tensor]) -> Tensor:
    """(K,) counts: from the best of `starts` (K,), one label after the other is changed as long as that is more probable.

    Of the changes those are tried whose first-order effect is the best, each with a fit of its own; no counts twice.
    """
    y = torch.stack([_one_hot(counts.cpu()) for counts in starts])
    seeds = fit.start[torch.arange(fit.examples) % len(fit.start)]
    now = fitted(fit, Fitted(y, START * seeds.expand(len(y), -1, -1), torch.zeros(len(y))), COARSE, steps=4)
    now = fitted(fit, now, FINE, steps=8)
    best = int(now.cost.argmin())
    now = _climbed(fit, now[best : best + 1], FINE)
    if fit.examples <= len(fit.target):
        now = _climbed(fit, fitted(fit, now, FINEST, steps=8), FINEST)
    return now.y[0].sum(dim=0).long()


def _climbed(fit: HeadFit, now: Fitted, share: float) -> Fitted:
    """With one label after the other changed as long as that is more probable."""
    tried = {_key(now.y[0])}
    for _ in range(fit.examples):
        changed = _changes(fit, now, share, tried)
        if changed is None:
            break
        tries = fitted(fit, changed, share, steps=TRIAL)
        least = int(tries.cost.argmin())
        if not tries.cost[least] < now.cost[0]:
            break
        now = fitted(fit, tries[least : least + 1], share, steps=5)
    return now


def _changes(fit: HeadFit, now: Fitted, share: float, tried: set[tuple[int, ...]]) -> Fitted | None:
    """Up to `CHANGES` candidates that differ in one label, by their first-order effect; None where all were tried."""
    parts, classes = _parts(fit, now.z, now.y), now.y.shape[-1]
    slope = torch.einsum("skd,snd->snk", parts.missed, parts.f) / (fit.examples * (share * fit.scale) ** 2)
    slope = -torch.nn.functional.pad(slope, (0, 1)) - parts.log_p
    labels = now.y[0].argmax(dim=1)
    gain = slope[0] - slope[0].gather(1, labels[:, None])
    found = []
    for place in gain.flatten().argsort().tolist():
        i, label = divmod(place, classes)
        y = now.y[0].clone()
        y[i] = torch.eye(classes, dtype=y.dtype)[label]
        if label == labels[i] or _key(y) in tried:
            continue
        tried.add(_key(y))
        found.append(y)
        if len(found) == CHANGES:
            break
    if not found:
        return None
    return Fitted(torch.stack(found), now.z.expand(len(found), -1, -1), now.cost.expand(len(found)))


def _one_hot(counts: Tensor) -> Tensor:
    labels = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.eye(len(counts), dtype=torch.float64)[labels]


def _key(y: Tensor) -> tuple[int, ...]:
    return tuple(y.sum(dim=0).long().tolist())
