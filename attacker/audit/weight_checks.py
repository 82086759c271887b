"""Checks of the weights that the server sent, for patterns of a malicious server."""

from collections.abc import Iterator

import torch
from torch import Tensor

from attacker.audit.findings import CheckResult, Finding, NotChecked, Passed
from fedsim.recording import Recording

TAMPERED_RULE = "weights-tampered"
MIN_ROWS, MIN_COLUMNS = 16, 8
"""Smallest layer that is checked."""
MIN_PARALLEL_COSINE = 0.999
"""Absolute cosine of two rows above which they measure the same quantity."""
MAX_PARALLEL_SHARE = 0.5
"""Largest share of parallel pairs of rows in a layer of an honest server."""
MAX_ROWS = 1024
"""Number of rows of a layer that are compared."""


def check_weights(recording: Recording) -> Iterator[CheckResult]:
    """Yield whether the first and the last recorded weights hold an imprint layer.

    In an imprint layer all neurons measure the same linear quantity and differ in their bias only. The differences of their
    gradients then hold single examples (Fowl et al. 2022, "Robbing the Fed"; Boenisch et al. 2023). The rows of random and of
    trained layers point in different directions.
    """
    rounds = recording.list_rounds()
    if not rounds:
        yield NotChecked(rule=TAMPERED_RULE, reason="no round with weights is recorded")
        return
    checked = 0
    for number in dict.fromkeys((rounds[0], rounds[-1])):
        for name, weight in recording.read_sent(number).weights.items():
            if weight.ndim < 2 or len(weight) < MIN_ROWS or weight[0].numel() < MIN_COLUMNS:
                continue
            checked += 1
            if (share := parallel_share(weight)) > MAX_PARALLEL_SHARE:
                yield Finding(
                    rule=TAMPERED_RULE,
                    grade="severe",
                    title=f"The server sent a layer ({name}) in which most neurons measure the same quantity.",
                    evidence=f"Round {number}: {share:.0%} of the pairs of rows are parallel. Malicious servers build imprint "
                    "layers this way: their gradients hold single examples, whatever the batch.",
                    advice="Refuse such weights on the client, and find out who changed the model.",
                )
                return
    if not checked:
        yield NotChecked(rule=TAMPERED_RULE, reason=f"no layer has at least {MIN_ROWS} rows of {MIN_COLUMNS} values")
        return
    yield Passed(rule=TAMPERED_RULE, evidence=f"no layer of {checked} has mostly parallel rows")


def parallel_share(weight: Tensor) -> float:
    """Return the share of pairs of non-zero rows that are parallel (`MIN_PARALLEL_COSINE`); 0 for fewer than two such rows."""
    rows = weight.flatten(1)[:MAX_ROWS].double()
    rows = rows[rows.norm(dim=1) > 0]
    if len(rows) < 2:
        return 0.0
    rows = rows / rows.norm(dim=1, keepdim=True)
    cosines = (rows @ rows.T).abs()
    pairs = len(rows) * (len(rows) - 1)
    return float((torch.triu(cosines, diagonal=1) > MIN_PARALLEL_COSINE).sum()) * 2 / pairs
