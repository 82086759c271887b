"""Doubts about the stated normalisation: images that look complete if they are read by another common normalisation.

A gradient shows the network's inputs, and what an image was follows only with the mean and std that clients used. If the stated
ones are wrong, a search returns images of wrong contrast, which explain the gradient. Photographs and drawings use most of the
range from 0 to 1. If all values of an answer stay within the part of the stated range that another common normalisation fills,
and reach both ends of that part, this other normalisation is the more probable one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attacker.attacks.confidence.eight_bit import is_eight_bit
from attacker.attacks.confidence.evidence import measure_outside
from attacker.reconstruction import MAX_RECOVERED_MSE
from fedsim.recording.observation import DataSpec

Normalisations = Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]

GREY: Normalisations = {
    "mean 0 and std 1": ((0.0,), (1.0,)),
    "mean 0.5 and std 0.5": ((0.5,), (0.5,)),
    "mean 0.5 and std 1": ((0.5,), (1.0,)),
    "the mean and std of MNIST": ((0.1307,), (0.3081,)),
    "the mean and std of Fashion-MNIST": ((0.2860,), (0.3530,)),
}
COLOUR: Normalisations = {
    "mean 0 and std 1": ((0.0,), (1.0,)),
    "mean 0.5 and std 0.5": ((0.5,), (0.5,)),
    "mean 0.5 and std 1": ((0.5,), (1.0,)),
    "the mean and std of CIFAR-10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "the mean and std of CIFAR-100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "the mean and std of ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Common normalisations by name, of images with one channel (`GREY`) and with three: mean and std of `DataSpec`."""
_KNOWN = {1: GREY, 3: COLOUR}
MAX_OUTSIDE_ONE, MAX_OUTSIDE_SEVERAL, SEVERAL = 3e-5, 1e-3, 4
"""Largest mean squared distance to [0, 1] of images that are read by another normalisation, for fewer than SEVERAL images and for
others. It leaves room for errors of searches, most of which are near the ends of the range only in a few pixels."""
MAX_BEYOND, MAX_WIDTH = 0.01, 0.6
"""Largest distance to [0, 1] of the ends of another normalisation's range, on the stated scale, and its largest width, for it
to be considered. Images of clients that use one with ends further outside have values outside 0 to 1, which other checks report.
Many photographs and spectrograms fill no more than three quarters of the range, as if it were a narrower one."""
WOULD_FILL = "they would fill the range from 0 to 1 if clients normalised by"
"""Words of every reason for this doubt, by which it is recognised in the notes of a reconstruction."""
MAX_INSIDE_END, MAX_OUTSIDE_END = 0.1, 0.25
"""Largest distances of the smallest value from 0, and of the largest value from 1, if images are read by another normalisation:
of values inside [0, 1], and of values outside."""
MIN_DIFFERENCE = MAX_RECOVERED_MSE / 4
"""Smallest mean squared difference between an image read by both normalisations for it to be doubted. Most answers of searches
are paler than the originals and have errors of their own, which add to this difference."""


@dataclass(frozen=True)
class OtherNormalisation:
    """A normalisation by which images look more probable than by the stated one.

    name: in words. differing: mask (N,) of the images that would differ by at least MIN_DIFFERENCE if it is right.
    lowest, highest: smallest and largest value of the images as stated.
    """

    name: str
    differing: Tensor
    lowest: float
    highest: float

    def __str__(self) -> str:
        return (
            f"by the stated mean and std, all values lie between {self.lowest:.2f} and {self.highest:.2f}, and {WOULD_FILL} "
            f"{self.name}, so that brightness and contrast may be wrong"
        )


def find_other_normalisation(x: Tensor, data: DataSpec) -> OtherNormalisation | None:
    """Return the normalisation by which clients probably normalised the images x (N, *shape), if it is not the stated one.

    Values of x are on the scale [0, 1] by the stated mean and std, and right if clients used these. None if x holds no images of
    one or three channels, or if no other common normalisation is more probable. Of several, the one with the widest range is
    returned.
    """
    if not len(x) or not data.is_image or bool(is_eight_bit(x).any()):
        return None
    limit = MAX_OUTSIDE_ONE if len(x) < SEVERAL else MAX_OUTSIDE_SEVERAL
    candidates = []
    for name, other in _list_narrower(data):
        as_other = other.denormalise(data.normalise(x.double()))
        differing = (as_other - x).flatten(1).square().mean(dim=1) > MIN_DIFFERENCE
        inside = float(measure_outside(as_other).mean()) <= limit
        ends = float(as_other.min()), float(1 - as_other.max())
        fills = all(-MAX_OUTSIDE_END <= end <= MAX_INSIDE_END for end in ends)
        if bool(differing.any()) and (bool(is_eight_bit(as_other).all()) or (inside and fills)):
            candidates.append((max(other.std), OtherNormalisation(name, differing, float(x.min()), float(x.max()))))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _list_narrower(data: DataSpec) -> Iterator[tuple[str, DataSpec]]:
    """Yield name and specification of the common normalisations whose inputs fill only a part of the stated range."""
    ends = torch.stack([torch.zeros(data.shape), torch.ones(data.shape)]).double()
    for name, (mean, std) in _KNOWN.get(data.shape[0], {}).items():
        other = replace(data, mean=mean, std=std)
        low, high = data.denormalise(other.normalise(ends))
        if float(low.min()) >= -MAX_BEYOND and float(high.max()) <= 1 + MAX_BEYOND and float((high - low).max()) <= MAX_WIDTH:
            yield name, other
