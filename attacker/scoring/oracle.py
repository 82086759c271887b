"""What an attack may be told beyond the threat model, where the user asks for it by name. Written into every row."""

from collections.abc import Sequence

from torch import Tensor

from attacker.scoring.score import Scorer
from fedsim.wire.recording import Row


def true_labels(scorer: Scorer, row: Row, cohort: Sequence[str] = ()) -> Tensor:
    """The labels of the examples behind an update, ascending: the multiset, not which image has which.

    Of several epochs, those of the first: `num_examples` counts each example once an epoch. cohort: of a sum.
    """
    used = [[index for _, _, index in scorer.used(row.round, row.attempt, name).examples] for name in cohort or [row.client]]
    total = sum(map(len, used))
    shares = [len(own) if row.num_examples is None else min(row.num_examples, total) * len(own) // total for own in used]
    _, labels = scorer.data.train[[index for own, share in zip(used, shares, strict=True) for index in own[:share]]]
    return labels.sort().values
