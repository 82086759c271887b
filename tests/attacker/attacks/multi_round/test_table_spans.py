"""Tests that `spans` gives no certain mixture of table rows, whose categories often have equal sums."""

import torch
from generators import seeded
from observations import observe_rounds
from torch import Tensor

from attacker.attacks import Case, spans
from fedsim.recording import DataSpec, ModelSpec

MLP = ModelSpec(name="mlp", arguments={"hidden": [64]})


def make_table_client(batches: list[Tensor], classes: int = 4) -> Case:
    """Return the rounds of a client with one batch (N, F) of table rows in each, on an MLP of 64 neurons."""
    data = DataSpec(shape=(batches[0].shape[1],), num_classes=classes)
    rounds = [[(x, torch.arange(len(x)) % classes)] for x in batches]
    return observe_rounds(rounds, model=MLP, data=data, seed=1, learning_rate=0.05)


def find_wrong(case: Case, truth: Tensor) -> tuple[int, int]:
    """Return the number of certain answers of `spans`, and how many of them are no row of `truth`."""
    (found,) = spans()([case], rng=seeded())
    sure = found.confidence > 0.9
    wrong = (found.x[:, None] - truth).square().mean(dim=2).amin(dim=1) > 1e-6
    return int(sure.sum()), int((sure & wrong).sum())


def test_batches_with_equal_sums_of_categories_give_no_certain_mixture() -> None:
    """(a, a) + (b, b) = (a, b) + (b, a) for one-hot pairs, so that both batches contain the mean, which is no row."""
    hot, rows = torch.eye(20), []
    for k in range(0, 8, 2):
        for pairs in (((k, k), (k + 1, k + 1), (12, k)), ((k, k + 1), (k + 1, k), (13, k))):
            rows.append(torch.stack([torch.cat([hot[i], hot[j]]) for i, j in pairs]))
    assert find_wrong(make_table_client(rows), torch.cat(rows))[1] == 0


def test_small_table_of_few_categories_gives_no_certain_mixture() -> None:
    """Forty rows of 11 columns are dependent, and batches of five share mixtures; 12 rows of 90 columns are not."""
    own, hot = seeded(2), torch.eye(3)
    codes = torch.randint(3, (40, 3), generator=own)
    table = torch.cat([torch.rand(40, 2, generator=own), hot[codes].flatten(1)], dim=1)
    assert find_wrong(make_table_client([table[torch.randperm(40, generator=own)[:5]] for _ in range(12)]), table)[1] == 0
    wide = torch.rand(12, 90, generator=own)
    batches = [wide[list(rows)] for rows in ((0, 1, 2), (3, 4, 5), (0, 3, 6), (1, 4, 7), (2, 5, 8))]
    assert find_wrong(make_table_client(batches), wide)[0] > 0
