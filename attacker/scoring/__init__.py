"""Scoring of reconstructions against truth. No other package of the attacker reads truth."""

from attacker.scoring.rows import ScoreRow, read_rows, to_pandas, write_csv
from attacker.scoring.score import Scorer
from attacker.scoring.statistics import Distribution, Estimate
from attacker.scoring.summary import Summary, summarise
from attacker.scoring.verdict import Comparison, Verdict

__all__ = [
    "Comparison",
    "Distribution",
    "Estimate",
    "ScoreRow",
    "Scorer",
    "Summary",
    "Verdict",
    "read_rows",
    "summarise",
    "to_pandas",
    "write_csv",
]
