"""Line searches by the strong Wolfe conditions, one for each of many problems, all at once.

For each problem: a length t at which loss(t) <= loss(0) + 1e-4 t slope(0) and |slope(t)| <= 0.9 |slope(0)|
(Nocedal & Wright 2006, algorithms 3.5 and 3.6, with cubic interpolation). All tensors are (P,).
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import State

ENOUGH_DECREASE, ENOUGH_FLATNESS = 1e-4, 0.9
MAX_TRIALS = 20
"""Trials on one line; then the lowest point is taken, or none."""
MARGIN = 0.1
"""How near to an end of the interval, as a share of it, a trial may be."""
GROWTH = (1.1, 4.0)
"""While no upper end is known, the next trial is further than the last by so many times the last stretch."""


@dataclass
class Lines:
    """length: the trial that is to be evaluated. trials: so many were. bounded: whether the upper end `high` is known.

    loss, slope: at the beginning of the line. low_*: at the lowest point so far that decreases the loss enough. high_*: at the
    other end of the interval that holds what is looked for.
    """

    loss: Tensor
    slope: Tensor
    length: Tensor
    low_length: Tensor
    low_loss: Tensor
    low_slope: Tensor
    high_length: Tensor
    high_loss: Tensor
    high_slope: Tensor
    bounded: Tensor
    trials: Tensor

    @classmethod
    def begun(cls, loss: Tensor, slope: Tensor, length: Tensor) -> "Lines":
        """New lines: loss and slope at their beginning, and the first length to try."""
        zero, no = torch.zeros_like(loss), torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss, slope, length, zero, loss, slope, zero, loss, slope, no, zero.long())

    def begin(self, where: Tensor, slope: Tensor, length: Tensor) -> None:
        """Begin again at the lowest point of each line where the mask is true."""
        fresh = Lines.begun(self.low_loss, slope, length)
        for name in _NAMES:
            setattr(self, name, torch.where(where, getattr(fresh, name), getattr(self, name)))

    def tried(self, loss: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Take note of loss and slope at `length`, and choose the next length.

        Gives two masks: where the trial is the new lowest point; where the search is over, and that point is its answer, the
        beginning of the line where nothing better was found.
        """
        enough = loss <= self.loss + ENOUGH_DECREASE * self.length * self.slope
        lower = enough & (loss < self.low_loss)
        flat = lower & (slope.abs() <= -ENOUGH_FLATNESS * self.slope)
        ahead = torch.where(self.bounded, self.high_length - self.low_length, 1)
        turned = lower & (slope * ahead >= 0)
        unbounded = lower & ~turned & ~self.bounded
        further = _further(self, loss, slope)
        trial, low = (self.length, loss, slope), (self.low_length, self.low_loss, self.low_slope)
        high = (self.high_length, self.high_loss, self.high_slope)
        self.high_length, self.high_loss, self.high_slope = (
            torch.where(~lower, t, torch.where(turned, before, h)) for t, before, h in zip(trial, low, high, strict=True)
        )
        self.low_length, self.low_loss, self.low_slope = (
            torch.where(lower, t, before) for t, before in zip(trial, low, strict=True)
        )
        self.bounded = self.bounded | turned | ~lower
        self.trials = self.trials + 1
        self.length = torch.where(unbounded, further, _within(self))
        return lower, flat | (self.trials >= MAX_TRIALS)

    def keep(self, rows: Tensor) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(self, name)[rows])

    def state(self) -> State:
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(f.name for f in fields(Lines))


def _further(lines: Lines, loss: Tensor, slope: Tensor) -> Tensor:
    """Beyond the trial: where the cubic through it and the last low point has its minimum, within `GROWTH`."""
    stretch = lines.length - lines.low_length
    least, most = (lines.length + growth * stretch for growth in GROWTH)
    guess = _minimum(lines.low_length, lines.low_loss, lines.low_slope, lines.length, loss, slope)
    return torch.where(guess.isfinite(), guess.clamp(least, most), most)


def _within(lines: Lines) -> Tensor:
    """Between both ends: where the cubic through them has its minimum, or in the middle where it has none."""
    guess = _minimum(lines.low_length, lines.low_loss, lines.low_slope, lines.high_length, lines.high_loss, lines.high_slope)
    width = lines.high_length - lines.low_length
    share = ((guess - lines.low_length) / width).clamp(MARGIN, 1 - MARGIN)
    return lines.low_length + torch.where(share.isfinite(), share, 0.5) * width


def _minimum(a: Tensor, loss_a: Tensor, slope_a: Tensor, b: Tensor, loss_b: Tensor, slope_b: Tensor) -> Tensor:
    """Where the cubic with these values and slopes has its minimum (Nocedal & Wright 2006, eq. 3.59); not finite without one."""
    first = slope_a + slope_b - 3 * (loss_a - loss_b) / (a - b)
    second = (b - a).sign() * (first.square() - slope_a * slope_b).sqrt()
    return b - (b - a) * (slope_b + second - first) / (slope_b - slope_a + 2 * second)
