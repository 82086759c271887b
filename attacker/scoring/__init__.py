"""Scoring: the only part of the attacker that opens truth."""

from attacker.scoring.score import Scorer
from attacker.scoring.statistics import Estimate
from attacker.scoring.summary import Summary, summarise

__all__ = ["Estimate", "Scorer", "Summary", "summarise"]
