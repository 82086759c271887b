"""What an attack may be told beyond the threat model, where the user asks for it by name. Written into every row."""

from torch import Tensor

from attacker.scoring.score import Scorer
from fedsim.wire.recording import Row


def true_labels(scorer: Scorer, row: Row) -> Tensor:
    """The labels of the examples that a client used, ascending: the multiset, not which image has which."""
    _, _, labels = scorer.originals(row.round, row.attempt, row.client)
    return labels.sort().values
