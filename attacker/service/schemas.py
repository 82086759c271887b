"""What the API answers, field by field: the OpenAPI document is made of these.

Scores, originals and true labels are null everywhere where the service was given no truth.
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
    """One recording. What its manifest says is null where that cannot be read; `trouble` says why."""

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
    """trouble: what lies below the root and cannot be served, in words."""

    items: list[RecordingTold]
    next: Text
    trouble: list[str]


class ObservationTold(TypedDict):
    """status: complete, masked, failed or late. time: when the reply came, UTC."""

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
    """Rows of metrics.jsonl: round, loss, accuracy, bytes and what else the server wrote down."""

    items: list[dict[str, Any]]
    next: Text


class AttackOnRecording(TypedDict):
    """An attack on a recording. cases: that hold an update, of which so many are done, failed, interrupted and waiting.

    success: share of the `examples` recovered, which are distinct ones, of finished and scored cases; null where there are none.
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
    the attack's own confidence. attack: the one it is of. state: of the cases; none where nothing attacks it."""

    client: str
    round: int
    status: str
    cases: list[str]
    attack: Text
    leak: Number
    success: Number
    psnr: Number
    confidence: Number
    state: CellState


class Grid(TypedDict):
    clients: list[str]
    rounds: list[int]
    cells: list[Cell]


class CaseTold(TypedDict):
    """One case of an attack. attack: its source. loss: the attack's own, at the end. reason: why there is no answer."""

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
    reason: Text


class Cases(TypedDict):
    items: list[CaseTold]
    next: Text


class ValueTold(TypedDict):
    """One variable of a table row, in its own unit. right: whether it counts as right; null where nobody can tell."""

    column: str
    reconstruction: str
    original: Text
    right: bool | None


class ExampleTold(TypedDict):
    """One example of a case: each reconstruction, or, where it is scored, each true example and what was assigned to it.

    image, original: addresses of PNG files; null for tables (`values` then), and where there is none.
    rounds: in which the attack says that it was.
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


class CaseWhole(TypedDict):
    """A case with its examples. loss: its curve, pairs of iteration and value, at most 200 of them."""

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
    reason: Text
    oracles: list[str]
    notes: list[str]
    spec: str
    null: bool


class Leak(TypedDict):
    """One attack in one round: the share recovered and the mean PSNR of its examples, where that is scored."""

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
    """An attack by name. source: the paper. arguments: those that a job may set, with their defaults."""

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
    """What a running job has so far; images of its best answer yet, by its own loss."""

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
    """message: what is wrong, and the mend. field: of the request, if it is one. known: what it may be, if that is a list."""

    message: str
    field: Text
    known: list[str] | None


class Problem(TypedDict):
    error: Wrong
