"""Recognition of examples by their values: images are stored with 8 bits per value, that is as multiples of 1/255.

The values of a mixture of images, or of an image with errors, do not fall on this grid, so that an answer whose values all fall
on it is an image, whatever the gradient says. This holds for images that were not changed after loading by steps that leave the
grid, such as interpolation to another size or a change of contrast.
"""

import math

from torch import Tensor

LEVELS = 255
MAX_GRID_DISTANCE = 0.15
"""Largest distance of a value to the nearest multiple of 1/255, in units of 1/255. A random value passes with a chance of 0.3."""
MIN_GRID_VALUES = 20
"""Smallest number of values besides 0 and 1 that the test needs. 20 random values pass it with a chance of 4e-11."""
MIN_GRID_LEVELS = 8
"""Smallest number of different values besides 0 and 1; an answer of one grey level is no evidence."""


def is_eight_bit(x: Tensor) -> Tensor:
    """Return a mask (N,) of the examples x (N, *shape), on the scale [0, 1], that were certainly stored with 8 bits per value.

    False means that the test does not tell. Answers whose values are all multiples of 1/3, 1/5, 1/15, 1/17, 1/51 or 1/85 do not
    pass, since quotients of quantised updates can have few levels as well.
    """
    scaled = LEVELS * x.flatten(1).double()
    levels = scaled.round()
    near = ((scaled - levels).abs() <= MAX_GRID_DISTANCE) & (levels >= 0) & (levels <= LEVELS)
    inside = (levels > 0) & (levels < LEVELS)
    passed = near.all(dim=1) & (inside.sum(dim=1) >= MIN_GRID_VALUES)
    for i in passed.nonzero()[:, 0].tolist():
        inner = [int(level) for level in set(levels[i][inside[i]].tolist())]
        passed[i] = len(inner) >= MIN_GRID_LEVELS and math.gcd(LEVELS, *inner) == 1
    return passed
