"""Verdicts on the attacks of a run: whether each found more than its null."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from attacker.report.conclusions import describe_summaries, find_strongest
from attacker.scoring import ScoreRow, Summary, summarise
from attacker.service.index.json_lines import read_lines
from fedsim.recording import Manifest

MAX_ROWS = 10_000
"""Largest number of score rows that a request judges, which takes seconds; `attacker score` has no limit."""
UNUSED_FIELDS = frozenset({"environment", "notes", "pair", "lpips_reason", "rounds", "rounds_claimed"})
"""Fields of score rows that verdicts do not depend on."""
MAX_VERDICT = 2000


class VerdictSummary(NamedTuple):
    """The verdict on one attack as text: whether it found more than its null.

    outcome: in a few words, such as "recovered". words: the outcome with its reasons, without a full stop.
    """

    outcome: str
    words: str


class RunVerdicts(NamedTuple):
    """The verdicts on the attacks of a run: whether each found more than its null.

    by_source: dict from the name of an attack's folder to the verdict on this attack; nulls are not in it.
    sentence:  the conclusion from all verdicts, as in the report; "" if no finished case is scored, or the manifest is not known.
    strongest: name of the folder of the attack that `sentence` is about; None if no attack has a finished case with scores.
    """

    by_source: Mapping[str, VerdictSummary] = {}
    sentence: str = ""
    strongest: str | None = None


def read_verdicts(run: Path, manifest: Manifest | None) -> RunVerdicts:
    """Return the verdicts on a run's attacks, from its file of scores.

    The result is empty if the file has more than `MAX_ROWS` rows, or a row that is not valid. manifest: manifest of the
    recording; without it, `RunVerdicts.sentence` is "".
    """
    rows: list[ScoreRow] = []
    try:
        for row in islice(read_lines(run, "scores.jsonl", []), MAX_ROWS + 1):
            rows.append(ScoreRow.from_dict({key: value for key, value in row.items() if key not in UNUSED_FIELDS}))
        if len(rows) > MAX_ROWS:
            return RunVerdicts()
        summaries = summarise(rows)
        top = find_strongest(summaries)
        sentence = describe_summaries(summaries, manifest) if manifest is not None else ""
        return RunVerdicts(
            {summary.source: _summarise_verdict(summary) for summary in summaries},
            sentence[:MAX_VERDICT],
            top.source if top else None,
        )
    except Exception:  # files of a run may contain anything; invalid rows are reported elsewhere
        return RunVerdicts()


def _summarise_verdict(summary: Summary) -> VerdictSummary:
    if summary.success is None:
        return VerdictSummary("nothing finished yet", "nothing finished yet")
    if summary.verdict is None:
        return VerdictSummary("no verdict", "no verdict")
    return VerdictSummary(summary.verdict.outcome, summary.verdict.words[:MAX_VERDICT])
