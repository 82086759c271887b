"""Types of the answers of the API, from which its OpenAPI document is made.

Scores, originals and true labels are null where the service was given no truth.
"""

from typing import Any, Literal

from typing_extensions import TypedDict

from attacker.service.jobs.job import Job

Text = str | None
Number = float | None


class Data(TypedDict):
    shape: list[int]
    num_classes: int
    is_image: bool


class RecordingTold(TypedDict):
    """One recording. Fields from its manifest are null where that cannot be read; `trouble` says why."""

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
    """trouble: what lies below the root and cannot be served, in words. root: the folder that is watched, told while it holds
    no recording."""

    items: list[RecordingTold]
    next: Text
    trouble: list[str]
    root: Text


class ObservationTold(TypedDict):
    """What the server received from one client in one round.

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

    success: share of the `examples` recovered, which are distinct ones, of finished and scored cases; null where there are none.
    labels: share of their labels that were read; null where they were told.
    psnr: their mean in dB. scored: cases. waiting: those that the attack is at among them.
    outcome, verdict: of the comparison with the null, in a few words and in a sentence; null where there is none, as of a null.
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
    success: Number
    labels: Number
    psnr: Number
    confidence: Number
    outcome: Text
    verdict: Text


class AttacksOnRecording(TypedDict):
    items: list[AttackOnRecording]
    next: Text


CellState = Literal["none", "waiting", "running", "interrupted", "done", "failed"]


class Cell(TypedDict):
    """One client in one round. leak: what colours it, in [0, 1]: the share of examples recovered where that is scored, or else
    the attack's own confidence. attack: the one it is of. state: of the cases; none where nothing attacks it.
    null_success, null_psnr: of the attack's null on the same update; null where there is none."""

    client: str
    round: int
    status: str
    cases: list[str]
    attack: Text
    leak: Number
    success: Number
    psnr: Number
    null_success: Number
    null_psnr: Number
    confidence: Number
    state: CellState


class Grid(TypedDict):
    clients: list[str]
    rounds: list[int]
    cells: list[Cell]


class CaseTold(TypedDict):
    """One case of an attack. attack: its source. loss: the attack's own, at the end. reason: why there is no answer.
    null: whether the attack is a null.
    null_success, null_psnr: of the attack's null on the same case; null where there is none."""

    attack: str
    case: str
    client: str
    rounds: list[int]
    examples: int | None
    status: CellState
    route: Text
    iterations: int | None
    seconds: Number
    loss: Number
    confidence: Number
    success: Number
    psnr: Number
    null_success: Number
    null_psnr: Number
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
    """What the null of an attack made of the same example. values: by column; null for images."""

    image: Text
    values: dict[str, str] | None
    label: Text
    success: bool | None
    psnr: Number


class ExampleTold(TypedDict):
    """One example of a case: a reconstruction or, where the case is scored, a true example and the reconstruction assigned to it.

    image, original: addresses of PNG files; null for tables (`values` then), and where there is none.
    rounds: in which the attack says that it was. null: of the attack's null; null where there is none, as of a null itself.
    """

    n: int
    batch: int | None
    position: int | None
    rounds: list[int]
    label: Text
    confidence: Number
    image: Text
    values: list[ValueTold] | None
    original: Text
    label_true: Text
    success: bool | None
    psnr: Number
    ssim: Number
    lpips: Number
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
    seconds: Number
    loss: list[tuple[int, float]]
    confidence: Number
    success: Number
    psnr: Number
    null_success: Number
    null_psnr: Number
    reason: Text
    oracles: list[str]
    notes: list[str]
    spec: str
    null: bool


class ShownExample(TypedDict):
    """An example of a case, and which case that is. attack: its source."""

    attack: str
    case: str
    client: str
    rounds: list[int]
    example: ExampleTold


class Headline(TypedDict):
    """What the attacks on a recording come to.

    sentence: the verdict, as the report words it. attack: the `source` that it is of; null where nothing is scored.
    updates: that can be attacked, of which so many are `attacked`; absent: replies of clients that held none.
    cases, finished, failed: of all attacks together, nulls left out.
    psnr, null_psnr: means of the attack and of its null. examples: how many they are of.
    worst: the examples that the attack came nearest to, each distinct one once; of an attack that is not scored, those that it is
    surest of.
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
    psnr: Number
    null_psnr: Number
    worst: list[ShownExample]


class Leak(TypedDict):
    """Results of one attack in one round: share recovered and mean PSNR of its examples, null where not scored."""

    attack: str
    spec: str
    null: bool
    round: int
    examples: int
    success: Number
    psnr: Number
    confidence: Number


class Leakage(TypedDict):
    items: list[Leak]
    next: Text


class AttackKnown(TypedDict):
    """A registered attack. source: the paper. arguments: those that a job may set, with their defaults."""

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


class PreviewImage(TypedDict):
    round: int
    client: str
    batch: int
    position: int
    label: int
    image: str


class PreviewTold(TypedDict):
    """Preview of a running job: its best reconstructions so far, by the attack's own loss."""

    version: int
    iteration: int
    most: int
    loss: Number
    images: list[PreviewImage]


class Health(TypedDict):
    status: Literal["ok"]
    version: str
    token: bool


class Wrong(TypedDict):
    """message: what is wrong, and how to mend it.

    field: of the request, if one is wrong. known: values that it may have, if listed.
    """

    message: str
    field: Text
    known: list[str] | None


class Problem(TypedDict):
    error: Wrong
