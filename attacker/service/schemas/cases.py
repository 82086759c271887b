"""Types of responses about cases (observations that are attacked together) and their examples."""

from typing_extensions import TypedDict

from attacker.service.schemas.attacks import CellState


class CaseOutcome(TypedDict):
    """What is known of one case of an attack, whether its examples are listed or only counted.

    attack: name of the folder with the attack's results. null: whether the attack is a null (the same attack without the update).
    route: name of the method that reconstructed the case.
    reason: why there is no finished reconstruction, if known.
    null_success, null_psnr: scores of the attack's null on the same case; null if there are none.
    """

    attack: str
    case: str
    client: str
    rounds: list[int]
    status: CellState
    route: str | None
    iterations: int | None
    seconds: float | None
    confidence: float | None
    success: float | None
    psnr: float | None
    null_success: float | None
    null_psnr: float | None
    reason: str | None
    null: bool


class CaseSummary(CaseOutcome):
    """One case of an attack. loss: the attack's own final loss.

    examples: number of reconstructed examples or, without a reconstruction, the number of examples behind the case's updates,
    derived from what the clients reported or estimated; null if it is not known.
    """

    examples: int | None
    loss: float | None


class TableValue(TypedDict):
    """One variable of a table row, in its own unit, as text.

    original: the true value; null if it is not known, as without truth. right: whether the reconstructed value counts as correct:
    a number within a tolerance, or the same category; null if this cannot be told.
    """

    column: str
    reconstruction: str
    original: str | None
    right: bool | None


class NullExample(TypedDict):
    """What the attack's null, the same attack without the client's update, reconstructed for comparison with an example.

    If the case is scored, it is the null's reconstruction of the same example; otherwise it is the null's example with the same
    index, which need not be of the same original.
    image: address of a PNG file; null if there is none. values: values of a table row by variable; null for images, and if there
    is no reconstruction.
    """

    image: str | None
    values: dict[str, str] | None
    label: str | None
    success: bool | None
    psnr: float | None


class CaseExample(TypedDict):
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
    null: what the attack's null reconstructed for comparison, see `NullExample`; null if there is no null to compare with, or if
    it has no entry for this example. The entry of a scored case has neither an image nor values if the null has no reconstruction
    of the example.
    """

    n: int
    batch: int | None
    position: int | None
    rounds: list[int]
    label: str | None
    confidence: float | None
    image: str | None
    values: list[TableValue] | None
    original: str | None
    label_true: str | None
    success: bool | None
    psnr: float | None
    ssim: float | None
    lpips: float | None
    failure: str | None
    null: NullExample | None


class CaseDetails(CaseOutcome):
    """A case with its examples. loss: curve of the attack's own loss, at most 200 pairs of iteration, from 1, and loss."""

    examples: list[CaseExample]
    loss: list[tuple[int, float]]
    oracles: list[str]
    notes: list[str]
    spec: str


class ShownExample(TypedDict):
    """An example, with the attack and case that it is from. attack: name of the folder with the attack's results."""

    attack: str
    case: str
    client: str
    rounds: list[int]
    example: CaseExample


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
    outcome: str | None
    attack: str | None
    spec: str | None
    updates: int
    attacked: int
    absent: int
    attacks: int
    cases: int
    finished: int
    failed: int
    examples: int
    psnr: float | None
    null_psnr: float | None
    worst: list[ShownExample]
