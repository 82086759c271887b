"""What an attack may be told beyond the threat model, where the user asks for it by name. Written into every row."""

from torch import Tensor

from attacker.scoring.score import Scorer
from fedsim.wire.recording import Row


def true_labels(scorer: Scorer, row: Row) -> Tensor:
    """The labels of the examples behind an update, ascending: the multiset, not which image has which.

    Of several epochs, those of the first: `num_examples` counts each example once an epoch.
    """
    indices = [index for _, _, index in scorer.used(row.round, row.attempt, row.client).examples]
    _, labels = scorer.data.train[indices[: row.num_examples]]
    return labels.sort().values
