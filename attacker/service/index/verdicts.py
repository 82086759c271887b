"""What each attack of a run comes to against its null, from the rows of its scores."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from attacker.scoring import ScoreRow, Summary, summarise
from attacker.service.index.json_lines import read_lines

MOST_ROWS = 10_000
"""Rows of a run that are judged while a page waits, which takes seconds; `attacker score` judges any number."""
NEEDLESS = frozenset({"environment", "notes", "pair", "lpips_reason", "rounds", "rounds_claimed"})
"""Fields that no verdict is of."""
LONGEST = 2000


class VerdictSummary(NamedTuple):
    """outcome: in a few words. words: the whole verdict."""

    outcome: str
    words: str


def read_verdicts(run: Path) -> dict[str, VerdictSummary]:
    """The verdict on each attack, by its source; none at all where the rows are too many, or are no scores."""
    rows: list[ScoreRow] = []
    try:
        for row in islice(read_lines(run, "scores.jsonl", []), MOST_ROWS + 1):
            rows.append(ScoreRow.from_dict({key: value for key, value in row.items() if key not in NEEDLESS}))
        if len(rows) > MOST_ROWS:
            return {}
        return {summary.source: _judged(summary) for summary in summarise(rows)}
    except Exception:  # a run's files may hold anything, and what is wrong with its rows is told elsewhere
        return {}


def _judged(summary: Summary) -> VerdictSummary:
    if summary.success is None:
        return VerdictSummary("nothing finished yet", "nothing finished yet")
    if summary.verdict is None:
        return VerdictSummary("no verdict", "no verdict")
    return VerdictSummary(summary.verdict.outcome, summary.verdict.words[:LONGEST])
