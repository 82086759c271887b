"""Quantisers: the attacker knows between which values a coordinate lies, or how much rounding at random adds."""

import torch
from torch import Tensor

from defenses.base import Update
from defenses.channel import Channel, ChannelFacts, silent
from defenses.quantisation import Norm, SignScale, size_of, steps_of


def sign(scale: SignScale = "none", *, error_feedback: bool = False) -> Channel:
    """A sign that is soft on the wrong side: s (1 - max(0, -s u / c)), for the sign s that was received.

    c is each tensor's own mean magnitude. At the true update it is s itself. Scaled, it goes by the mean magnitude of the
    simulated update; with error feedback, which adds to that what is not simulated, by the one that was received.

    Yue et al. 2022, section 4.3, has tanh(u): for the small values of an update that is no sign but the identity, and tanh(u / c)
    is not the sign at the true update either.
    """

    def expect(update: Update, known: ChannelFacts) -> Update:
        return {name: _agreeing(t, known[f"sign/{name}"]) * size(name, t, known) for name, t in update.items()}

    def size(name: str, values: Tensor, known: ChannelFacts) -> Tensor:
        if scale == "none":
            return torch.ones_like(_mean(values))
        return known[f"size/{name}"] if error_feedback else _mean(values.abs())

    def learn(seen: Update) -> ChannelFacts:
        signs = {f"sign/{name}": torch.where(t < 0, -torch.ones_like(t), torch.ones_like(t)) for name, t in seen.items()}
        return {**signs, **{f"size/{name}": _mean(t.abs()) for name, t in seen.items()}}

    return Channel(expect, learn)


def _agreeing(values: Tensor, signs: Tensor) -> Tensor:
    return signs * (1 - (-signs * values / _mean_magnitude(values)).clamp(min=0))


def _mean(values: Tensor) -> Tensor:
    """The mean, and zero of nothing."""
    return values.sum() / max(values.numel(), 1)


def _mean_magnitude(values: Tensor) -> Tensor:
    """One where that is as good as zero: a quotient of two zeros has no gradient."""
    mean = _mean(values.abs())
    return torch.where(mean > torch.finfo(values.dtype).tiny ** 0.5, mean, 1)


def uniform(bits: int, *, stochastic: bool = False) -> Channel:
    """Inside the cell of what was received any value is as good; beyond it, the distance to the cell is what counts."""
    levels = steps_of(bits)
    if stochastic:
        return qsgd(levels, norm="linf")

    def expect(update: Update, known: ChannelFacts) -> Update:
        return {name: _pulled(t, known[f"centre/{name}"], known[f"half/{name}"]) for name, t in update.items()}

    def learn(seen: Update) -> ChannelFacts:
        halves = {f"half/{name}": (size_of(t, "linf") / (2 * levels)).to(t.dtype) for name, t in seen.items()}
        return {**{f"centre/{name}": t for name, t in seen.items()}, **halves}

    return Channel(expect, learn)


def _pulled(values: Tensor, centre: Tensor, half: Tensor) -> Tensor:
    """The centre of a cell, plus by how much each value leaves the cell."""
    difference = values - centre
    return centre + (difference - difference.maximum(-half).minimum(half))


def qsgd(levels: int, *, norm: Norm = "l2", kappa: float = 1.0) -> Channel:
    """The update itself, cut off at `kappa` of its norm, and the power that rounding at random adds.

    The power is an estimate, on gradients of networks within a third: the step is read off what was received, and values
    are taken to be spread evenly between two steps, but for those between zero and the first step, most of which are small.
    """

    def expect(update: Update, known: ChannelFacts) -> Update:
        if kappa >= 1:
            return update
        bounds = {name: (kappa * size_of(t, norm)).to(t.dtype) for name, t in update.items()}
        return {name: t.maximum(-bounds[name]).minimum(bounds[name]) for name, t in update.items()}

    def noise(seen: Update) -> Tensor:
        return silent(seen) + sum(_rounding_power(t, levels, norm) for t in seen.values())

    return Channel(expect, noise=noise)


def _rounding_power(seen: Tensor, levels: int, norm: Norm) -> Tensor:
    """Expected squared length of what rounding at random added to one tensor, 0-d.

    A value that is a share p of the way to the next step adds p (1 - p) squared steps, which is a sixth in the mean over
    even p. Below the first step the mean of p is told by how many were rounded up, less those that came down from above; with
    that mean p (1 - p) / (1 + p) is right for a mean of a half and for small ones.
    """
    if seen.numel() == 0:
        return seen.new_zeros(())
    size = seen.abs().to(torch.promote_types(seen.dtype, torch.float32))
    smallest = torch.where(size > 0, size, torch.inf).amin()
    step = size.amax() / levels if norm == "linf" else torch.where(smallest.isfinite(), smallest, 0)
    steps = (size / torch.where(step > 0, step, 1)).round()
    zeros, ones, twos = ((steps == k).sum().to(size.dtype) for k in range(3))
    rounded_up = (ones - twos / 2).clamp(min=0)
    lowest = zeros + rounded_up
    p = rounded_up / lowest.clamp(min=1)
    squared_steps = (seen.numel() - lowest) / 6 + lowest * p * (1 - p) / (1 + p)
    return (step.square() * squared_steps).to(seen.dtype)
