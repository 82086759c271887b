"""The gradient of a linear layer as mixtures of its inputs, and the differences of pixels by which the inputs are separated.

    [dL/dW, dL/db] = D^T [X, 1]

has one row per neuron, and each row is a mixture (linear combination) of the vectors [x, 1] of the examples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.low_rank import Factors, factorise
from fedsim.recording.observation import DataSpec

MAX_DEVIATION, USUAL_DEVIATION = 0.5, 0.25
"""Largest standard deviation that values in [0, 1] can have, and the one assumed for a usual image."""


@dataclass(frozen=True)
class Mixtures:
    """The estimated span of the vectors [x, 1] of a batch: an orthonormal basis (R, F + 1), or (R, F) for a layer without a bias.

    factors: the factorised gradient, from which the basis is computed; None if noise hides the rank. R is then the number of
             examples, at most the number of rows or of columns of the gradient.
    """

    basis: Tensor
    factors: Factors | None

    @property
    def rank(self) -> int:
        return len(self.basis)


def read_mixtures(rows: Tensor, examples: int) -> Mixtures:
    """Return the span of a gradient's rows (M, F + 1) as an orthonormal basis, and the factorised gradient.

    The factorised gradient is None if no gap in the singular values shows the gradient's rank (`factorise`).
    The last column is the gradient of the bias; rows (M, F) have none. examples: size of the batch, the largest dimension of the
    span.
    """
    factors = factorise(rows, examples)
    if factors is not None:
        return Mixtures(factors.basis, factors)
    return Mixtures(torch.linalg.svd(rows.double(), full_matrices=False)[2][:examples], None)


def differentiate_images(rows: Tensor, data: DataSpec) -> Tensor:
    """Return the differences (R, N) between neighbouring pixels of R mixed images (R, F).

    In images with three channels these are differences of the brightness, of red minus blue, and of green minus the mean of both.
    The horizontal differences of each channel, and the vertical ones, are scaled by one factor for all R images, so that their
    mean square is 1. As the map is linear, the differences are mixed as the images are. Independent component analysis separates
    them better than pixels, which depend on each other.
    """
    images = rows.reshape(-1, *data.shape)
    images = images * torch.tensor(data.std, dtype=rows.dtype, device=rows.device).reshape(-1, 1, 1)
    if images.shape[1] == 3:
        red, green, blue = images.unbind(dim=1)
        images = torch.stack([(red + green + blue) / 3, (red - blue) / 2, (2 * green - red - blue) / 4], dim=1)
    kinds = [
        differences[:, channel].flatten(1)
        for differences in (images.diff(dim=-1), images.diff(dim=-2))
        for channel in range(images.shape[1])
    ]
    scales = [kind.square().mean().sqrt().clamp(min=torch.finfo(rows.dtype).tiny) for kind in kinds]
    return torch.cat([kind / scale for kind, scale in zip(kinds, scales, strict=True)], dim=1)


def scale_images(vectors: Tensor, data: DataSpec) -> Tensor:
    """Return images (R, *shape), not clamped to [0, 1], from vectors (R, F + 1) that equal [x, 1] up to a factor, the last entry.

    x: normalised image. If the result varies more than any image in [0, 1] can, the factor was too inexact: only its sign is then
    used, and the image gets the mean 0.5 and the standard deviation USUAL_DEVIATION.
    """
    factor = vectors[:, -1:]
    sign = torch.where(factor < 0, -1.0, 1.0).to(vectors)
    size = factor.abs().clamp(min=torch.finfo(vectors.dtype).eps * vectors.norm(dim=1, keepdim=True).clamp(min=1e-300))
    x = data.denormalise((sign * vectors[:, :-1] / size).reshape(-1, *data.shape))
    centred = x - x.mean(dim=(1, 2, 3), keepdim=True)
    deviation = centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
    usual = 0.5 + USUAL_DEVIATION * centred / deviation.clamp(min=1e-12)
    return torch.where(deviation > MAX_DEVIATION, usual, x)
