"""Batched line searches for the strong Wolfe conditions, one search per problem.

Each search looks for a step length t with loss(t) <= loss(0) + 1e-4 t slope(0) and |slope(t)| <= 0.9 |slope(0)|, where slope is
the derivative of the loss along the line (Nocedal & Wright 2006, algorithms 3.5 and 3.6, with cubic interpolation). After
`MAX_TRIALS` trials, a search ends with the lowest point found. All tensors have the shape (P,) for P problems.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from attacker.attacks.optimisers.first_order import OptimiserState

WOLFE_DECREASE, WOLFE_CURVATURE = 1e-4, 0.9
MAX_TRIALS = 20
"""Largest number of trial points per line; then the lowest point found is used."""
MIN_MARGIN = 0.1
"""Smallest distance of a trial point from the ends of the bracketing interval, relative to the length of the interval."""
EXTRAPOLATION = (1.1, 4.0)
"""While no upper end of the bracketing interval is known, the next step length is the current one plus m times the distance
between the current one and the step length of the lowest point before it, with m between these two limits."""


@dataclass
class LineSearches:
    """The state of the line searches, one entry per problem.

    loss, slope: at the beginning of the line.
    length:      step length to be evaluated next.
    low_*:       step length, loss and slope at the lowest point so far that fulfils the first Wolfe condition, sufficient
                 decrease; at first the beginning of the line.
    high_*:      step length, loss and slope at the other end of the interval in which the search goes on.
    bounded:     whether that other end is known yet; as long as it is not, the values high_* mean nothing.
    trials:      number of points evaluated on this line.
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
    def from_slope(cls, loss: Tensor, slope: Tensor, length: Tensor) -> "LineSearches":
        """Return new line searches. loss, slope: at the beginning of the lines. length: first step lengths to try."""
        zero, no = torch.zeros_like(loss), torch.zeros_like(loss, dtype=torch.bool)
        return cls(loss, slope, length, zero, loss, slope, zero, loss, slope, no, zero.long())

    def begin(self, mask: Tensor, slope: Tensor, length: Tensor) -> None:
        """Begin new line searches at the lowest points of the old ones, for problems where the mask `mask` is true.

        slope: at the beginning of the new lines, along them. length: first step lengths to try. Entries of both where the mask is
        false are not used.
        """
        fresh = LineSearches.from_slope(self.low_loss, slope, length)
        for name in _NAMES:
            setattr(self, name, torch.where(mask, getattr(fresh, name), getattr(self, name)))

    def process_trial(self, loss: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Process loss and slope at the trial points, choose the next step lengths, and return two masks.

        The first tells whether the trial point is the new lowest point (`low_*`), the second whether the search is finished. The
        result of a finished search is its lowest point, which is the beginning of the line if nothing better was found.
        """
        enough = loss <= self.loss + WOLFE_DECREASE * self.length * self.slope
        lower = enough & (loss < self.low_loss)
        flat = lower & (slope.abs() <= -WOLFE_CURVATURE * self.slope)
        ahead = torch.where(self.bounded, self.high_length - self.low_length, 1)
        turned = lower & (slope * ahead >= 0)
        unbounded = lower & ~turned & ~self.bounded
        further = _extrapolate(self, loss, slope)
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
        self.length = torch.where(unbounded, further, _interpolate(self))
        return lower, flat | (self.trials >= MAX_TRIALS)

    def keep(self, rows: Tensor) -> None:
        for name in _NAMES:
            setattr(self, name, getattr(self, name)[rows])

    def get_state(self) -> OptimiserState:
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(f.name for f in fields(LineSearches))


def _extrapolate(lines: LineSearches, loss: Tensor, slope: Tensor) -> Tensor:
    """Return the minima of the cubics through trial points and points `low_*`, clamped to the range of `EXTRAPOLATION`."""
    stretch = lines.length - lines.low_length
    minimum, maximum = (lines.length + growth * stretch for growth in EXTRAPOLATION)
    guess = _find_minimum(lines.low_length, lines.low_loss, lines.low_slope, lines.length, loss, slope)
    return torch.where(guess.isfinite(), guess.clamp(minimum, maximum), maximum)


def _interpolate(lines: LineSearches) -> Tensor:
    """Return the minima of the cubics through both ends of the interval, `MIN_MARGIN` away from them, or the midpoints."""
    guess = _find_minimum(lines.low_length, lines.low_loss, lines.low_slope, lines.high_length, lines.high_loss, lines.high_slope)
    width = lines.high_length - lines.low_length
    share = ((guess - lines.low_length) / width).clamp(MIN_MARGIN, 1 - MIN_MARGIN)
    return lines.low_length + torch.where(share.isfinite(), share, 0.5) * width


def _find_minimum(a: Tensor, loss_a: Tensor, slope_a: Tensor, b: Tensor, loss_b: Tensor, slope_b: Tensor) -> Tensor:
    """Return the local minima, or NaN, of the cubics with these values at a and b, (P,). Source: Nocedal & Wright 2006, 3.59."""
    first = slope_a + slope_b - 3 * (loss_a - loss_b) / (a - b)
    second = (b - a).sign() * (first.square() - slope_a * slope_b).sqrt()
    return b - (b - a) * (slope_b + second - first) / (slope_b - slope_a + 2 * second)
