"""The measured effect of a change of the defense: the same federation with another defense, audited again."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from attacker.audit.attack_findings import AuditedAttack, find_strongest_attack
from attacker.audit.findings import Grade
from fedsim.recording import DamagedFile, Recording
from fedsim.recording.round_metrics import read_metrics

RECOMMENDED = "recommended"
MAX_UPDATES = 16
"""Largest number of updates whose norms are measured for the recommended defense."""


@dataclass(frozen=True, kw_only=True)
class AuditOutcome:
    """Summary of an audit.

    grade:      the worst grade of the findings.
    examples:   number of distinct true examples that the strongest attack tried to reconstruct. recovered: how many of them it
                recovered. Both are 0 without the true examples.
    psnr:       mean PSNR of the strongest attack in dB; None for data that are not images, and without the true examples.
    accuracy:   test accuracy of the global model after the last round; None if it was not measured in that round.
    has_answer: whether an attack reconstructed at least one update.
    """

    grade: Grade
    recovered: int = 0
    examples: int = 0
    psnr: float | None = None
    accuracy: float | None = None
    has_answer: bool = True


@dataclass(frozen=True, kw_only=True)
class MeasuredChange:
    """A change of the defense, with the outcomes of the audits before and after it. change: the new defense, as text."""

    change: str
    before: AuditOutcome
    after: AuditOutcome


def name_changed_run(run: Path, change: str) -> Path:
    """Return the path of the folder for the same federation with the defense `change`; it lies beside the run."""
    return run.with_name(f"{run.name}-what-if-{hashlib.sha256(change.encode()).hexdigest()[:8]}")


def recommend_defense(recording: Recording) -> str:
    """Return a defense to try, as text: clipping to the median Euclidean norm of the updates, then Gaussian noise.

    The standard deviation of the noise is this norm divided by the square root of the number of coordinates, so that the norm of
    the noise on a whole update is about the median norm. The first `MAX_UPDATES` complete updates are measured.
    Raises ValueError if none of them can be read, or most are zero.
    """
    norms, size = [], 1
    for row in [row for row in recording.read_rows(on_damage=lambda error: None) if row.status == "complete"][:MAX_UPDATES]:
        try:
            update = recording.read_observation(row).update
        except DamagedFile:
            continue
        norms.append(sum(float(u.square().sum()) for u in update.values()) ** 0.5)
        size = sum(u.numel() for u in update.values())
    if not norms or median(norms) <= 0:
        raise ValueError(
            "no defense can be recommended, because the recording has no readable update, or most of its updates are all zeros; "
            "name a defense with --what-if DEFENSE"
        )
    norm = median(norms)
    return f"clip({norm:.2g}) | gaussian({norm / size**0.5:.2g})"


def describe_outcome(grade: Grade, attacks: tuple[AuditedAttack, ...], run: Path) -> AuditOutcome:
    """Return the summary of the audit of a run.

    grade, attacks: the results of the audit. Only attacks that were compared with the true examples count for `recovered`,
    `examples` and `psnr`; all attacks count for `has_answer`. run: folder of the run, whose metrics state the accuracy.
    """
    strongest = find_strongest_attack([attack for attack in attacks if attack.outcome])
    rows = read_metrics(run)
    accuracy = rows[-1].get("accuracy") if rows else None
    return AuditOutcome(
        grade=grade,
        recovered=strongest.recovered if strongest else 0,
        examples=strongest.examples if strongest else 0,
        psnr=strongest.psnr if strongest else None,
        accuracy=float(accuracy) if isinstance(accuracy, int | float) else None,
        has_answer=any(attack.has_answer for attack in attacks),
    )


def describe_change(change: MeasuredChange) -> str:
    """Return sentences that compare the audits before and after a change of the defense: grades, recovered examples, accuracy."""
    before, after = change.before, change.after
    condition = f"With {change.change}" if change.change else "Without a defense"
    text = f"{condition}, the verdict is {after.grade} instead of {before.grade}."
    if not (before.has_answer and after.has_answer):
        text += f" This is no comparison of attacks: {'after' if before.has_answer else 'before'} the change, none had an answer."
    if before.examples and after.examples:
        text += f" The strongest attack recovers {after.recovered} of {after.examples} examples"
        text += f" instead of {before.recovered} of {before.examples}."
    if before.accuracy is not None and after.accuracy is not None:
        text += f" The accuracy of this short run is {after.accuracy:.0%} instead of {before.accuracy:.0%}."
    return text
