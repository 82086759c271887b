"""Readers of the two JSON lines files of a run: the training metrics of each round, and the scores of attacks."""

from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from attacker.replay.metadata_reader import make_attack_key
from attacker.scoring.states import FINISHED_STATES, STATES, CaseState
from fedsim.recording import DamagedFile
from fedsim.recording.safe_files import is_count, open_file, parse_json

MAX_BYTES = 2 * 2**30


Place = tuple[tuple[int, ...], int, int, int]
"""Rounds, batch, position and index of a true example, see `attacker.scoring.rows.ScoreRow`; equal for an attack and its null."""


class ShownScore(NamedTuple):
    """The fields of a score row that the page shows: a true example, and the scores of its reconstruction.

    state: state of the case when it was scored; means are computed over rows of finished cases only. label_true, label: names of
    the true and of the recovered class. pair: file with original and reconstruction, relative to the run. example: index in the
    data set, which is the same in different rounds. batch, position: first use of the example, see
    `attacker.scoring.rows.ScoreRow`.
    psnr_instead: the PSNR that counts in means for an example without a reconstruction: of the null's reconstruction of the
    example in the same case, or else of the best image of one colour, as in `attacker.scoring.row_pairs.fill_failures`.
    """

    case: str
    state: CaseState
    rounds: tuple[int, ...]
    client: str
    batch: int
    position: int
    example: int
    label_true: str
    label: str | None
    success: bool
    label_success: bool
    psnr: float | None
    ssim: float | None
    lpips: float | None
    confidence: float | None
    failure: str | None
    pair: str | None
    psnr_instead: float | None = None

    @property
    def counted_psnr(self) -> float | None:
        """The PSNR with which the example counts in means; None if it is not known."""
        return self.psnr_instead if self.psnr is None else self.psnr

    @property
    def place(self) -> Place:
        """Key of the example within its case, which is equal in the rows of another attack or null on the same case."""
        return self.rounds, self.batch, self.position, self.example

    @property
    def is_finished(self) -> bool:
        """Whether the attack on the case had finished, with a reconstruction or by failing, when the case was scored."""
        return self.state in FINISHED_STATES


Scores = Mapping[str, Mapping[str, Sequence[ShownScore]]]
"""Dict from source (folder of an attack) to a dict from case to rows."""


def read_training(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of metrics.jsonl that have a round, sorted by round, and messages about lines that cannot be read.

    There are no rows if the file is missing.
    """
    trouble: list[str] = []
    rows = [row for row in read_lines(run, "metrics.jsonl", trouble) if type(row.get("round")) is int]
    return sorted(rows, key=lambda row: int(row["round"])), trouble


def read_scores(run: Path) -> tuple[Scores, list[str]]:
    """Return the rows of scores.jsonl in a dict from attack (name of its folder) to a dict from case to its list of rows.

    Also returns messages about rows that cannot be used. There are no rows if the file is missing.
    """
    trouble: list[str] = []
    scores: dict[str, dict[str, list[ShownScore]]] = {}
    sources: dict[tuple[Any, ...], dict[bool, str]] = {}
    wrong = 0
    for row in read_lines(run, "scores.jsonl", trouble):
        try:
            source, score = str(row["source"]), _parse_score(row)
            sources.setdefault(make_attack_key(row.get), {})[row.get("null") is True] = source
        except (KeyError, TypeError, ValueError):
            wrong += 1
            continue
        scores.setdefault(source, {}).setdefault(score.case, []).append(score)
    for pair in sources.values():
        if len(pair) == 2:
            _fill_failures(scores[pair[False]], scores[pair[True]])
    if wrong:
        trouble.append(f"scores.jsonl: {'1 row does' if wrong == 1 else f'{wrong} rows do'} not hold valid scores; score again")
    for cases in scores.values():
        for rows in cases.values():
            rows.sort(key=lambda row: (row.rounds, row.batch, row.position, row.example))
    return scores, trouble


def read_lines(run: Path, name: str, trouble: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of the file `name` of a run, which has one JSON object per line; none if the file is missing.

    A last line without its end is left out: it is still being written. Other lines that are no JSON object are skipped. trouble:
    list to which a message is added if lines were skipped or the file cannot be read.
    """
    if not (run / name).exists():
        return
    bad = 0
    try:
        with open_file(run, name, limit=MAX_BYTES) as file:
            for line in BufferedReader(file):  # an unbuffered file is read byte by byte
                if not line.endswith(b"\n"):
                    break
                try:
                    row = parse_json(line)
                except ValueError:
                    bad += 1
                    continue
                if isinstance(row, dict):
                    yield row
                else:
                    bad += 1
    except DamagedFile as error:
        trouble.append(f"{name}: {error.reason}")
    if bad:
        trouble.append(f"{name}: {bad} line{'s' * (bad > 1)} cannot be read")


def _fill_failures(cases: Mapping[str, list[ShownScore]], null: Mapping[str, Sequence[ShownScore]]) -> None:
    """Set `psnr_instead` of rows without a reconstruction to the PSNR of the null's finished row. Both dicts are by case."""
    for key, rows in cases.items():
        known = {row.example: row.counted_psnr for row in null.get(key, ()) if row.is_finished}
        for i, row in enumerate(rows):
            if row.failure is not None and (psnr := known.get(row.example)) is not None:
                rows[i] = row._replace(psnr_instead=psnr)


def _parse_score(row: Mapping[str, Any]) -> ShownScore:
    rounds = tuple(_parse_count(number) for number in row["rounds"])
    pair, constant, state = row["pair"], row.get("constant"), row["state"]
    if state not in STATES:
        raise ValueError(state)
    instead = constant.get("psnr") if row["failure"] is not None and isinstance(constant, dict) else None
    return ShownScore(
        case=str(row["case"]),
        state=state,
        rounds=rounds,
        client=str(row["client"]),
        batch=_parse_count(row["batch"]),
        position=_parse_count(row["position"]),
        example=_parse_count(row["index"]),
        label_true=str(row["label_true_name"])[:200],
        label=None if row["label_recovered_name"] is None else str(row["label_recovered_name"])[:200],
        success=row["success"] is True,
        label_success=row.get("label_success") is True,
        psnr=to_number(row.get("psnr")),
        psnr_instead=to_number(instead),
        ssim=to_number(row.get("ssim")),
        lpips=to_number(row.get("lpips")),
        confidence=to_number(row.get("confidence")),
        failure=None if row["failure"] is None else str(row["failure"])[:2000],
        pair=pair if isinstance(pair, str) and pair.startswith("pairs/") else None,
    )


def _parse_count(value: Any) -> int:
    if not is_count(value):
        raise ValueError(value)
    return int(value)


def to_number(value: Any) -> float | None:
    """Return a finite number as a float; None for any other value, such as a text, True, NaN, or a number that is too large."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON has whole numbers of any length
        return None
    return number if isfinite(number) else None
