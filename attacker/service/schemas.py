"""Types of the API's responses, from which its OpenAPI document is made.

Scores, originals and true labels are null if the service was given no truth.

A case is the observations that are attacked together: one round of a client, or several.
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
    """One recording. Fields from its manifest are null if that cannot be read; `trouble` then states the reason."""

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

    trouble: messages about folders below the root that cannot be served. root: the watched folder, given if it has no recording.
    """

    items: list[RecordingTold]
    next: Text
    trouble: list[str]
    root: Text


class ObservationTold(TypedDict):
    """The message that the server received from one client in one round.

    status: complete, masked (seen only within a secure sum), failed or late.
    time:   when the server received the client's reply, UTC.
    reason: why there is no usable reply; empty if there is one.
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
    """Rows of metrics.jsonl: round, loss, accuracy, bytes, and further values that the server logged."""

    items: list[dict[str, Any]]
    next: Text


class AttackOnRecording(TypedDict):
    """Results of an attack on a recording.

    source: name of the folder with these results.
    examples: number of distinct examples in finished and scored cases. success: share of them that was recovered, or null.
    labels: share of their labels that was recovered; null if an oracle supplied the labels. psnr: their mean PSNR in dB.
    scored: number of scored cases. waiting: number of waiting cases, including those that are being attacked.
    outcome, verdict: comparison with the null, in a few words and as a sentence; null if there is none, and for a null.
    """

    source: str
    attack: str
    spec: str
    seed: int
    null: bool
    oracles: list[str]
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
    """One client in one round.

    leak: in [0, 1], the colour of the cell: the share of examples recovered if scored, otherwise the attack's own confidence.
    attack: folder name of the attack with this leak. cases: keys of its cases that use the observation. state: of the states of
    such cases of all attacks shown, the last in the order done, failed, interrupted, waiting, running; "none" if there are none.
    null_success, null_psnr: scores of the attack's null on the same update; null if there are none.
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

    attack: name of the folder with the attack's results. null: whether it is a null. loss: the attack's own final loss. reason:
    why there is no reconstruction. null_success, null_psnr: scores of the attack's null on the same case; null if there are none.
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
    """One variable of a table row, in its own unit. right: whether it counts as recovered; null without truth."""

    column: str
    reconstruction: str
    original: Text
    right: bool | None


class NullTold(TypedDict):
    """The null's reconstruction of the same example. values: by column; null for images."""

    image: Text
    values: dict[str, str] | None
    label: Text
    success: bool | None
    psnr: OptionalFloat


class ExampleTold(TypedDict):
    """One example of a case: a reconstruction or, if the case is scored, a true example with the reconstruction assigned to it.

    n: index of the true example in the case or, if the case is not scored, of the reconstructed example; from 0.
    image, original: addresses of PNG files; null if there is no picture, as for tables, which have `values`.
    rounds: rounds to which the attack assigns the example. null: the null's reconstruction of it, or null.
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
    """A case with its examples. loss: at most 200 pairs of iteration and loss."""

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
    """An example with the case that it belongs to. attack: name of the folder with the attack's results."""

    attack: str
    case: str
    client: str
    rounds: list[int]
    example: ExampleTold


class Headline(TypedDict):
    """The conclusion from all attacks on a recording.

    sentence: the verdict, as in the report. attack: name of the folder with the results of the attack that it is about; null if
    nothing is scored.
    updates: number of updates that can be attacked. attacked: how many of them were. absent: number of replies without an update.
    cases, finished, failed: numbers over all attacks, nulls excluded.
    psnr, null_psnr: means of the attack and of its null, over `examples` examples.
    worst: the examples that the attack reconstructed best, each distinct one once; without scores, those of highest confidence.
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
    """Results of one attack in one round: share recovered and mean PSNR of its examples, null if not scored."""

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
    """A registered attack. source: the paper that it is from. arguments: those that a job may set, with their defaults.

    needs: names of conditions that a case must meet, such as "single_example", see `attacker.attacks.base.Need`.
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
    """A finding of an audit, see `attacker.audit.Finding`."""

    rule: str
    grade: str
    title: str
    evidence: str
    advice: str


class AuditTold(TypedDict):
    """The verdict of an audit: the grade of its worst finding, and all findings, the worst first.

    passed, not_checked: numbers of checks and attacks that found nothing, and of those that were not made.
    page: address of the whole verdict as a page.
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
    """Preview of a running job: its best reconstructions so far, by the attack's own loss.

    version: increases with each preview. iteration: current iteration of the search within one restart. most: maximum of these.
    loss: median over the searches that run together.
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
    """The error in a response. message: what is wrong, and how to correct it.

    field: the wrong field of the request, if any. known: its allowed values, if they can be listed.
    """

    message: str
    field: Text
    known: list[str] | None


class Problem(TypedDict):
    error: Wrong
