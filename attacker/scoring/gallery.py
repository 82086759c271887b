"""Re-identification: whether a reconstruction is nearer to its original than to other examples of the same data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fedsim.data import Dataset

SIZE = 400
"""Number of other examples that each reconstruction is compared with."""
SIDE = 64
"""Height and width in pixels at which larger images are compared."""
NEIGHBOURS = 20
"""Number of nearest other examples from which the tail of distances is estimated."""
STEEPEST = 4.0
"""Largest accepted exponent of that tail."""
MOST = 64
"""Largest number of examples of a case whose reconstructions are compared jointly."""
FIELDS = ("rank", "gallery", "rank_share", "chance", "case_chance")

MeasuredRow = dict[str, Any]


@dataclass(frozen=True)
class Gallery:
    """Other examples of the data that a run was trained on.

    examples: (n, d), less their mean and of length 1. indices: (n,), in the data set. centre: (d,), their mean. constant: (C,) or
    (F,), the constant image, or row, that is nearest to all of them. shape: of an example.
    """

    examples: Tensor
    indices: Tensor
    centre: Tensor
    constant: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, data: Dataset) -> "Gallery":
        """Draw up to `SIZE` + `MOST` examples that were trained on, always the same ones."""
        chosen = np.sort(np.random.default_rng(0).permutation(len(data.train))[: SIZE + MOST])
        x, _ = data.train[chosen]
        flat = _small(x)
        centre = flat.mean(dim=0)
        constant = x.mean(dim=(0, 2, 3)) if x.ndim == 4 else x.mean(dim=0)
        return cls(_direction(flat - centre), torch.from_numpy(chosen), centre, constant, tuple(x.shape[1:]))

    def constants(self, count: int) -> Tensor:
        """Return the best constant image so many times, (count, *shape)."""
        one = self.constant[:, None, None] if len(self.shape) == 3 else self.constant
        return one.expand(count, *self.shape).clone()

    def compare(self, x: Tensor, truth: Tensor, assigned: Sequence[int | None], indices: Sequence[int]) -> list[MeasuredRow]:
        """Return the fields of re-identification of each original.

        x: (M, *shape) in [0, 1]. truth: (N, *shape). assigned: the answer of each original. indices: in the data set.
        rank: of the original among `gallery` examples by their distance to its answer, 1 for the nearest. Distance is 1 less the
        cosine of what is left after the mean image of the gallery is taken off, so that flat images are near to nothing.
        rank_share: share of the other examples that are nearer than the original, a tie counts half.
        chance: that one of M answers which know nothing comes so near: of an original nearer than all others, the tail of their
        distances goes on as a power law, whose exponent is Hill's (1975) lower limit over the nearest `NEIGHBOURS`.
        case_chance: that as many other examples would be as near to the answers of the case together, where the best assignment
        is made for them, too; the same for all originals of the case. None where they are too many.
        """
        answers, originals = (_direction(_small(one) - self.centre) for one in (x, truth))
        others = self._others(originals, indices)
        near, far = 1 - answers @ originals.T, 1 - answers @ others.T
        together = _together(near, far)
        rows = []
        for original, answer in enumerate(assigned):
            if answer is None or not len(others):
                rows.append(dict.fromkeys(FIELDS))
                continue
            own, rest = float(near[answer, original]), far[answer].numpy()
            nearer, tied = int((rest < own - 1e-6).sum()), int((np.abs(rest - own) <= 1e-6).sum())
            rows.append(
                {
                    "rank": 1 + nearer,
                    "gallery": 1 + len(rest),
                    "rank_share": (nearer + tied / 2) / len(rest),
                    "chance": min(1.0, len(x) * _chance(own, rest)),
                    "case_chance": together,
                }
            )
        return rows

    def _others(self, originals: Tensor, indices: Sequence[int]) -> Tensor:
        """The gallery without the originals; of images also without copies of them: to find a copy is to find the original."""
        keep = ~torch.isin(self.indices, torch.tensor(indices, dtype=self.indices.dtype))
        if len(self.shape) == 3 and len(originals):
            keep &= (self.examples @ originals.T).amax(dim=1) < 1 - 1e-6
        kept: Tensor = self.examples[keep][:SIZE]
        return kept


def _small(x: Tensor) -> Tensor:
    """Flatten examples, after resizing large images to `SIDE` pixels."""
    if x.ndim == 4 and max(x.shape[-2:]) > SIDE:
        x = adaptive_avg_pool2d(x, (min(SIDE, x.shape[-2]), min(SIDE, x.shape[-1])))
    return x.flatten(1).float()


def _direction(x: Tensor) -> Tensor:
    direction: Tensor = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return direction


def _chance(own: float, others: NDArray[Any]) -> float:
    """Return the probability that another example is as near as `own`."""
    ordered = np.sort(others)
    within = int((ordered <= own + 1e-6).sum())
    if within:
        return (1 + within) / (1 + len(ordered))
    least = max(float(ordered[0]), 1e-6)
    count = min(NEIGHBOURS, len(ordered) - 1)
    logs = np.log(max(float(ordered[count]), 1e-6) / np.maximum(ordered[:count], 1e-6)) if count else np.zeros(1)
    exponent = count / float(logs.sum()) if logs.sum() > 0 else STEEPEST
    lower = min(max(exponent * (1 - 1.64 / np.sqrt(max(count, 1))), 0.0), STEEPEST)
    return float((max(own, 1e-9) / least) ** lower / (1 + len(ordered)))


def _together(near: Tensor, far: Tensor) -> float | None:
    """Return the probability that originals drawn from the gallery fit equally well. near: (M, N). far: (M, n)."""
    answers, originals = near.shape
    count = far.shape[1]
    if not answers or not originals or originals > min(MOST, count) or answers > 16 * MOST:
        return None
    if answers == originals == 1:
        sums = far[0].numpy()
    else:
        rng = np.random.default_rng(0)
        drawn = (rng.choice(count, originals, replace=False) for _ in range(SIZE))
        sums = np.array([_fit(far[:, one].numpy()) for one in drawn])
    own = _fit(near.numpy())
    return float((1 + (sums < own - 1e-9).sum() + 0.5 * (np.abs(sums - own) <= 1e-9).sum()) / (1 + len(sums)))


def _fit(distances: NDArray[Any]) -> float:
    return float(distances[linear_sum_assignment(distances)].sum())
