"""Types of responses about jobs: their list, previews of running ones, and verdicts of audits."""

from typing_extensions import TypedDict


class PreviewImage(TypedDict):
    round: int
    client: str
    batch: int
    position: int
    label: int
    image: str


class JobPreview(TypedDict):
    """Preview of a running job: intermediate images of searches, each the best of its restart so far by the attack's own loss.

    version: number of the preview. It increases with every preview of a job, also when the next attack, null (attack without the
    update) or attempt of the job begins.
    iteration: current iteration of the search within one restart. most: maximum number of iterations of a restart, as set for the
    attack. loss: median of the attack's loss over the cases that are searched together; null if it is not finite. images: at most
    48 images, the most recently changed.
    """

    version: int
    iteration: int
    most: int
    loss: float | None
    images: list[PreviewImage]


class AuditFinding(TypedDict):
    """A finding of an audit: something that leaks, or a setting that is wrong.

    rule: identifier of the check that found it. grade: how bad it is: "low", "moderate", "serious" or "severe". title: the
    finding as one sentence. evidence: what was measured. advice: what to change.
    """

    rule: str
    grade: str
    title: str
    evidence: str
    advice: str


class AuditVerdict(TypedDict):
    """The verdict of an audit: the grade of its worst finding, and all findings, the worst first.

    grade: "none found", "low", "moderate", "serious" or "severe". scored: whether reconstructions were compared with the true
    examples. seconds: time that the audit took. passed: number of results of checks that found nothing. not_checked: number of
    checks and attacks that were not made, or decided nothing. page: address of an HTML page with the whole verdict.
    """

    grade: str
    scored: bool
    seconds: float
    findings: list[AuditFinding]
    passed: int
    not_checked: int
    page: str
