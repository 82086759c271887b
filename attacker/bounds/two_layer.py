"""Rates of the reconstruction error for two-layer networks with random weights, by Liu et al. 2025."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TwoLayerRates:
    """Bounds on the root mean squared Euclidean norm of the error vector, for examples of norm 1.

    lower: error for one example, which no estimate without a prior undercuts.
    upper: error that the first-order estimate of Liu et al. does not exceed for the sum of the examples of a batch.
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
    """Return the rates for f(x) = sum of a_j relu(w_j x) with standard normal w_j, from the gradient by all a_j.

    inputs, neurons: dimension d of x, and number m of neurons. batch: number B of examples whose gradients are summed. noise:
    standard deviation sigma on each coordinate of the summed gradient G. residual: absolute value r of the loss's derivative by
    f. kept: share of coordinates that pruning leaves. clipped: factor that clipping multiplies the gradient by; noise is added
    after it.

    The rates are those of the paper's table: error of order sigma sqrt(d / m) at least, and (B + sigma) sqrt(d / m) at most,
    with m times the kept share in place of m. The constants are our own, for ReLU: the Fisher information on x is
    `kept * m * (residual * clipped / noise)^2 / 2` in every direction, since E[relu'(u)^2] = 1/2, and the first-order Stein
    estimate `2 / (m r) * sum of G_j w_j`, of the sum of the examples weighted by their residuals, has an error with the variance
    4 d / m * (B^2 / 2 + (noise / r)^2) at most: E[relu(u) relu(v)] is 1/2 for examples in the same direction and less for
    others. The lower rate takes the other examples of the batch as known. Both hold for m much larger than d. Without noise,
    the lower rate is 0.
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
