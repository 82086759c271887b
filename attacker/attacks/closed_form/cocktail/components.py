"""Independent component analysis (ICA): unmixing matrices for mixtures of independent sources.

Sources are found in two stages. FastICA (Hyvarinen 1999, symmetric, log cosh) finds an orthogonal unmixing of whitened mixtures.
Maximum likelihood with Cauchy-distributed sources then refines it without the constraint: the sources of one batch are few
samples, and correlate by chance.

With 128 images of 32x32 pixels, the likelihood is larger at unmixings that differ from the true one, so that a better search for
its maximum finds no better images. The range of pixels is therefore a further criterion (`keep_in_range`): an image that still
holds a part of others has pixels outside [0, 1], and the last entry of [x, 1] fixes the scale of the image.

scikit-learn's FastICA is not used here because it ends after the first stage, which is less accurate, and because attacks compute
on the device of their tensors.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from fedsim.recording.observation import DataSpec

FAST_ITERATIONS, FAST_TOLERANCE = 200, 1e-5
"""Largest number of iterations of FastICA, and the change of the unmixing, as one minus a cosine, at which it stops."""
LIKELIHOOD_ITERATIONS, LIKELIHOOD_TOLERANCE = 200, 1e-6
"""Largest number of iterations of the second stage, and the decrease of its loss per source at which it stops."""
MIN_CURVATURE = 0.02
"""Smallest eigenvalue of the blocks of the approximate Hessian."""
HALVINGS = 10
"""Largest number of lengths of one step that are tried until the loss decreases, each half of the one before."""
RANGE_WEIGHT, RANGE_SCALE = 0.03, 1e-3
"""Weight of the term for the range, and the mean squared excess at which it begins to grow slowly, chosen on two batches of the
tuning part of CIFAR-10."""
RANGE_STEPS, LEARNING_RATE = 250, 1e-2
MIN_FACTOR = 1e-6
"""Smallest absolute factor of an image, relative to the norm of its vector."""


class Unmixing(NamedTuple):
    """An unmixing matrix (R, R) of R whitened mixtures, and its loss.

    The loss is the negative mean log-likelihood per sample, up to a constant, or the value of `published_loss.PublishedLoss`.
    """

    matrix: Tensor
    loss: float


def whiten(mixtures: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the whitening matrix (R, M) for mixtures (M, N), and the whitened mixtures (R, N), in float64.

    The second moments of the whitened mixtures are the identity; means are not subtracted. R is `rank`, or the number of linearly
    independent mixtures if that is smaller.
    """
    u, s, _ = torch.linalg.svd(mixtures.double(), full_matrices=False)
    kept = min(rank, int((s > s[0] * torch.finfo(s.dtype).eps * len(s)).sum()))
    whitening = (u[:, :kept] / s[:kept]).T * mixtures.shape[1] ** 0.5
    return whitening, whitening @ mixtures.double()


def separate(whitened: Tensor, rng: Generator) -> Unmixing:
    """Return the unmixing of whitened mixtures (R, N) by FastICA and then maximum likelihood, computed in float32."""
    z = whitened.float()
    return maximise_likelihood(z, run_fast_ica(z, rng))


def run_fast_ica(z: Tensor, rng: Generator) -> Tensor:
    """Return an orthogonal unmixing (R, R) of whitened mixtures z (R, N), from a random start."""
    count = len(z)
    w = _orthogonalise(torch.randn(count, count, generator=rng).to(z))
    for _ in range(FAST_ITERATIONS):
        t = torch.tanh(w @ z)
        new = _orthogonalise(t @ z.T / z.shape[1] - (1 - t.square()).mean(dim=1)[:, None] * w)
        change = float((1 - (new * w).sum(dim=1).abs()).max())
        w = new
        if change < FAST_TOLERANCE:
            break
    return w


def _orthogonalise(w: Tensor) -> Tensor:
    """Return the orthogonal matrix that is nearest to w."""
    u, _, v = torch.linalg.svd(w)
    nearest: Tensor = u @ v
    return nearest


def maximise_likelihood(z: Tensor, w: Tensor) -> Unmixing:
    """Refine an unmixing w (R, R) of mixtures z (R, N) by a quasi-Newton method with a block-diagonal Hessian; return the result.

    The loss is mean_n sum_i log(1 + y_in^2) - log|det w| with y = w z: the negative log-likelihood of independent Cauchy sources,
    whose scales are free. Steps are relative, w <- (1 + D) w (Ablin et al. 2018, "Faster ICA by preconditioning with Hessian
    approximations").
    """
    eye = torch.eye(len(w), dtype=w.dtype, device=w.device)
    y, size = w @ z, 1.0
    loss = _compute_loss(y, w)
    for _ in range(LIKELIHOOD_ITERATIONS):
        step = _compute_step(y, eye)
        size, decrease = min(1.0, 2 * size), 0.0
        for _ in range(HALVINGS):
            factor = eye + size * step
            tried = _compute_loss(factor @ y, factor @ w)
            if tried < loss:
                w, y, loss, decrease = factor @ w, factor @ y, tried, loss - tried
                break
            size /= 2
        if decrease < LIKELIHOOD_TOLERANCE * len(w):
            break
    return Unmixing(w, loss)


def _compute_loss(y: Tensor, w: Tensor) -> float:
    return float(torch.log1p(y.square()).mean(dim=1).sum() - torch.linalg.slogdet(w)[1])


def _compute_step(y: Tensor, eye: Tensor) -> Tensor:
    """Return the quasi-Newton step D (R, R), relative to the unmixing, for sources y (R, N). eye: the identity (R, R).

    For independent sources, the expected Hessian couples only D_ij and D_ji, so that each pair solves a system of two equations.
    """
    square = y.square()
    slope = (2 * y / (1 + square)) @ y.T / y.shape[1] - eye
    bend = 2 * (1 - square) / (1 + square).square()
    h = bend.mean(dim=1)[:, None] * square.mean(dim=1)[None]
    diagonal = 1 + (bend * square).mean(dim=1)
    minimum = (h + h.T) / 2 - ((h - h.T).square() / 4 + 1).sqrt()
    h = h + (MIN_CURVATURE - minimum).clamp(min=0)
    step = (slope.T - slope * h.T) / (h * h.T - 1)
    step.diagonal().copy_(-slope.diagonal() / diagonal.clamp(min=MIN_CURVATURE))
    return step


def measure_excess(vectors: Tensor, data: DataSpec) -> Tensor:
    """Return the mean squared distance of pixels from [0, 1], (R,), of vectors (R, F + 1) that equal [x, 1] up to a factor."""
    factor = vectors[:, -1:]
    minimum = MIN_FACTOR * vectors.norm(dim=1, keepdim=True)
    factor = torch.where(factor < 0, -1.0, 1.0) * factor.abs().maximum(minimum)
    x = data.denormalise((vectors[:, :-1] / factor).reshape(-1, *data.shape))
    return (x - x.clamp(0, 1)).square().flatten(1).mean(dim=1)


def keep_in_range(unmixing: Unmixing, whitened: Tensor, vectors: Tensor, data: DataSpec) -> Unmixing:
    """Return an unmixing (R, R) near `unmixing` whose images are within [0, 1] as far as possible.

    The loss of `maximise_likelihood` plus RANGE_WEIGHT * sum_i log(1 + e_i / RANGE_SCALE), with the excess e_i of image i, is
    minimised by Adam. whitened: whitened mixtures (R, N) of differences. vectors: the same mixtures of [x, 1], (R, F + 1). The
    field `loss` is copied from `unmixing`, so that it belongs to `unmixing.matrix`. If Adam diverges, `unmixing` is returned.
    """
    z, b = whitened.float(), vectors.float()
    w = unmixing.matrix.clone().requires_grad_()
    optimiser = torch.optim.Adam([w], lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, RANGE_STEPS)
    for _ in range(RANGE_STEPS):
        likelihood = torch.log1p((w @ z).square()).mean(dim=1).sum() - torch.linalg.slogdet(w)[1]
        outside = torch.log1p(measure_excess(w @ b, data) / RANGE_SCALE).sum()
        (w.grad,) = torch.autograd.grad(likelihood + RANGE_WEIGHT * outside, [w])
        optimiser.step()
        schedule.step()
    moved = w.detach()
    return Unmixing(moved, unmixing.loss) if bool(moved.isfinite().all()) else unmixing
