"""Reconstructions without scores, since there is no truth (the clients' examples) or they were not scored yet."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacker.attacks.confidence import MIN_LIKELY
from attacker.reconstruction import Reconstruction
from attacker.replay.results import make_failure_path, make_reconstruction_path
from attacker.report.hints import Record
from attacker.report.pairs import ExamplePair, show_alone
from attacker.scoring.states import read_reason
from fedsim.recording import DataSpec


@dataclass(frozen=True, kw_only=True)
class UnscoredExample:
    """One reconstructed example without scores.

    rounds:     rounds to which the attack assigns it: one, unless the attack combines several.
    number:     its number in the reconstruction, from 1; the order of examples within a batch has no meaning.
    loss:       the attack's own loss at the end of the case; None if it is not finite or there is none. confidence: the attack's
                estimate of the probability that the example is recovered; None if there is none.
    route:      method that found the reconstruction. notes: the attack's notes on the case, at its first example; empty for cases
                of several rounds, whose notes are in `attacker.report.linked_cases.LinkedCase`.
    shown:      the reconstruction as an image or table row, or why it cannot be shown.
    null:       the example with the same number that the null returns for the case, or None.
    """

    case: str
    rounds: tuple[int, ...]
    client: str
    number: int
    label: int
    loss: float | None
    confidence: float | None
    route: str
    notes: tuple[str, ...]
    shown: ExamplePair
    null: "UnscoredExample | None" = None


@dataclass(frozen=True)
class UnscoredResults:
    """The reconstructed examples of one attack in cases without scores.

    found:    the first of these examples, in the order of attack.json. total: number of all of them. likely: number of those
              whose confidence is at least `MIN_LIKELY`.
    failures: pairs of a reason why cases have no reconstruction and the number of cases, most frequent first.
    problems: sentences on files that cannot be shown.
    """

    found: tuple[UnscoredExample, ...] = ()
    total: int = 0
    likely: int = 0
    failures: tuple[tuple[str, int], ...] = ()
    problems: tuple[str, ...] = ()


def collect_unscored(
    folder: Path, metadata: Record, scored: set[str], data: DataSpec, *, null: Path | None, limit: int
) -> UnscoredResults:
    """Return the reconstructions of an attack for its cases without scores.

    folder: folder of its reconstructions. metadata: content of its attack.json. scored: keys of the cases to leave out, such as
    those with scores. null: folder of its null's reconstructions, or None. limit: maximum number of examples in
    `UnscoredResults.found`.
    """
    examples: list[UnscoredExample] = []
    problems: list[str] = []
    failures: Counter[str] = Counter()
    total, likely = 0, 0
    for case in metadata["cases"]:
        path = make_reconstruction_path(folder, case["key"])
        if case["key"] in scored:
            continue
        if not path.is_file():
            failure = make_failure_path(folder, case["key"])
            failures.update([read_reason(failure)] if os.path.lexists(failure) else [])
            continue
        try:
            answer = _read(path, data)
        except ValueError as error:
            problems.append(f"{error}; it is not shown.")
            continue
        total += len(answer.x)
        likely += int((answer.confidence >= MIN_LIKELY).sum())
        if len(examples) < limit:
            beside = _read_null_examples(null, case, data)
            examples += [
                _make_example(answer, case, i, data, beside.get(i)) for i in range(min(len(answer.x), limit - len(examples)))
            ]
    return UnscoredResults(tuple(examples), total, likely, tuple(failures.most_common()), tuple(problems))


def _read_null_examples(null: Path | None, case: Mapping[str, Any], data: DataSpec) -> dict[int, UnscoredExample]:
    """Return the examples that the null reconstructed for a case, by their index from 0; {} if there are none to be read.

    null: folder of the null's reconstructions; None if the null was not run. case: entry of the case in attack.json.
    """
    try:
        answer = _read(make_reconstruction_path(null, case["key"]), data) if null else None
    except ValueError:
        return {}
    return {i: _make_example(answer, case, i, data) for i in range(len(answer.x))} if answer else {}


def _read(path: Path, data: DataSpec) -> Reconstruction:
    answer = Reconstruction.read(path)
    if answer.x.shape[1:] != data.shape:
        raise ValueError(
            f"{path} must hold examples of shape {data.shape}, got {tuple(answer.x.shape[1:])}; delete it and replay the attack "
            "again"
        )
    return answer


def _make_example(
    answer: Reconstruction, case: Mapping[str, Any], i: int, data: DataSpec, null: UnscoredExample | None = None
) -> UnscoredExample:
    last = answer.loss[-1:]
    return UnscoredExample(
        case=str(case["key"]),
        rounds=tuple(sorted(answer.list_rounds()[i])) or (int(case["round"]),),
        client=str(case["client"]),
        number=i + 1,
        label=int(answer.y[i]),
        loss=float(last) if bool(torch.isfinite(last).any()) else None,
        confidence=float(answer.confidence[i]) if bool(answer.confidence[i].isfinite()) else None,
        route=answer.route,
        notes=() if "rounds" in case or i else answer.notes,
        shown=show_alone(answer.x[i], data),
        null=null,
    )
