"""Types of the API's responses, from which its OpenAPI document is made.

Scores, originals and true labels are null if the service was given no truth (which examples each client trained on).

A case is the observations that are attacked together: one round of a client, or several. A null is the same attack without the
client's update, for comparison: it reconstructs what its prior alone gives.
"""

from typing import Any, Literal

from typing_extensions import TypedDict

from attacker.service.jobs.job import Job

Text = str | None
OptionalFloat = float | None


class Data(TypedDict):
    shape: list[int]
    num_classes: int
    is_image: bool


class RecordingTold(TypedDict):
    """One recording. If its manifest cannot be read, fields from it are null, `name` is the id, and `trouble` states the reason.

    truth: whether the service was given a record of which examples each client trained on, without which nothing is scored.
    rounds, clients, observations: how many of each were recorded. updated: when the last observation was recorded, UTC.
    trouble: messages about damaged files.
    """

    id: str
    name: str
    model: Text
    data: Data | None
    defense: Text
    gradient: Text
    network: Text
    inputs: Text
    secure_aggregation: dict[str, Any] | bool | None
    training: dict[str, Any] | None
    rounds: int
    last_round: int | None
    clients: int
    observations: int
    updated: Text
    truth: bool
    trouble: list[str]


class Recordings(TypedDict):
    """A page of the list of recordings.

    next: value of `after` for the next page; null on the last one. trouble: messages about folders below the root that cannot be
    served. root: path of the folder in which the service looks for recordings if it has found none; else null.
    """

    items: list[RecordingTold]
    next: Text
    trouble: list[str]
    root: Text


class ObservationTold(TypedDict):
    """What the server received from one client in one round.

    client: name of the client; "sum" for the sum over the clients of a round under secure aggregation.
    status: "complete" if the server received an update, "masked" if it received the update only as part of the round's sum,
            "failed" if the client sent an error or a malformed message, or if the round's sum could not be computed, "late" if an
            answer did not come in time.
    num_examples: number of distinct examples behind the update, derived from what the client reported; null if unknown.
    bytes:  size of the client's reply. time: when the reply, or that there was none, was recorded, UTC.
    reason: why the client failed or was late, also if it failed after its update had entered the sum; for a sum, why there is
            none; else empty.
    """

    round: int
    client: str
    status: str
    num_examples: int | None
    bytes: int
    time: Text
    reason: str


class Observations(TypedDict):
    items: list[ObservationTold]
    next: Text


class TrainingRows(TypedDict):
    """Rows of metrics.jsonl, the server's log of each round.

    A row is an object with the number of the round and, where they are known, the loss and accuracy on held-out data, the bytes
    that clients sent and received, and further values.
    """

    items: list[dict[str, Any]]
    next: Text


class AttackOnRecording(TypedDict):
    """Results of an attack on a recording.

    source: name of the folder with these results. null: whether the attack is a null (the same attack without the update).
    oracles: names of information that the attack was given although no server has it, such as "labels". withheld: names of
    information that the server has and the attack was not given, such as "client names".
    cases: number of cases with an update to attack. waiting: number of these cases that are being attacked or have no result yet.
    scored: number of cases that had finished (by a reconstruction or by failing) when they were scored.
    examples: number of distinct examples in scored cases. success: share of these examples that was recovered. labels: share of
    these examples whose label was recovered; null also if the labels were given. psnr: mean PSNR in dB of the examples whose PSNR
    is known.
    confidence: the attack's own estimate of the share of examples recovered, in [0, 1], as mean over its reconstructed cases.
    outcome, verdict: comparison with the null, in a few words and as text; null for an attack without scores, and for a null.
    """

    source: str
    attack: str
    spec: str
    seed: int
    null: bool
    oracles: list[str]
    withheld: list[str]
    knows_defense: bool
    cases: int
    done: int
    failed: int
    interrupted: int
    waiting: int
    scored: int
    examples: int
    success: OptionalFloat
    labels: OptionalFloat
    psnr: OptionalFloat
    confidence: OptionalFloat
    outcome: Text
    verdict: Text


class AttacksOnRecording(TypedDict):
    items: list[AttackOnRecording]
    next: Text


CellState = Literal["none", "waiting", "running", "interrupted", "done", "failed"]


class GridCell(TypedDict):
    """One client in one round, with the attack that has the highest leak there.

    leak: in [0, 1], shown as the colour of the cell: the share of examples recovered if scored, else the attack's own confidence,
    else null.
    attack: folder name of the attack with the highest leak, to which the numbers belong. cases: keys of this attack's cases that
    use the update of this client in this round.
    state: the first of "running", "waiting", "interrupted", "failed" and "done" that is the state of a case that uses the
    update; "none" if there is no case that can be attacked. The cases of all attacks count or, if the request names an attack,
    only its cases.
    null_success, null_psnr: scores of the attack's null (the same attack without the update); null if there are none.
    """

    client: str
    round: int
    status: str
    cases: list[str]
    attack: Text
    leak: OptionalFloat
    success: OptionalFloat
    psnr: OptionalFloat
    null_success: OptionalFloat
    null_psnr: OptionalFloat
    confidence: OptionalFloat
    state: CellState


class Grid(TypedDict):
    clients: list[str]
    rounds: list[int]
    cells: list[GridCell]


class CaseTold(TypedDict):
    """One case of an attack.

    attack: name of the folder with the attack's results. null: whether the attack is a null (the same attack without the update).
    examples: number of reconstructed examples or, without a reconstruction, the number of examples behind the case's updates,
    derived from what the clients reported or estimated; null if it is not known.
    route: name of the method that reconstructed the case. loss: the attack's own final loss.
    reason: why there is no finished reconstruction, if known.
    null_success, null_psnr: scores of the attack's null on the same case; null if there are none.
    """

    attack: str
    case: str
    client: str
    rounds: list[int]
    examples: int | None
    status: CellState
    route: Text
    iterations: int | None
    seconds: OptionalFloat
    loss: OptionalFloat
    confidence: OptionalFloat
    success: OptionalFloat
    psnr: OptionalFloat
    null_success: OptionalFloat
    null_psnr: OptionalFloat
    reason: Text
    null: bool


class Cases(TypedDict):
    items: list[CaseTold]
    next: Text


class ValueTold(TypedDict):
    """One variable of a table row, in its own unit, as text.

    original: the true value; null if it is not known, as without truth. right: whether the reconstructed value counts as correct:
    a number within a tolerance, or the same category; null if this cannot be told.
    """

    column: str
    reconstruction: str
    original: Text
    right: bool | None


class NullTold(TypedDict):
    """What the attack's null, the same attack without the client's update, reconstructed for comparison with an example.

    If the case is scored, it is the null's reconstruction of the same example; otherwise it is the null's example with the same
    index, which need not be of the same original.
    image: address of a PNG file; null if there is none. values: values of a table row by variable; null for images, and if there
    is no reconstruction.
    """

    image: Text
    values: dict[str, str] | None
    label: Text
    success: bool | None
    psnr: OptionalFloat


class ExampleTold(TypedDict):
    """One example of a case: a reconstruction or, if the case is scored, a true example with the reconstruction assigned to it.

    n: index in the list of the case's true examples or, if the case is not scored, of its reconstructed examples; from 0.
    image, original: addresses of PNG files; null if there is no picture, as for tables, which have `values`.
    label, label_true: names of the recovered and the true class. If the case is not scored, `label` is the number of the class as
    text, and `label_true` is null.
    batch, position: local step, from 1, and place in its batch, from 0, in which the example was used first; if the case is not
    scored, as the attack assigns them.
    rounds: rounds of the case in which the example was used; if the case is not scored, the rounds to which the attack assigns
    it.
    failure: why there is no reconstruction of a true example; else null.
    null: what the attack's null reconstructed for comparison, see `NullTold`; null if there is no null to compare with, or if it
    has no entry for this example. The entry of a scored case has neither an image nor values if the null has no reconstruction of
    the example.
    """

    n: int
    batch: int | None
    position: int | None
    rounds: list[int]
    label: Text
    confidence: OptionalFloat
    image: Text
    values: list[ValueTold] | None
    original: Text
    label_true: Text
    success: bool | None
    psnr: OptionalFloat
    ssim: OptionalFloat
    lpips: OptionalFloat
    failure: Text
    null: NullTold | None


class CaseWhole(TypedDict):
    """A case with its examples. loss: curve of the attack's own loss, at most 200 pairs of iteration, from 1, and loss."""

    attack: str
    case: str
    client: str
    rounds: list[int]
    examples: list[ExampleTold]
    status: CellState
    route: Text
    iterations: int | None
    seconds: OptionalFloat
    loss: list[tuple[int, float]]
    confidence: OptionalFloat
    success: OptionalFloat
    psnr: OptionalFloat
    null_success: OptionalFloat
    null_psnr: OptionalFloat
    reason: Text
    oracles: list[str]
    notes: list[str]
    spec: str
    null: bool


class ShownExample(TypedDict):
    """An example, with the attack and case that it is from. attack: name of the folder with the attack's results."""

    attack: str
    case: str
    client: str
    rounds: list[int]
    example: ExampleTold


class Headline(TypedDict):
    """The conclusion from all attacks on a recording.

    sentence: the verdict on the strongest attack, as in the report, or why there is none. attack: name of the folder with the
    results of this attack; null if there is no verdict.
    updates: number of recorded updates that can be attacked, sums of secure aggregation included. attacked: number of these
    updates that some attack has finished with, by a reconstruction or by failing. absent: how often a client that was asked for
    an update failed or was late.
    cases, finished, failed: numbers of cases with an update, over all attacks but not their nulls; failed cases count as
    finished.
    examples: number of distinct scored examples in finished cases of `attack`. psnr: mean PSNR in dB of those examples whose PSNR
    is known. null_psnr: mean PSNR in dB of the reconstructions by the attack's null.
    worst: the examples that leaked worst: at most 6 distinct examples that one attack reconstructed best. This attack is `attack`
    or, if that is null, the first attack with a reconstruction. If this attack has no scores, `worst` has the first example of
    each of the at most 6 of its cases that have the highest confidence.
    """

    sentence: str
    outcome: Text
    attack: Text
    spec: Text
    updates: int
    attacked: int
    absent: int
    attacks: int
    cases: int
    finished: int
    failed: int
    examples: int
    psnr: OptionalFloat
    null_psnr: OptionalFloat
    worst: list[ShownExample]


class Leak(TypedDict):
    """Results of one attack in one round, over its finished cases (done or failed).

    A case of several rounds counts in each of them. success: share of distinct examples that was recovered; null if nothing is
    scored.
    psnr: mean PSNR in dB of the distinct examples; null if it is not known. examples: number of scored examples of the round; an
    example in several cases counts several times here. Without scores, it is the number of reconstructed examples of these cases.
    confidence: the attack's own estimate of the share recovered, in [0, 1], with 0 for failed cases.
    """

    attack: str
    spec: str
    null: bool
    round: int
    examples: int
    success: OptionalFloat
    psnr: OptionalFloat
    confidence: OptionalFloat


class Leakage(TypedDict):
    items: list[Leak]
    next: Text


class AttackKnown(TypedDict):
    """A registered attack. source: the publication that it is from, or empty.

    arguments: dict from an argument's name to its default, for the arguments that a job may set.
    needs: names of conditions that a case must meet, in lower case, such as "single_example" for an update of one example, see
    `attacker.attacks.base.Need`.
    """

    name: str
    summary: str
    needs: list[str]
    source: str
    arguments: dict[str, Any]


class AttacksKnown(TypedDict):
    items: list[AttackKnown]
    next: Text


class Jobs(TypedDict):
    items: list[Job]
    next: Text


class FindingTold(TypedDict):
    """A finding of an audit: something that leaks, or a setting that is wrong.

    rule: identifier of the check that found it. grade: how bad it is: "low", "moderate", "serious" or "severe". title: the
    finding as one sentence. evidence: what was measured. advice: what to change.
    """

    rule: str
    grade: str
    title: str
    evidence: str
    advice: str


class AuditTold(TypedDict):
    """The verdict of an audit: the grade of its worst finding, and all findings, the worst first.

    grade: "none found", "low", "moderate", "serious" or "severe". scored: whether reconstructions were compared with the true
    examples. seconds: time that the audit took. passed: number of results of checks that found nothing. not_checked: number of
    checks and attacks that were not made, or decided nothing. page: address of an HTML page with the whole verdict.
    """

    grade: str
    scored: bool
    seconds: float
    findings: list[FindingTold]
    passed: int
    not_checked: int
    page: str


class PreviewImage(TypedDict):
    round: int
    client: str
    batch: int
    position: int
    label: int
    image: str


class PreviewTold(TypedDict):
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
    loss: OptionalFloat
    images: list[PreviewImage]


class Health(TypedDict):
    status: Literal["ok"]
    version: str
    token: bool


class Wrong(TypedDict):
    """The error in a response. message: what is wrong, where possible with a remedy.

    field: the wrong field of the request; null if the error is not in one field. known: the allowed values of this field; null if
    they cannot be listed.
    """

    message: str
    field: Text
    known: list[str] | None


class Problem(TypedDict):
    error: Wrong
