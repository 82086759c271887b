"""Reconstructions without scores: of a recording without truth, or not scored yet."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacker.reconstruction import Reconstruction
from attacker.report.linked import rounds_of
from attacker.report.pairs import ExamplePair, alone
from attacker.scoring.states import read_reason
from fedsim.recording import DataSpec

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class UnscoredExample:
    """One reconstructed example, and what stands in the null's answer to the same case at the same place.

    rounds:     in which the attack says it was: one, but where it puts several together.
    number:     place in the case's answer, from 1: a gradient knows no order within a batch.
    loss:       the attack's own, at the end; None where it is no number. confidence: the attack's estimate
                of the probability that it is recovered; None where it is undecided.
    route, notes: how the answer came about, and what the attack says of it; of a case of several rounds `Linked` has that.
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
class Unscored:
    """found: the first of them, in the order of the recording; total: how many there are.

    failures: why cases have no reconstruction, and how many for each reason. problems: files that cannot be shown.
    """

    found: tuple[UnscoredExample, ...] = ()
    total: int = 0
    failures: tuple[tuple[str, int], ...] = ()
    problems: tuple[str, ...] = ()


def unscored(folder: Path, told: Record, scored: set[str], data: DataSpec, *, null: Path | None, most: int) -> Unscored:
    """What an attack found in cases without a row of scores.

    folder: of its reconstructions, and null: of its null's, if any. told: its attack.json. scored: keys of cases with rows.
    """
    found: list[UnscoredExample] = []
    problems: list[str] = []
    failures: Counter[str] = Counter()
    total = 0
    for case in told["cases"]:
        path = folder / f"{case['key']}.safetensors"
        if case["key"] in scored:
            continue
        if not path.is_file():
            failures.update(_failure(folder / f"{case['key']}.failed.json"))
            continue
        try:
            answer = _read(path, data)
        except ValueError as error:
            problems.append(f"{error}; it is not shown.")
            continue
        total += len(answer.x)
        if len(found) < most:
            beside = _beside(null, case, data)
            found += [_found(answer, case, i, data, beside.get(i)) for i in range(min(len(answer.x), most - len(found)))]
    return Unscored(tuple(found), total, tuple(failures.most_common()), tuple(problems))


def _failure(path: Path) -> list[str]:
    """Why a case failed, where it did."""
    return [read_reason(path)] if os.path.lexists(path) else []


def _beside(null: Path | None, case: Mapping[str, Any], data: DataSpec) -> dict[int, UnscoredExample]:
    """The null's answer to a case, by place; nothing where there is none that can be read."""
    try:
        answer = _read(null / f"{case['key']}.safetensors", data) if null else None
    except ValueError:
        return {}
    return {i: _found(answer, case, i, data) for i in range(len(answer.x))} if answer else {}


def _read(path: Path, data: DataSpec) -> Reconstruction:
    answer = Reconstruction.read(path)
    if answer.x.shape[1:] != data.shape or not answer.x.shape[:1] == answer.y.shape == answer.confidence.shape:
        raise ValueError(f"{path}: not examples of shape {data.shape} with their labels, but of {tuple(answer.x.shape)}")
    return answer


def _found(
    answer: Reconstruction, case: Mapping[str, Any], i: int, data: DataSpec, null: UnscoredExample | None = None
) -> UnscoredExample:
    last = answer.loss[-1:]
    return UnscoredExample(
        case=str(case["key"]),
        rounds=rounds_of(answer).get(i) or (int(case["round"]),),
        client=str(case["client"]),
        number=i + 1,
        label=int(answer.y[i]),
        loss=float(last) if bool(torch.isfinite(last).any()) else None,
        confidence=float(answer.confidence[i]) if bool(answer.confidence[i].isfinite()) else None,
        route=answer.route,
        notes=() if "rounds" in case else answer.notes,
        shown=alone(answer.x[i], data),
        null=null,
    )
