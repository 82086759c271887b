"""Channels of quantisers: the original values that a received value allows, or the noise power of stochastic rounding."""

import torch
from torch import Tensor

from defenses.base import Update
from defenses.channel import Channel, ChannelFacts, ChannelState, compute_no_noise
from defenses.quantisation import Norm, SignScale, compute_size, count_steps

APPROXIMATION_ERROR = 0.3
"""Assumed error of a simulation that treats several local steps as one, relative to each tensor's root mean square."""
MAX_SCALE = 2.0
"""Largest factor by which a tensor of such a simulation is enlarged or reduced to the size of the received one. Without a limit,
searches in pixels, whose first gradients are far from the received one, end at wrong images."""


def sign(scale: SignScale = "none", *, error_feedback: bool = False) -> Channel:
    """Return the attacker's model of `sign`: a soft sign s (1 - max(0, -s u / c)) for received sign s and simulated value u.

    c is the mean magnitude of the simulated tensor. The soft sign equals s where u has the sign s or is zero. With scale="mean"
    it is multiplied by c or, if `error_feedback` is also set, by the mean magnitude of the received tensor.

    Yue et al. 2022, section 4.3, use tanh(u) instead, which is nearly linear for the small values of an update.
    """

    def expect(update: Update, known: ChannelFacts) -> Update:
        signs = {name: _soften_signs(t, known[f"sign/{name}"]) for name, t in update.items()}
        if scale == "none":
            return signs
        sizes = {name: known[f"size/{name}"] if error_feedback else _compute_mean(t.abs()) for name, t in update.items()}
        return {name: t * sizes[name] for name, t in signs.items()}

    def learn(received: Update) -> ChannelFacts:
        signs = {f"sign/{name}": torch.where(t < 0, -torch.ones_like(t), torch.ones_like(t)) for name, t in received.items()}
        return {**signs, **{f"size/{name}": _compute_mean(t.abs()) for name, t in received.items()}}

    def follow(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        due = {name: t + state[name] if name in state else t for name, t in update.items()}
        sizes = {name: 1.0 if scale == "none" else known[f"size/{name}"] for name in due}
        return expect(due, known), {name: t - known[f"sign/{name}"] * sizes[name] for name, t in due.items()}

    return Channel(expect, learn, follow=follow if error_feedback else None)


def _soften_signs(values: Tensor, signs: Tensor) -> Tensor:
    wrong = torch.where(signs * values < 0, values, 0)
    return signs + wrong / _compute_mean_magnitude(values)


def _compute_mean(values: Tensor) -> Tensor:
    """Return the mean as a 0-d tensor; zero for an empty tensor."""
    return values.sum() / max(values.numel(), 1)


def _compute_mean_magnitude(values: Tensor) -> Tensor:
    """Return the mean magnitude as a 0-d tensor, or 1 if it is nearly zero, since 0 / 0 has no gradient."""
    mean = _compute_mean(values.abs())
    return torch.where(mean > torch.finfo(values.dtype).tiny ** 0.5, mean, 1)


def uniform(bits: int, *, stochastic: bool = False) -> Channel:
    """Return the attacker's model of `uniform`: a simulated value that rounds to the received one becomes the received one.

    The values that round to the received value form the quantisation interval, whose centre is the received value. A simulated
    value outside of the interval becomes the centre plus its signed distance to the interval. With stochastic rounding, the
    channel of `qsgd` with norm="linf" is returned instead.
    """
    levels = count_steps(bits)
    if stochastic:
        return qsgd(levels, norm="linf")

    def expect(update: Update, known: ChannelFacts) -> Update:
        return {name: _pull_to_interval(t, known[f"centre/{name}"], known[f"half/{name}"]) for name, t in update.items()}

    def expect_approximate(update: Update, known: ChannelFacts) -> Update:
        intervals = {name: (known[f"centre/{name}"], known[f"half/{name}"]) for name in update}
        return {name: _pull_to_scaled_interval(t, *intervals[name]) for name, t in update.items()}

    def learn(received: Update) -> ChannelFacts:
        halves = {f"half/{name}": (compute_size(t, "linf") / (2 * levels)).to(t.dtype) for name, t in received.items()}
        return {**{f"centre/{name}": t for name, t in received.items()}, **halves}

    return Channel(expect, learn, expect_approximate=expect_approximate)


def _pull_to_interval(values: Tensor, centre: Tensor, half: Tensor, share: Tensor | float = 0.0) -> Tensor:
    """Return the centre plus each value's distance outside of the interval centre +- half, and `share` of that inside."""
    difference = values - centre
    return centre + (difference - (1 - share) * difference.clamp(-half, half))


def _pull_to_scaled_interval(values: Tensor, centre: Tensor, half: Tensor) -> Tensor:
    """Return the result of `_pull_to_interval` for values of an approximate simulation.

    The values are multiplied by <centre, centre> / <values, centre>, by a factor between 1 / `MAX_SCALE` and `MAX_SCALE`. Several
    local steps on the same examples make another size than one step, and a free size would let the attack shrink the contrast of
    images until all values lie in the interval around zero. The error of the values is taken as `APPROXIMATION_ERROR` times the
    root mean square of the centres. Intervals that are wide for this error say only where they end (share 0), narrow intervals
    are as good as a received value (share 1).
    """
    power, overlap = centre.square().sum(), (values * centre).sum()
    similar = overlap > power / MAX_SCALE
    scale = torch.where(similar, power / torch.where(similar, overlap, 1), MAX_SCALE).clamp(min=1 / MAX_SCALE)
    error = APPROXIMATION_ERROR * centre.square().mean().sqrt()
    width = half / (3**0.5 * error).clamp(min=torch.finfo(values.dtype).tiny)
    share = 1 / (1 + width**4)
    return _pull_to_interval(values * scale, centre, half, share)


def qsgd(levels: int, *, norm: Norm = "l2", kappa: float = 1.0) -> Channel:
    """Return the attacker's model of `qsgd`: it cuts off simulated values at `kappa` times their tensor's norm.

    The model also estimates the noise power, the expected squared norm of the noise.

    The noise is the error of stochastic rounding. The distance between two neighbouring levels is inferred from the received
    values.
    """

    def expect(update: Update, known: ChannelFacts) -> Update:
        if kappa >= 1:
            return update
        bounds = {name: (kappa * compute_size(t, norm)).to(t.dtype) for name, t in update.items()}
        return {name: t.maximum(-bounds[name]).minimum(bounds[name]) for name, t in update.items()}

    def compute_noise(received: Update) -> Tensor:
        return compute_no_noise(received) + sum(_compute_rounding_power(t, levels, norm) for t in received.values())

    return Channel(expect, noise=compute_noise)


def _compute_rounding_power(received: Tensor, levels: int, norm: Norm) -> Tensor:
    """Estimate the expected squared norm of the rounding error of one received tensor, as a 0-d tensor.

    A step is the distance between two neighbouring levels. A value at the fraction p between two levels adds p (1 - p) squared
    steps; for uniform p the mean is 1/6. Between level zero and level one most values are small, and the mean m of p is estimated
    as the share of these values that were rounded up. The number of values rounded up is the number received at level one, minus
    the number rounded down to level one, which is estimated as half the number received at level two. The mean of p (1 - p) is
    then taken as m (1 - m) / (1 + m), which is exact for uniform p (m = 1/2) and in the limit of small m.
    """
    if received.numel() == 0:
        return received.new_zeros(())
    size = received.abs().to(torch.promote_types(received.dtype, torch.float32))
    smallest = torch.where(size > 0, size, torch.inf).amin()
    step = size.amax() / levels if norm == "linf" else torch.where(smallest.isfinite(), smallest, 0)
    steps = (size / torch.where(step > 0, step, 1)).round()
    zeros, ones, twos = ((steps == k).sum().to(size.dtype) for k in range(3))
    rounded_up = (ones - twos / 2).clamp(min=0)
    lowest = zeros + rounded_up
    p = rounded_up / lowest.clamp(min=1)
    squared_steps = (received.numel() - lowest) / 6 + lowest * p * (1 - p) / (1 + p)
    return (step.square() * squared_steps).to(received.dtype)
