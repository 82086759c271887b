"""Zero patterns: at which neurons a gradient is zero along a direction, and whether a single example can cause that.

A gradient has one row per neuron. The gradient is zero along a direction at the neurons whose rows have a scalar product of 0
with the direction. The other neurons are called "on" along the direction.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.low_rank import NOISE_LEVEL, Factors

MAX_DEVIATIONS = 100.0
"""Largest value that counts as zero, in standard deviations of noise, if all other values are much larger."""

MAX_ZERO_COMPONENT = 1e-3
"""Largest component of a unit row along a sampled direction that counts as zero. It is larger than rounding, since a sampled
direction is computed from few rows and inherits their errors."""

MAX_KINK = 1e-5
"""Largest pre-activation, relative to the root mean square of an example's, whose sign rounding errors may have changed."""

MIN_ZEROS = 4
"""Smallest number of zeros of a direction that is informative."""


class Pattern(NamedTuple):
    """Which of M neurons have a gradient of zero along each of K directions.

    on:      mask (M, K), true where the gradient is not zero.
    decided: mask (M, K), true where the noise is small enough to decide whether it is zero.
    """

    on: Tensor
    decided: Tensor

    def select(self, columns: Sequence[int]) -> "Pattern":
        columns = list(columns)
        return Pattern(self.on[:, columns], self.decided[:, columns])


def find_pattern(q: Tensor, factors: Factors) -> Pattern:
    """Return at which neurons the gradient is zero along directions q (R, K), that is the zeros of `factors.coordinates @ q`.

    A neuron's entry is nonzero (`on`) if its magnitude exceeds `compute_zero_threshold`. It is `decided` if it is nonzero, or
    if NOISE_LEVEL times its noise is below a tenth of the direction's mean nonzero magnitude, so that it is known to be zero.
    """
    d, noise = (factors.coordinates @ q).abs(), factors.noise[:, None] * q.norm(dim=0)
    on = d > NOISE_LEVEL * noise
    typical = (d * on).sum(dim=0) / on.sum(dim=0).clamp(min=1)
    on = d > compute_zero_threshold(noise, typical)
    return Pattern(on, on | (NOISE_LEVEL * noise < typical / 10))


def compute_zero_threshold(noise: Tensor, typical: Tensor | float) -> Tensor:
    """Return the magnitude up to which a value counts as zero, for a standard deviation `noise`.

    It is NOISE_LEVEL * noise. If nonzero values are far larger, it is raised to MAX_ZERO_COMPONENT * typical, at most
    MAX_DEVIATIONS * noise, since the estimated noise does not hold for all directions. typical: typical size of nonzero values.
    """
    return torch.maximum(
        NOISE_LEVEL * noise, torch.minimum(MAX_DEVIATIONS * noise, MAX_ZERO_COMPONENT * torch.as_tensor(typical).to(noise))
    )


def measure_agreement(q: Tensor, pattern: Pattern, forward: Tensor, constant: Tensor | None) -> Tensor:
    """Return for each direction, a column of q (R, R), the share (R,) of neurons at which its zeros agree with its example.

    The example of column i is row i of the inverse of q. A neuron agrees if its gradient is zero along the direction and the
    example turns it off, or if its gradient is not zero and the example turns it on. Only decided neurons count.
    The share is set to 0 if fewer than MIN_ZEROS gradients are known to be zero along the direction, if all are zero, or if q is
    singular. Without a bias, the sign of the example is unknown, and the sign with the larger share is used.
    pattern: pattern of zeros along the directions. forward: (M, R), the layer's [W, b] in the coordinates of the basis. constant:
    (R,), the last column of the basis if the layer has a bias; else None.
    """
    p, info = torch.linalg.inv_ex(q)
    if int(info) or not bool(torch.isfinite(p).all()):
        return torch.zeros(q.shape[1], dtype=q.dtype, device=q.device)
    z = forward @ p.T
    enough = ((pattern.decided & ~pattern.on).sum(dim=0) >= MIN_ZEROS) & (pattern.on.sum(dim=0) >= 1)
    count = pattern.decided.sum(dim=0).clamp(min=1)
    if constant is not None:
        result: Tensor = ((pattern.on == (z * torch.sign(p @ constant) > 0)) & pattern.decided).sum(dim=0) / count * enough
        return result
    both = torch.stack([((pattern.on == (side * z > 0)) & pattern.decided).sum(dim=0) for side in (1, -1)])
    return both.amax(dim=0) / count * enough


def match_kinks(x: Tensor, weight: Tensor, pattern: Pattern) -> Tensor:
    """Return inputs (R, F + 1), [x, 1], moved by rounding errors so that neurons near the kink of ReLU are as observed.

    A client computes in float32. Where a pre-activation is 0 up to rounding (MAX_KINK), its sign at the client may differ from
    its sign for the recovered input, and one neuron on the wrong side changes the gradient of the whole batch by far more than
    rounding. Pre-activations with the wrong sign are reflected at 0 by the smallest change of x. weight: [W, b], (M, F + 1).
    pattern: pattern (M, R) of the neurons that are on for each example, as observed.
    """
    z = x @ weight.T
    near = z.abs() <= MAX_KINK * z.square().mean(dim=1, keepdim=True).sqrt()
    wrong = near & pattern.decided.T & ((z > 0) != pattern.on.T)
    moved = x.clone()
    for i in wrong.any(dim=1).nonzero()[:, 0].tolist():
        moved[i, :-1] -= torch.linalg.pinv(weight[wrong[i], :-1]) @ (2 * z[i, wrong[i]])
    return moved


def measure_separability(pattern: Pattern, forward: Tensor) -> Tensor:
    """Return for each of K directions how well a plane separates the neurons that are on along it from those that are off.

    A neuron is on if w x + b > 0, with known w and b, so that the neurons that are on for a single example lie on one side of a
    plane in the space of (w, b). For a mixture of two examples they usually do not. The result (K,) is the balanced accuracy of a
    logistic regression: near 1 for the direction of a single example; 0 if no neuron is on or fewer than MIN_ZEROS are off.
    forward: (M, R), the layer's [W, b] in the coordinates of the basis.
    """
    on, off = pattern.on, pattern.decided & ~pattern.on
    x, both = normalise_rows(forward), pattern.decided.to(forward.dtype)
    enough = (on.sum(dim=0) > 0) & (off.sum(dim=0) >= MIN_ZEROS)
    side = x @ fit_logistic(x, on.to(x.dtype), both, ridges=(1.0, 0.1, 0.01, 1e-3, 1e-4)).T > 0
    return (compute_balanced_accuracy(side, on, off) * enough).nan_to_num(nan=0.0)


def compute_balanced_accuracy(side: Tensor, on: Tensor, off: Tensor) -> Tensor:
    right = (side & on).sum(dim=0) / on.sum(dim=0).clamp(min=1) + (~side & off).sum(dim=0) / off.sum(dim=0).clamp(min=1)
    return right / 2


def normalise_rows(forward: Tensor) -> Tensor:
    result: Tensor = forward / forward.norm(dim=1, keepdim=True).clamp(min=torch.finfo(forward.dtype).tiny)
    return result


def fit_logistic(x: Tensor, y: Tensor, weight: Tensor, ridges: tuple[float, ...] = (0.05,)) -> Tensor:
    """Fit K ridge logistic regressions of y (M, K) in [0, 1] on x (M, R) by Newton's method, and return their weights (K, R).

    weight: (M, K) weight of each row. ridges: regularisation strengths, used one after the other, each from the result of the one
    before; the weights for the last strength are returned.
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
