"""Scoring: comparison of reconstructions with truth (the clients' examples).

No other package of the attacker reads the files of truth. True labels and logits that a user gives to an attack come from here.
"""

from attacker.scoring.growth import CaseGrowth, GrowthPoint, read_growth, summarise_growth
from attacker.scoring.rows import ScoreRow, read_rows, to_pandas, write_csv
from attacker.scoring.score import Scorer
from attacker.scoring.score_tests import Comparison
from attacker.scoring.statistics import Distribution, Estimate
from attacker.scoring.summary import Summary, summarise
from attacker.scoring.truth.own_examples import write_truth
from attacker.scoring.verdict import Verdict

__all__ = [
    "CaseGrowth",
    "Comparison",
    "Distribution",
    "Estimate",
    "GrowthPoint",
    "ScoreRow",
    "Scorer",
    "Summary",
    "Verdict",
    "read_growth",
    "read_rows",
    "summarise",
    "summarise_growth",
    "to_pandas",
    "write_csv",
    "write_truth",
]
