"""The range of pixels as a criterion of separation, besides independence.

The images of one batch correlate by chance. With 128 images of 32x32 pixels, the likelihood of independent sources is larger at
unmixings that differ from the true one, so that a better search for its maximum finds no better images. But an image that still
holds a part of others has pixels outside [0, 1], and the last entry of [x, 1] fixes the scale of the image.
"""

import torch
from torch import Tensor

from attacker.attacks.closed_form.cocktail.components import Unmixing
from fedsim.recording.observation import DataSpec

RANGE_WEIGHT, RANGE_SCALE = 0.03, 1e-3
"""Weight of the term for the range, and the mean squared excess at which it begins to grow slowly, chosen on two batches of the
tuning part of CIFAR-10."""
STEPS, LEARNING_RATE = 250, 1e-2
MIN_FACTOR = 1e-6
"""Smallest absolute factor of an image, relative to the norm of its vector."""


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
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        likelihood = torch.log1p((w @ z).square()).mean(dim=1).sum() - torch.linalg.slogdet(w)[1]
        outside = torch.log1p(measure_excess(w @ b, data) / RANGE_SCALE).sum()
        (w.grad,) = torch.autograd.grad(likelihood + RANGE_WEIGHT * outside, [w])
        optimiser.step()
        schedule.step()
    moved = w.detach()
    return Unmixing(moved, unmixing.loss) if bool(moved.isfinite().all()) else unmixing
