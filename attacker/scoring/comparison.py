"""Comparison of one case's reconstruction with its originals: assignment and measures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.gallery import Gallery
from attacker.scoring.measures import clean_examples, measure
from attacker.scoring.perceptual import Lpips
from fedsim.recording import DataSpec


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A reconstruction, assigned to the originals of its case and measured.

    found: the reconstruction without surplus candidates. x: (M, *shape), its examples cleaned by `clean_examples`. surplus:
    number of candidates that were dropped.
    assigned: for each original, the index of its reconstruction in x, or None.
    fields: for each original with a reconstruction, the fields of its score row by name; None for the others.
    """

    found: Reconstruction
    x: Tensor
    surplus: int
    assigned: tuple[int | None, ...]
    fields: tuple[Mapping[str, Any] | None, ...]


def compare_examples(
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
    """Assign reconstructed examples to the originals and measure each pair.

    truth: (N, *shape), the originals. labels: (N,). lpips: the LPIPS model, or the reason why there is none. counts: number of
    candidates that each original may have, by default one. gallery: other examples, for re-identification. indices: of the
    originals in the data set, needed with a gallery.
    """
    counts = counts or [1] * len(labels)
    surplus, found = max(0, len(found.x) - sum(counts)), keep_first(found, sum(counts))
    x = clean_examples(found.x, spec)
    assigned = assign_reconstructions(x.clamp(0, 1), truth, counts)
    read = match_labels(labels, found.y.tolist(), counts)
    matched = [i for i, candidate in enumerate(assigned) if candidate is not None]
    chosen = [candidate for candidate in assigned if candidate is not None]
    measured = dict(zip(matched, measure(found.x[chosen], truth[matched], spec, lpips), strict=True))
    nearest = None if gallery is None else gallery.compare(x.clamp(0, 1), truth, assigned, indices)

    def make_fields(i: int, candidate: int | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        return {
            **measured[i],
            **({} if nearest is None else nearest[i]),
            "label_recovered": int(found.y[candidate]),
            "label_success": read[i],
            "confidence": _to_number(found.confidence[candidate]),
            "explained": None if found.explained is None else _to_number(found.explained[candidate]),
        }

    return Compared(
        found=found,
        x=x,
        surplus=surplus,
        assigned=tuple(assigned),
        fields=tuple(make_fields(i, candidate) for i, candidate in enumerate(assigned)),
    )


def match_labels(true: Sequence[int], recovered: Sequence[int], places: Sequence[int] | None = None) -> list[bool]:
    """Return, for each true label, whether it is among the recovered labels; each recovered label is used up by one match.

    Labels are compared as multisets, since a gradient does not determine which image has which label. places: how many recovered
    labels each true label uses up, by default one.
    """
    left = Counter(recovered)
    read = []
    for label, count in zip(true, places or [1] * len(true), strict=True):
        read.append(left[label] > 0)
        left[label] -= count
    return read


def _to_number(value: Tensor) -> float | None:
    """Convert a confidence or share to a float, with None for NaN (undecided)."""
    return float(value) if bool(value.isfinite()) else None
