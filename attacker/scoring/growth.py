"""Leakage against the number of recorded rounds: how many examples each case of an attack recovers.

Several replays of one attack on the first 1, 5, 10, ... rounds of a client are cases that contain each other. Score rows hold the
examples of a round in only one of these cases; the file `growth.jsonl` of a run counts the examples of each case by itself.

A case is the observations that are attacked together: one round of a client, or several.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from fedsim.recording.files import read_json_lines, update_json_lines
from fedsim.recording.safe_files import parse_json

GROWTH_FILE = "growth.jsonl"


@dataclass(frozen=True, kw_only=True)
class CaseGrowth:
    """The number of examples that one case recovers, for an attack that can use several rounds together.

    source: name of the folder of the attack's reconstructions. rounds: rounds of the case, ascending. examples: number of
    distinct examples that the client used in these rounds. recovered: number of these examples that count as recovered
    (`ScoreRow.success`).
    """

    source: str
    case: str
    client: str
    rounds: tuple[int, ...]
    examples: int
    recovered: int


class GrowthPoint(NamedTuple):
    """The share of examples recovered from a number of rounds, or a bound on this share, in [0, 1]."""

    rounds: int
    share: float


def write_growth(run: Path, source: str, cases: Iterable[CaseGrowth]) -> None:
    """Replace the rows of the attack `source` in a run's `growth.jsonl` by `cases`, which may be empty; keep damaged lines.

    source: name of the attack's folder.
    """

    def is_stale(line: bytes) -> bool:
        try:
            row = parse_json(line)
        except ValueError:
            return False
        return isinstance(row, dict) and row.get("source") == source

    update_json_lines(run / GROWTH_FILE, is_stale, *map(asdict, cases), below=run)


def read_growth(run: Path) -> list[CaseGrowth]:
    """Return the rows of a run's `growth.jsonl`; [] without the file. Raises ValueError, naming the file, for an invalid row."""
    known = [field.name for field in fields(CaseGrowth)]
    cases = []
    for row in read_json_lines(run / GROWTH_FILE, "delete the file and score again"):
        try:
            case = CaseGrowth(**{**{name: row[name] for name in known}, "rounds": tuple(map(int, row["rounds"]))})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{GROWTH_FILE}: a row cannot be read ({error!r}); delete the file and score again") from None
        if not (case.rounds and 0 <= case.recovered <= case.examples):
            raise ValueError(
                f"{GROWTH_FILE}: a row states {case.recovered} of {case.examples} examples recovered in {len(case.rounds)} rounds"
                ", which is impossible; delete the file and score again"
            )
        cases.append(case)
    return cases


def summarise_growth(cases: Sequence[CaseGrowth]) -> list[GrowthPoint]:
    """Return the share of examples recovered for each number of rounds, ascending, given the cases of one attack.

    The denominator is the sum over clients of the number of examples in the client's largest case, so that examples that were not
    used yet count as not recovered. A number of rounds is included if every client has a case with this number of rounds; of two
    such cases of a client, the one with the earlier rounds is used.
    """
    clients: dict[str, dict[int, CaseGrowth]] = {}
    for case in sorted(cases, key=lambda case: case.rounds):
        clients.setdefault(case.client, {}).setdefault(len(case.rounds), case)
    if not clients:
        return []
    total = sum(max(case.examples for case in cases.values()) for cases in clients.values())
    common = sorted(set.intersection(*(set(cases) for cases in clients.values())))
    return [GrowthPoint(count, sum(cases[count].recovered for cases in clients.values()) / max(1, total)) for count in common]
