"""Lower and upper bounds on the reconstruction error for two-layer networks with random weights, after Liu et al. 2025."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TwoLayerRates:
    """Bounds on the root mean squared norm of the error vector, for examples of norm 1 and many more neurons than inputs.

    lower: lower bound (Cramér-Rao) on the error of unbiased estimates of one example, if the rest of its batch is known.
    upper: upper bound on the error of the estimate of Liu et al. of the sum of a batch's examples.
    """

    lower: float
    upper: float


def compute_two_layer_rates(
    *,
    inputs: int,
    neurons: int,
    batch: int = 1,
    noise: float = 0.0,
    residual: float = 1.0,
    kept: float = 1.0,
    clipped: float = 1.0,
) -> TwoLayerRates:
    """Return error bounds for f(x) = sum of a_j relu(w_j x), w_j standard normal, from the gradient with respect to all a_j.

    inputs, neurons: dimension d of x, and number m of neurons. batch: number B of examples whose gradients are summed. noise:
    standard deviation of Gaussian noise on each coordinate of the summed gradient. residual: absolute value r of the derivative
    of the loss with respect to f, the same for each example. kept: share of the coordinates that pruning leaves. clipped: factor
    by which clipping multiplies the gradient before noise is added.

    With M = kept * m and s = noise / (r * clipped), `lower` is s sqrt(2 d / M), and `upper` is 2 sqrt((d / M) (B^2 / 2 + s^2)).
    The orders in d, M, B and s are those of the paper's table; the constants are our own, for ReLU: `lower` follows from the
    Fisher information on x, which is M / (2 s^2) in every direction, and `upper` bounds the variance of the first-order Stein
    estimate 2 / (M r clipped) * sum of G_j w_j, with the summed gradient G. Both hold approximately, for M much larger than d.
    Raises ValueError for arguments out of range.
    Source: Liu, Wang, Chen and Lei 2025, "Data reconstruction attacks and defenses: a systematic evaluation", section 4.
    """
    if min(inputs, neurons, batch) < 1:
        raise ValueError(f"inputs, neurons and batch must be positive, got {inputs}, {neurons} and {batch}")
    if noise < 0 or not 0 < kept <= 1 or not 0 < clipped <= 1 or residual <= 0:
        raise ValueError(
            f"noise must not be negative, kept and clipped must be in (0, 1], and residual positive, got noise={noise}, "
            f"kept={kept}, clipped={clipped} and residual={residual}"
        )
    ratio, relative = inputs / (kept * neurons), noise / (residual * clipped)
    return TwoLayerRates(lower=relative * math.sqrt(2 * ratio), upper=2 * math.sqrt(ratio * (batch**2 / 2 + relative**2)))
