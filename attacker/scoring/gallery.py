"""Measures of re-identification: whether a reconstruction is nearer to its original than to other examples of the data set.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from attacker.scoring.measures import MeasuredRow
from fedsim.data import Dataset

GALLERY_SIZE = 400
"""Largest number of other examples that each reconstruction is compared with; smaller data sets have fewer."""
MAX_SIDE = 64
"""Largest height and width in pixels at which images are compared; larger images are downsampled to it."""
TAIL_NEIGHBOURS = 20
"""Largest number of nearest other examples from which the lower tail of the distances is estimated."""
MAX_TAIL_EXPONENT = 4.0
"""Upper limit of the estimated exponent of that tail."""
MAX_JOINT_EXAMPLES = 64
"""Largest number of examples of a case whose reconstructions are compared jointly."""
GALLERY_FIELDS = ("rank", "gallery", "rank_share", "chance", "case_chance")


@dataclass(frozen=True)
class Gallery:
    """A random sample of the training examples of a data set, to compare reconstructions with.

    examples: (n, d), flattened, large images reduced before, minus their mean, normalised to length 1. indices: (n,), indices in
    the data set.
    centre: (d,), the mean that was subtracted.
    constant: for images (C,), the mean of each channel over pixels and examples: the image of one colour with the smallest mean
    squared error over the sample. For table rows (F,), the mean row.
    shape: shape of one example.
    """

    examples: Tensor
    indices: Tensor
    centre: Tensor
    constant: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, data: Dataset) -> "Gallery":
        """Draw `GALLERY_SIZE` + `MAX_JOINT_EXAMPLES` training examples with a fixed seed, or take all if there are fewer."""
        chosen = np.sort(np.random.default_rng(0).permutation(len(data.train))[: GALLERY_SIZE + MAX_JOINT_EXAMPLES])
        x, _ = data.train[chosen]
        flat = _flatten(x)
        centre = flat.mean(dim=0)
        constant = x.mean(dim=(0, 2, 3)) if x.ndim == 4 else x.mean(dim=0)
        return cls(_normalise(flat - centre), torch.from_numpy(chosen), centre, constant, tuple(x.shape[1:]))

    def repeat_constant(self, count: int) -> Tensor:
        """Return `count` copies of the image of one colour, or of the table row, given by `constant`: (count, *shape)."""
        constant = self.constant[:, None, None] if len(self.shape) == 3 else self.constant
        return constant.expand(count, *self.shape).clone()

    def compare(self, x: Tensor, truth: Tensor, assigned: Sequence[int | None], indices: Sequence[int]) -> list[MeasuredRow]:
        """Return the fields of score rows on re-identification, one dict per original.

        x: (M, *shape) in [0, 1], the reconstructions. truth: (N, *shape), the originals. assigned: index in x of each original's
        reconstruction, or None. indices: data set indices of the originals.

        The distance of two examples is 1 minus the cosine between them after the gallery's mean is subtracted, so that an image
        of one colour is not near to many examples. The fields are:

        rank, gallery: rank of the original by distance to its reconstruction, 1 for the nearest, and the number of examples that
        are ranked: the original and the other examples (up to `GALLERY_SIZE` of the gallery, without the originals of this case).
        rank_share: share of the other examples that are nearer than the original; a tie counts half.
        chance: estimated upper bound on the probability that at least one of M reconstructions without any information would be
        this near. If the original is nearer than all other examples, their distances are extrapolated by a power law, whose
        exponent is the lower confidence limit of Hill's estimator (1975) over the nearest `TAIL_NEIGHBOURS`, at most
        `MAX_TAIL_EXPONENT`.
        case_chance: estimated probability that N random other examples would together be as near to the reconstructions of the
        case, under the best assignment, as the originals are. It belongs to the case, and is equal for all its originals that
        have a reconstruction. None for cases of too many examples or reconstructions, see `_estimate_joint_chance`.

        All fields are None for an original without a reconstruction, and if there are no other examples.
        """
        answers, originals = (_normalise(_flatten(examples) - self.centre) for examples in (x, truth))
        others = self._select_others(originals, indices)
        near, far = 1 - answers @ originals.T, 1 - answers @ others.T
        case_chance = _estimate_joint_chance(near, far)
        rows = []
        for original, answer in enumerate(assigned):
            if answer is None or not len(others):
                rows.append(dict.fromkeys(GALLERY_FIELDS))
                continue
            distance, other_distances = float(near[answer, original]), far[answer].numpy()
            nearer, tied = int((other_distances < distance - 1e-6).sum()), int((np.abs(other_distances - distance) <= 1e-6).sum())
            rows.append(
                {
                    "rank": 1 + nearer,
                    "gallery": 1 + len(other_distances),
                    "rank_share": (nearer + tied / 2) / len(other_distances),
                    "chance": min(1.0, len(x) * _estimate_chance(distance, other_distances)),
                    "case_chance": case_chance,
                }
            )
        return rows

    def _select_others(self, originals: Tensor, indices: Sequence[int]) -> Tensor:
        """Return up to `GALLERY_SIZE` examples of the gallery that are neither originals nor copies of one (cosine 1)."""
        keep = ~torch.isin(self.indices, torch.tensor(indices, dtype=self.indices.dtype))
        if len(self.shape) == 3 and len(originals):
            keep &= (self.examples @ originals.T).amax(dim=1) < 1 - 1e-6
        kept: Tensor = self.examples[keep][:GALLERY_SIZE]
        return kept


def _flatten(x: Tensor) -> Tensor:
    """Flatten examples to (N, d); a height or width of images above `MAX_SIDE` pixels is first reduced to it by averaging."""
    if x.ndim == 4 and max(x.shape[-2:]) > MAX_SIDE:
        x = adaptive_avg_pool2d(x, (min(MAX_SIDE, x.shape[-2]), min(MAX_SIDE, x.shape[-1])))
    return x.flatten(1).float()


def _normalise(x: Tensor) -> Tensor:
    direction: Tensor = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return direction


def _estimate_chance(distance: float, others: NDArray[Any]) -> float:
    """Estimate the probability that a random other example is at a distance of at most `distance` from a reconstruction.

    distance: that of the original. others: distances (n,) of a sample of other examples. If k > 0 of them are at most `distance`,
    ties included, the estimate is (1 + k) / (1 + n). If all are above `distance`, it is extrapolated by a power law, see `chance`
    in `Gallery.compare`.
    """
    ordered = np.sort(others)
    within = int((ordered <= distance + 1e-6).sum())
    if within:
        return (1 + within) / (1 + len(ordered))
    minimum = max(float(ordered[0]), 1e-6)
    count = min(TAIL_NEIGHBOURS, len(ordered) - 1)
    logs = np.log(max(float(ordered[count]), 1e-6) / np.maximum(ordered[:count], 1e-6)) if count else np.zeros(1)
    exponent = count / float(logs.sum()) if logs.sum() > 0 else MAX_TAIL_EXPONENT
    lower = min(max(exponent * (1 - 1.64 / np.sqrt(max(count, 1))), 0.0), MAX_TAIL_EXPONENT)
    return float((max(distance, 1e-9) / minimum) ** lower / (1 + len(ordered)))


def _estimate_joint_chance(near: Tensor, far: Tensor) -> float | None:
    """Estimate the probability that N random examples of the gallery fit the M reconstructions at least as well as the originals.

    Fit is the sum of distances under the best one-to-one assignment, in which surplus reconstructions or examples are left over.
    The estimate uses `GALLERY_SIZE` random draws of N examples, or for M = N = 1 every example of the gallery; a tie counts half.
    near: (M, N), distances of the reconstructions to the originals. far: (M, n), their distances to the gallery. The result is
    None without reconstructions or originals, if N exceeds `MAX_JOINT_EXAMPLES` or n, or if M exceeds 16 times
    `MAX_JOINT_EXAMPLES`.
    """
    answers, originals = near.shape
    count = far.shape[1]
    if not answers or not originals or originals > min(MAX_JOINT_EXAMPLES, count) or answers > 16 * MAX_JOINT_EXAMPLES:
        return None
    if answers == originals == 1:
        sums = far[0].numpy()
    else:
        rng = np.random.default_rng(0)
        drawn = (rng.choice(count, originals, replace=False) for _ in range(GALLERY_SIZE))
        sums = np.array([_sum_best_distances(far[:, sample].numpy()) for sample in drawn])
    observed = _sum_best_distances(near.numpy())
    return float((1 + (sums < observed - 1e-9).sum() + 0.5 * (np.abs(sums - observed) <= 1e-9).sum()) / (1 + len(sums)))


def _sum_best_distances(distances: NDArray[Any]) -> float:
    """Return the smallest sum of distances over one-to-one assignments of rows to columns; surplus rows or columns stay out."""
    return float(distances[linear_sum_assignment(distances)].sum())
