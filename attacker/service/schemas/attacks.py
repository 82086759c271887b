"""Types of responses about attacks: registered ones, and the results of attacks on a recording."""

from typing import Any, Literal

from typing_extensions import TypedDict

CellState = Literal["none", "waiting", "running", "interrupted", "done", "failed"]


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
    success: float | None
    labels: float | None
    psnr: float | None
    confidence: float | None
    outcome: str | None
    verdict: str | None


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
    attack: str | None
    leak: float | None
    success: float | None
    psnr: float | None
    null_success: float | None
    null_psnr: float | None
    confidence: float | None
    state: CellState


class Grid(TypedDict):
    clients: list[str]
    rounds: list[int]
    cells: list[GridCell]


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
    success: float | None
    psnr: float | None
    confidence: float | None


class KnownAttack(TypedDict):
    """A registered attack. source: the publication that it is from, or empty.

    arguments: dict from an argument's name to its default, for the arguments that a job may set.
    needs: names of conditions that a case must meet, in lower case, such as "single_example" for an update of one example, see
    `attacker.attacks.needs.Need`.
    """

    name: str
    summary: str
    needs: list[str]
    source: str
    arguments: dict[str, Any]
