"""One case's answer beside its originals: which belongs to which, and how near it is."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign, keep_first
from attacker.scoring.gallery import Gallery
from attacker.scoring.measures import answered, measure
from attacker.scoring.perceptual import Lpips
from fedsim.recording import DataSpec


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The answer to a case, compared.

    found: the answer without surplus candidates. x: (M, *shape), its examples as numbers in [0, 1]. surplus: candidates left out.
    assigned: of each original, the index of its answer in x; None where there is none.
    fields: of each original with an answer, the fields of its score row by name; None for the others.
    """

    found: Reconstruction
    x: Tensor
    surplus: int
    assigned: tuple[int | None, ...]
    fields: tuple[Mapping[str, Any] | None, ...]


def compare(
    found: Reconstruction,
    truth: Tensor,
    labels: Sequence[int],
    spec: DataSpec,
    *,
    lpips: Lpips | str,
    counts: Sequence[int] | None = None,
    gallery: Gallery | None = None,
    indices: Sequence[int] = (),
) -> Compared:
    """Assign the examples of an answer to the originals and measure each pair.

    truth: (N, *shape). labels: (N,). lpips: or why there is none. counts: how many candidates may be of each original, by default
    one. gallery: other examples, for re-identification; indices: of the originals among them.
    """
    counts = counts or [1] * len(labels)
    surplus, found = max(0, len(found.x) - sum(counts)), keep_first(found, sum(counts))
    x = answered(found.x, spec)
    assigned = assign(x.clamp(0, 1), truth, counts)
    read = labels_read(labels, found.y.tolist(), counts)
    matched = [i for i, candidate in enumerate(assigned) if candidate is not None]
    chosen = [candidate for candidate in assigned if candidate is not None]
    measured = dict(zip(matched, measure(found.x[chosen], truth[matched], spec, lpips), strict=True))
    nearest = None if gallery is None else gallery.compare(x.clamp(0, 1), truth, assigned, indices)

    def fields(i: int, candidate: int | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        return {
            **measured[i],
            **({} if nearest is None else nearest[i]),
            "label_recovered": int(found.y[candidate]),
            "label_success": read[i],
            "confidence": _number(found.confidence[candidate]),
            "explained": None if found.explained is None else _number(found.explained[candidate]),
        }

    return Compared(
        found=found,
        x=x,
        surplus=surplus,
        assigned=tuple(assigned),
        fields=tuple(fields(i, candidate) for i, candidate in enumerate(assigned)),
    )


def labels_read(true: Sequence[int], recovered: Sequence[int], places: Sequence[int] | None = None) -> list[bool]:
    """For each true label, whether it is among the recovered ones, each of which counts once.

    A gradient does not say which image has which label: the multiset is what leaks. places: how often each true one is in it.
    """
    left = Counter(recovered)
    read = []
    for label, count in zip(true, places or [1] * len(true), strict=True):
        read.append(left[label] > 0)
        left[label] -= count
    return read


def _number(value: Tensor) -> float | None:
    """A confidence or share as rows have it: None where it is undecided."""
    return float(value) if bool(value.isfinite()) else None
