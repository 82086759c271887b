"""Comparison of originals with the reconstruction of their own case, and with the reconstruction of another client's case.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attacker.attacks.learned.perceptual import Lpips
from attacker.reconstruction import Reconstruction
from attacker.replay.results import make_reconstruction_path
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.gallery import Gallery
from attacker.scoring.measures import clean_examples, measure, to_numbers
from attacker.scoring.semantic import NOT_ASKED, Tagger, tag_pairs
from attacker.scoring.states import CaseState, read_case
from fedsim.recording import DataSpec


@dataclass(frozen=True, kw_only=True)
class MeasuredReconstruction:
    """A reconstruction, assigned to the originals of its case and measured.

    reconstruction: after `keep_first`, which drops examples beyond the number that the originals may have.
    surplus: number of examples that were dropped.
    x: (M, *shape), the examples of `reconstruction` with 0 for NaN, clamped to [0, 1] except in one-hot columns.
    assigned: for each original, the index of its reconstruction in x, or None.
    fields: for each original, a dict of fields of its score row by name; None for an original without a reconstruction.
    """

    reconstruction: Reconstruction
    x: Tensor
    surplus: int
    assigned: tuple[int | None, ...]
    fields: tuple[Mapping[str, Any] | None, ...]


def compare_examples(
    reconstruction: Reconstruction,
    truth: Tensor,
    labels: Sequence[int],
    spec: DataSpec,
    *,
    lpips: Lpips | str,
    counts: Sequence[int] | None = None,
    gallery: Gallery | None = None,
    indices: Sequence[int] = (),
    tagger: Tagger | str = NOT_ASKED,
) -> MeasuredReconstruction:
    """Assign reconstructed examples to the originals and measure each pair.

    reconstruction: examples beyond the sum of `counts` are dropped, the attack's lowest ranked ones.
    truth: (N, *shape), the originals. labels: their N labels. spec: shape and columns of the data.
    lpips: the LPIPS model, or the reason why there is none.
    counts: for each original, the largest number of reconstructed examples that may be assigned to it; by default 1.
    gallery: random training examples for the measures of re-identification; without it these are left out. indices: data set
    indices of the originals, needed with a gallery.
    tagger: the classifier that gives tags to images, or the reason why there is none.
    """
    counts = counts or [1] * len(labels)
    surplus, reconstruction = max(0, len(reconstruction.x) - sum(counts)), keep_first(reconstruction, sum(counts))
    x = clean_examples(reconstruction.x, spec)
    assigned = assign_reconstructions(x.clamp(0, 1), truth, counts)
    label_successes = match_labels(labels, reconstruction.y.tolist(), counts)
    matched = [i for i, candidate in enumerate(assigned) if candidate is not None]
    chosen = [candidate for candidate in assigned if candidate is not None]
    measured = dict(zip(matched, measure(reconstruction.x[chosen], truth[matched], spec, lpips), strict=True))
    tags = dict(zip(matched, tag_pairs(tagger, x[chosen], truth[matched]), strict=True))
    nearest = None if gallery is None else gallery.compare(x.clamp(0, 1), truth, assigned, indices)
    confidence = to_numbers(reconstruction.confidence)
    explained = None if reconstruction.explained is None else to_numbers(reconstruction.explained)

    def make_fields(i: int, candidate: int | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        return {
            **measured[i],
            **tags[i],
            **({} if nearest is None else nearest[i]),
            "label_recovered": int(reconstruction.y[candidate]),
            "label_success": label_successes[i],
            "confidence": confidence[candidate],
            "explained": None if explained is None else explained[candidate],
        }

    return MeasuredReconstruction(
        reconstruction=reconstruction,
        x=x,
        surplus=surplus,
        assigned=tuple(assigned),
        fields=tuple(make_fields(i, candidate) for i, candidate in enumerate(assigned)),
    )


def match_labels(true: Sequence[int], recovered: Sequence[int], capacities: Sequence[int] | None = None) -> list[bool]:
    """Return, for each true label in turn, whether at least one equal recovered label is left.

    The i-th true label then uses up `places[i]` equal recovered labels, by default 1, or fewer if fewer are left. So labels are
    compared as multisets, since the order of recovered labels means nothing.
    """
    remaining = Counter(recovered)
    matched = []
    for label, count in zip(true, capacities or [1] * len(true), strict=True):
        matched.append(remaining[label] > 0)
        remaining[label] -= count
    return matched


def read_answer(folder: Path, key: str, truth: Tensor) -> tuple[Reconstruction | None, CaseState, str]:
    """Return a case's reconstruction, its state, and why there is no reconstruction ("" if there is one).

    A reconstruction counts as failed if its examples have another shape than the originals `truth` (N, *shape). Their number may
    differ from N. folder: folder of the attack's reconstructions.
    """
    answer, state, reason = read_case(folder, key)
    if answer is None or answer.x.shape[1:] == truth.shape[1:]:
        return answer, state, reason
    got, expected = tuple(answer.x.shape[1:]), tuple(truth.shape[1:])
    path = make_reconstruction_path(folder, key)
    return None, "failed", f"{path}: holds examples of shape {got}, but examples of this data set have shape {expected}"


def pair_clients(cases: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a dict from the key of each case to the key of a case of another client, if possible of the same round.

    Cases without an update, and cases for which there is no case of another client, are left out. The choice is not random: it is
    the next case of another client (of the same round, if there is one) in the order of `cases`, where the first case follows the
    last. cases: entries of `attack.json`.
    """
    complete = [case for case in cases if case["status"] == "complete"]
    partners = {}
    for i, case in enumerate(complete):
        others = [other for other in complete[i + 1 :] + complete[:i] if other["client"] != case["client"]]
        same_round = [other for other in others if other.get("round") == case.get("round")]
        if chosen := (same_round or others)[:1]:
            partners[case["key"]] = chosen[0]["key"]
    return partners


def compare_with_other(
    folder: Path,
    key: str | None,
    truth: Tensor,
    labels: Sequence[int],
    spec: DataSpec,
    counts: Sequence[int],
    constant: Tensor,
    lpips: Lpips | str,
) -> list[dict[str, Any]]:
    """Compare each original with what the attack reconstructed for another client; return a dict of scores for each original.

    The scores measure what the attack gets right without the update of this client. They are `other_success`, for images
    `other_psnr` and `other_lpips`, and for table rows `other_categorical_right`; those of the other kind are None. An original to
    which no example of the other client's reconstruction is assigned is not recovered, and has the other scores of the constant
    image or mean table row. This holds for all originals if the attack failed on the other client, or if its reconstruction
    cannot be read or has examples of another shape. All dicts are empty if the other case was not attacked yet.

    folder: folder of the attack's reconstructions. key: key of the other client's case, see `pair_clients`; None if there is
    none. truth: (N, *shape), the originals. labels: their N labels. counts: largest number of reconstructions that each original
    may have. constant: (N, *shape), the image of one colour, or the mean table row, see `Gallery.constant`. lpips: the LPIPS
    model, or the reason why there is none.
    """
    if key is None:
        return [{} for _ in labels]
    reconstruction, state, _ = read_answer(folder, key, truth)
    if state == "waiting":
        return [{} for _ in labels]
    failures = [_select_control({**fields, "success": False}) for fields in measure(constant, truth, spec, lpips)]
    if reconstruction is None or not len(reconstruction.x):
        return failures
    measured = compare_examples(reconstruction, truth, labels, spec, lpips=lpips, counts=counts)
    return [
        failure if fields is None else _select_control(fields) for fields, failure in zip(measured.fields, failures, strict=True)
    ]


def _select_control(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores in `fields` that are compared with another client, under the names that they have there."""
    return {f"other_{name}": fields.get(name) for name in ("success", "psnr", "lpips", "categorical_right")}
