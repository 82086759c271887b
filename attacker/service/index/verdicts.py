"""Verdicts on the attacks of a run against their nulls, from the rows of scores."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from attacker.report.words import strongest, verdict_of
from attacker.scoring import ScoreRow, Summary, summarise
from attacker.service.index.json_lines import read_lines
from fedsim.recording import Manifest

MAX_ROWS = 10_000
"""Rows of a run that are judged while a page waits, which takes seconds; `attacker score` judges any number."""
UNUSED_FIELDS = frozenset({"environment", "notes", "pair", "lpips_reason", "rounds", "rounds_claimed"})
"""Fields that no verdict is of."""
MAX_VERDICT = 2000


class VerdictSummary(NamedTuple):
    """outcome: the verdict in a few words. words: the verdict in full sentences."""

    outcome: str
    words: str


class RunVerdicts(NamedTuple):
    """Verdicts by source. sentence: on the run, as the report words it; "" where nothing is scored. strongest: its source."""

    by_source: Mapping[str, VerdictSummary] = {}
    sentence: str = ""
    strongest: str | None = None


def read_verdicts(run: Path, manifest: Manifest | None) -> RunVerdicts:
    """The verdicts on a run's attacks; none at all where the rows are too many, or are no scores."""
    rows: list[ScoreRow] = []
    try:
        for row in islice(read_lines(run, "scores.jsonl", []), MAX_ROWS + 1):
            rows.append(ScoreRow.from_dict({key: value for key, value in row.items() if key not in UNUSED_FIELDS}))
        if len(rows) > MAX_ROWS:
            return RunVerdicts()
        summaries = summarise(rows)
        top = strongest(summaries)
        sentence = verdict_of(summaries, manifest) if manifest is not None else ""
        return RunVerdicts({one.source: _judged(one) for one in summaries}, sentence[:MAX_VERDICT], top.source if top else None)
    except Exception:  # a run's files may hold anything, and what is wrong with its rows is told elsewhere
        return RunVerdicts()


def _judged(summary: Summary) -> VerdictSummary:
    if summary.success is None:
        return VerdictSummary("nothing finished yet", "nothing finished yet")
    if summary.verdict is None:
        return VerdictSummary("no verdict", "no verdict")
    return VerdictSummary(summary.verdict.outcome, summary.verdict.words[:MAX_VERDICT])
