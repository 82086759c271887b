"""The results of the checks of an audit: findings with grades, passed checks, and checks not made."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Grade = Literal["none found", "low", "moderate", "serious", "severe"]
"""Grades from the best to the worst. docs/audit.md defines each by a rule that can be measured."""
GRADES: tuple[Grade, ...] = get_args(Grade)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem that an audit found.

    rule:     identifier of the check, such as "noise-reused", which does not change between versions.
    grade:    how bad it is, one of `GRADES`.
    title:    one sentence on what leaks, or which setting is wrong.
    evidence: what was measured, with numbers and, for many checks, the rounds and clients concerned.
    advice:   what to change, as sentences.
    picture:  path of a picture (PNG) or table row (JSON) that shows the finding, relative to the run; "" if there is none.
    """

    rule: str
    grade: Grade
    title: str
    evidence: str
    advice: str
    picture: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a dict that can be written as JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PassedCheck:
    """A check that was made and found nothing. rule: identifier of the check. evidence: what was measured."""

    rule: str
    evidence: str


@dataclass(frozen=True, kw_only=True)
class NotChecked:
    """A check or an attack that was not made, or that decided nothing.

    rule:   identifier of the check. reason: why, as text without a full stop.
    kind:   "does not apply": this run has nothing that the check could test. "needs information": something was not given.
            "left out": the check applies, but time or a method was missing. "inconclusive": the check was made, and shows neither
            a fault nor that there is none. "no guarantee": the run promises nothing, or hardly anything, that could be checked,
            or records only part of what the server receives.
    """

    rule: str
    reason: str
    kind: Literal["does not apply", "needs information", "left out", "inconclusive", "no guarantee"] = "does not apply"


CheckResult = Finding | PassedCheck | NotChecked


def order(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, the worst first; findings of one grade stay in their order."""
    return sorted(findings, key=lambda finding: -GRADES.index(finding.grade))


def find_worst_grade(findings: Sequence[Finding]) -> Grade:
    """Return the most severe grade of the findings, or "none found" if there are no findings."""
    return max((finding.grade for finding in findings), key=GRADES.index, default="none found")
