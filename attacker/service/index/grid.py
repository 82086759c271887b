"""The grid of clients by rounds, coloured by the leak of each observation, and the results of attacks by round.

The leak is the share of examples that an attack recovered or, without scores, the attack's own confidence. All functions are
pure.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from attacker.service.index.attack_folders import ShownState, Source, find_null
from attacker.service.index.json_lines import Scores, ShownScore
from attacker.service.index.means import average_psnr, average_success, mean
from attacker.service.schemas.attacks import Grid, GridCell, Leak
from fedsim.recording import Row
from fedsim.recording.masked_vectors import SUM_CLIENT

STATE_ORDER: tuple[ShownState, ...] = ("none", "done", "failed", "interrupted", "waiting", "running")
"""States in ascending order of precedence: a cell (client and round) with several cases shows the last of these."""


class CellVerdict(NamedTuple):
    """The result of one attack on one observation, the update of a client in a round; the defaults stand for no attack.

    cases: keys of the attack's cases that use the observation; the other values are over these cases. success, psnr: share of
    their examples of this round that was recovered, and mean PSNR in dB; None without scores. confidence: see
    `_average_confidence`.
    """

    source: str | None = None
    cases: tuple[str, ...] = ()
    state: ShownState = "none"
    success: float | None = None
    psnr: float | None = None
    confidence: float | None = None

    @property
    def leak(self) -> float | None:
        return self.confidence if self.success is None else self.success


def make_grid(rows: Mapping[int, Sequence[Row]], sources: Sequence[Source], scores: Scores, nulls: Sequence[Source] = ()) -> Grid:
    """Return the grid with a cell for each row of the index (client and round).

    A cell shows the attack of `sources` with the highest leak on the observation, and the scores of this attack's null. The state
    of a cell is the last in `STATE_ORDER` of the states of all cases that use the observation, over all of `sources`.
    rows: dict from round to the rows of the index. scores: dict from the folder of an attack or null to its scores.
    nulls: results among which the null of each attack is looked for.
    """
    verdicts = [_collect_verdicts(source, scores.get(source.name, {})) for source in sources]
    pairs = [(source.name, null) for source in sources if (null := find_null(source, nulls)) is not None]
    null_verdicts = {name: _collect_verdicts(null, scores.get(null.name, {})) for name, null in pairs}

    def make_cell(row: Row) -> GridCell:
        place = row.round, row.client
        cell_verdicts = [by_place[place] for by_place in verdicts if place in by_place]
        worst = max(cell_verdicts, key=lambda verdict: -1.0 if verdict.leak is None else verdict.leak, default=CellVerdict())
        null = null_verdicts.get(worst.source or "", {}).get(place, CellVerdict())
        return GridCell(
            client=row.client,
            round=row.round,
            status=row.status,
            cases=list(worst.cases),
            attack=worst.source,
            leak=worst.leak,
            success=worst.success,
            psnr=worst.psnr,
            null_success=null.success,
            null_psnr=null.psnr,
            confidence=worst.confidence,
            state=max((verdict.state for verdict in cell_verdicts), key=STATE_ORDER.index, default="none"),
        )

    cells = [make_cell(row) for number in sorted(rows) for row in rows[number]]
    clients = sorted({cell["client"] for cell in cells}, key=lambda name: (name == SUM_CLIENT, name))
    return Grid(clients=clients, rounds=sorted(rows), cells=cells)


def compute_leakage(source: Source, scores: Mapping[str, Sequence[ShownScore]]) -> list[Leak]:
    """Return one `Leak` for each round with a finished case (reconstructed or failed), in ascending order of rounds.

    A case of several rounds counts in each of them. source: the results of one attack, or of a null. scores: dict from the key of
    a case to the scores of its examples.
    """
    by_round: dict[int, list[str]] = {}
    for case in source.cases.values():
        if source.find_state(case.key) in ("done", "failed"):
            for number in case.rounds:
                by_round.setdefault(number, []).append(case.key)
    return [_compute_leak(source, number, keys, scores) for number, keys in sorted(by_round.items())]


def _compute_leak(source: Source, number: int, keys: Sequence[str], scores: Mapping[str, Sequence[ShownScore]]) -> Leak:
    rows, verdict = _select_rows(number, keys, scores), _make_verdict(source, number, keys, scores)
    return Leak(
        attack=source.name,
        spec=source.spec,
        null=source.null,
        round=number,
        examples=sum(row.is_finished for row in rows)
        or sum(source.answers[key].examples for key in keys if key in source.answers),
        success=verdict.success,
        psnr=verdict.psnr,
        confidence=verdict.confidence,
    )


def _select_rows(number: int, keys: Sequence[str], scores: Mapping[str, Sequence[ShownScore]]) -> list[ShownScore]:
    """Return the scores of the examples of round `number` in the cases `keys`."""
    return [row for key in keys for row in scores.get(key, ()) if number in row.rounds]


def _collect_verdicts(source: Source, scores: Mapping[str, Sequence[ShownScore]]) -> dict[tuple[int, str], CellVerdict]:
    keys_by_place: dict[tuple[int, str], list[str]] = {}
    for case in source.cases.values():
        for number in case.rounds:
            keys_by_place.setdefault((number, case.client), []).append(case.key)
    return {place: _make_verdict(source, place[0], keys, scores) for place, keys in keys_by_place.items()}


def _make_verdict(source: Source, number: int, keys: Sequence[str], scores: Mapping[str, Sequence[ShownScore]]) -> CellVerdict:
    rows = _select_rows(number, keys, scores)
    return CellVerdict(
        source=source.name,
        cases=tuple(keys),
        state=max(map(source.find_state, keys), key=STATE_ORDER.index),
        success=average_success(rows),
        psnr=average_psnr(rows),
        confidence=_average_confidence(source, keys),
    )


def _average_confidence(source: Source, keys: Sequence[str]) -> float | None:
    """Return the mean confidence of these cases, or None. Failed cases count as 0, others without confidence do not count."""
    answered_or_failed = [key for key in keys if key in source.answers or key in source.failures]
    return mean(0.0 if key in source.failures else source.answers[key].confidence for key in answered_or_failed)
