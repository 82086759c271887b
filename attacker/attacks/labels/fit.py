"""Inference of label counts by a fit to the whole gradient of the head, the last layer, also for trained models.

For a trained model the mean predicted probabilities are not known, so that the gradient of the bias alone does not determine the
counts. The rows of the head's gradient contain more: they are the mean over examples i of (p_i - y_i) f_i, and the probabilities
p_i follow from the features f_i, the head's inputs. For given labels, the most probable features that explain the gradient are
fitted (a MAP estimate). A local search finds the labels whose fit is most probable.

Shapes: n examples, K classes, D directions of the feature space that matter, S candidates of labels.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

COVARIANCE_SHRINKAGE = 0.1
"""Share of the features' covariance that is replaced by a multiple of the identity (shrinkage)."""

COARSE_ERROR, FINE_ERROR, FINEST_ERROR = 0.3, 0.1, 0.02
"""Assumed standard deviation of the gradient's error in successive fits, in units of the gradient's root mean square. A small
value has more local minima, so that fits begin with a large one. The third fit is made only for fewer examples than classes,
whose features the gradient nearly determines."""

START_SPREAD = 0.1
"""Distance between the starting features of examples with equal labels, in standard deviations; equal ones would remain equal."""

MAX_HALVINGS = 8
"""Largest number of times that a step is halved if it makes the fit worse."""

MAX_TRIED_CHANGES, TRIAL_STEPS = 8, 3
"""Number of changes of a label that are tried at once, most promising first, and number of steps of each trial fit."""

MAX_WORK = 5e7
"""Largest number of multiplications in one step of the fit of one candidate (labels of a batch) at which labels are fitted."""


@dataclass(frozen=True, eq=False)
class HeadFit:
    """The data of a fit, in the subspace of features that the gradient and the head's weights span, of dimension D.

    target:  gradient of the head's weight and bias, (K - 1, D + 1); (K - 1, D) if the gradient of a bias is not known. The last
             row is left out, since all rows add up to 0.
    weight, offset: weight (K, D) and bias (K,) of the head; the bias is 0 if there is none.
    mean, spread: prior of the features: mean (D,) + spread (D, D) z with standard normal z.
    start:   values of z for M random inputs of the network, (M, D), used as starting points. examples: number n of examples.
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
        """Root mean square of the target's entries."""
        return float(self.target.square().mean().sqrt())

    @cached_property
    def work(self) -> float:
        """Approximate number of multiplications in one step of the fit of one candidate."""
        return float(self.examples * self.target.numel() ** 2 * len(self.mean))

    def extend(self, f: Tensor) -> Tensor:
        """Return features f (..., D), with a 1 appended if the target includes the gradient of the bias."""
        with_bias = self.target.shape[1] > self.weight.shape[1]
        return torch.cat([f, torch.ones_like(f[..., :1])], dim=-1) if with_bias else f


def build_head_fit(rows: Tensor, bias: Tensor | None, weight: Tensor, offset: Tensor, features: Tensor, examples: int) -> HeadFit:
    """Return the data of a fit, projected onto the subspace that the head's gradient and weights span.

    rows, bias: gradients of the head's weight, (K, F), and of its bias, (K,); bias is None if that gradient is not known.
    weight, offset: the weight, (K, F), and the bias, (K,), themselves; zeros for a head without a bias.
    features: inputs of the head for M random inputs of the network, (M, F); their mean and (shrunk) covariance are the prior.
    examples: number n of examples in the batch.
    """
    rows, weight, offset, features = (t.detach().cpu().double() for t in (rows, weight, offset, features))
    tiny = torch.finfo(rows.dtype).tiny
    both = torch.cat([weight / weight.norm().clamp(min=tiny), rows / rows.norm().clamp(min=tiny)])
    _, s, basis = torch.linalg.svd(both, full_matrices=False)
    basis = basis[s > 1e-6 * s[0]]
    seen = features @ basis.T
    mean, covariance = seen.mean(dim=0), torch.cov(seen.T).reshape(len(basis), len(basis))
    same = covariance.diagonal().mean().clamp(min=tiny)
    covariance = (1 - COVARIANCE_SHRINKAGE) * covariance + COVARIANCE_SHRINKAGE * same * torch.eye(len(basis), dtype=same.dtype)
    spread = torch.linalg.cholesky(covariance)
    start = torch.linalg.solve_triangular(spread, (seen - mean).T, upper=False).T
    target = rows @ basis.T if bias is None else torch.cat([rows @ basis.T, bias.detach().cpu().double()[:, None]], dim=1)
    return HeadFit(target[:-1], weight @ basis.T, offset, mean, spread, start, examples)


@dataclass(frozen=True, eq=False)
class LabelCandidates:
    """Candidates for the labels of the batch, S of them, with the features fitted to each.

    y: one-hot labels, (S, n, K). z: features in the standard normal coordinates of `HeadFit`, (S, n, D). cost: negative
       log-posterior, (S,); without meaning for a candidate that serves only as the start of a fit.
    """

    y: Tensor
    z: Tensor
    cost: Tensor

    def __getitem__(self, chosen: slice | Tensor) -> "LabelCandidates":
        return LabelCandidates(self.y[chosen], self.z[chosen], self.cost[chosen])


@dataclass(frozen=True, eq=False)
class _FitValues:
    """The intermediate values of a fit.

    f: features in the subspace of `HeadFit`, with a 1 appended if the target includes the bias's gradient, (S, n, D or D + 1).
    p, log_p: predicted probabilities and their logarithms, (S, n, K). r: p - y.
    missed: gradient of the candidates minus `HeadFit.target`, (S, K - 1, D or D + 1); both lack the row of the last class.
    """

    f: Tensor
    p: Tensor
    r: Tensor
    missed: Tensor
    log_p: Tensor


def _compute_parts(fit: HeadFit, z: Tensor, y: Tensor) -> _FitValues:
    f = fit.mean + z @ fit.spread.T
    log_p = (f @ fit.weight.T + fit.offset).log_softmax(dim=-1)
    p, f = log_p.exp(), fit.extend(f)
    missed = torch.einsum("snk,snd->skd", (p - y)[..., :-1], f) / fit.examples - fit.target
    return _FitValues(f, p, p - y, missed, log_p)


def compute_cost(fit: HeadFit, z: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """Return the negative log-posterior (S,) of features z (S, n, D) and labels y (S, n, K), up to a constant.

    Assumed distributions: z is standard normal, a label has the probability that the model predicts for its features, and the
    errors of the gradient's entries are normal with the standard deviation `tolerance`.
    """
    parts = _compute_parts(fit, z, y)
    prior = 0.5 * z.square().sum(dim=(1, 2)) - (parts.log_p * y).sum(dim=(1, 2))
    return prior + 0.5 * parts.missed.square().sum(dim=(1, 2)) / tolerance**2


def fit_features(fit: HeadFit, start: LabelCandidates, share: float, steps: int) -> LabelCandidates:
    """Fit features by `steps` Gauss-Newton steps from `start`, for each candidate separately; the labels stay the same.

    A step that would increase a candidate's cost is halved until it does not. If the cost still increases at the last of
    MAX_HALVINGS attempts, the step is left out. share: assumed standard deviation of the gradient's error, in units of the
    target's root mean square.
    """
    y, z, tolerance = start.y, start.z, share * fit.scale
    now = compute_cost(fit, z, y, tolerance)
    for _ in range(steps):
        step, length = _compute_step(fit, z, y, tolerance), torch.ones_like(now)
        for _ in range(MAX_HALVINGS):
            there = compute_cost(fit, z + length[:, None, None] * step, y, tolerance)
            if (there <= now).all():
                break
            length = torch.where(there <= now, length, length / 2)
        better = there <= now
        z = torch.where(better[:, None, None], z + length[:, None, None] * step, z)
        now = torch.where(better, there, now)
    return LabelCandidates(y, z, now)


def _compute_step(fit: HeadFit, z: Tensor, y: Tensor, tolerance: float) -> Tensor:
    """Return the Gauss-Newton step of z for each candidate, (S, n, D).

    It is computed from the dual system, which has one unknown for each entry of the target.
    """
    parts, slope = _compute_parts(fit, z, y), fit.weight @ fit.spread
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


def find_most_probable(fit: HeadFit, starts: list[Tensor]) -> Tensor:
    """Return the most probable counts (K,) that a local search finds.

    From the best of `starts`, the label of one example after the other is changed, as long as that makes the fit more probable.
    starts: candidate counts, each (K,) with the sum n.
    """
    y = torch.stack([_encode_one_hot(counts.cpu()) for counts in starts])
    seeds = fit.start[torch.arange(fit.examples) % len(fit.start)]
    now = fit_features(
        fit, LabelCandidates(y, START_SPREAD * seeds.expand(len(y), -1, -1), torch.zeros(len(y))), COARSE_ERROR, steps=4
    )
    now = fit_features(fit, now, FINE_ERROR, steps=8)
    best = int(now.cost.argmin())
    now = _climb(fit, now[best : best + 1], FINE_ERROR)
    if fit.examples <= len(fit.target):
        now = _climb(fit, fit_features(fit, now, FINEST_ERROR, steps=8), FINEST_ERROR)
    return now.y[0].sum(dim=0).long()


def _climb(fit: HeadFit, now: LabelCandidates, share: float) -> LabelCandidates:
    """Change one label after the other, at most n times, as long as the fit becomes more probable, and return the last fit.

    share: assumed standard deviation of the gradient's error, in units of the target's root mean square.
    """
    tried = {_build_key(now.y[0])}
    for _ in range(fit.examples):
        changed = _propose_changes(fit, now, share, tried)
        if changed is None:
            break
        tries = fit_features(fit, changed, share, steps=TRIAL_STEPS)
        lowest = int(tries.cost.argmin())
        if not tries.cost[lowest] < now.cost[0]:
            break
        now = fit_features(fit, tries[lowest : lowest + 1], share, steps=5)
    return now


def _propose_changes(fit: HeadFit, now: LabelCandidates, share: float, tried: set[tuple[int, ...]]) -> LabelCandidates | None:
    """Return candidates that differ from the fit `now` in the label of one example, not fitted yet; None if all were tried.

    They are the most promising ones: those whose cost is the lowest to first order, at most MAX_TRIED_CHANGES. Their features and
    costs are still those of `now`.
    share: assumed standard deviation of the gradient's error, in units of the target's root mean square.
    tried: numbers of examples per class of all candidates so far, which are not proposed again; those proposed are added.
    """
    parts, classes = _compute_parts(fit, now.z, now.y), now.y.shape[-1]
    slope = torch.einsum("skd,snd->snk", parts.missed, parts.f) / (fit.examples * (share * fit.scale) ** 2)
    slope = -torch.nn.functional.pad(slope, (0, 1)) - parts.log_p
    labels = now.y[0].argmax(dim=1)
    gain = slope[0] - slope[0].gather(1, labels[:, None])
    proposals = []
    for place in gain.flatten().argsort().tolist():
        i, label = divmod(place, classes)
        y = now.y[0].clone()
        y[i] = torch.eye(classes, dtype=y.dtype)[label]
        if label == labels[i] or _build_key(y) in tried:
            continue
        tried.add(_build_key(y))
        proposals.append(y)
        if len(proposals) == MAX_TRIED_CHANGES:
            break
    if not proposals:
        return None
    return LabelCandidates(torch.stack(proposals), now.z.expand(len(proposals), -1, -1), now.cost.expand(len(proposals)))


def _encode_one_hot(counts: Tensor) -> Tensor:
    labels = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.eye(len(counts), dtype=torch.float64)[labels]


def _build_key(y: Tensor) -> tuple[int, ...]:
    return tuple(y.sum(dim=0).long().tolist())
