"""Tests of the benchmark of attacks over many rounds: one small client, the control of the quickstart, and SRATTA."""

import pytest
import rounds
import torch
from support.contract import Options
from support.rounds import spans
from support.rounds.practical import exchange_scores
from support.rounds.sratta import explain_rows, join_groups, recover_examples
from torch import Tensor


def test_table_of_spans_counts_exact_images_of_attack_and_null(monkeypatch: pytest.MonkeyPatch) -> None:
    small = spans.SpanSetting(batch=4, examples=16, clients=1, epochs=3)
    monkeypatch.setattr(spans, "list_settings", lambda quick: [small])
    rows, summary = rounds.run_spans_table(Options(quick=True, json=False, data=None, device="cpu", seed=0, table=None))
    (row,) = rows
    assert row["with_relu"] > row["null"] == 0
    assert row["certain_and_wrong"] == row["below_60_db"] == 0
    assert row["answers"] == 16 * row["with_relu"]
    assert summary["span_recovered_3_epochs"] == row["with_relu"]


@pytest.mark.parametrize("clients", [2, 3, 10])
def test_control_scores_no_client_by_its_own_updates(clients: int) -> None:
    scores = [torch.full((4,), float(i)) for i in range(clients)]
    found = exchange_scores(scores)
    assert len(found) == clients
    assert all(not torch.equal(found[i], scores[i]) for i in range(1, clients))


def draw_images(count: int) -> Tensor:
    return torch.randint(256, (count, 40), generator=torch.Generator().manual_seed(0)).double() / 255


def join(weight: Tensor, bias: Tensor) -> Tensor:
    return torch.cat([weight, bias[:, None]], dim=1)


def test_quotient_of_a_row_is_recovered_if_it_is_a_stored_image() -> None:
    x = draw_images(3)
    share = torch.tensor([[0.3, 0, 0], [-0.2, 0, 0], [0, 0.1, 0.2], [0, 0, 1e-7]], dtype=torch.float64)
    found = recover_examples([join(share @ x, share.sum(dim=1))])
    assert torch.allclose(found, x[:1])


def test_row_of_few_known_images_is_explained_by_them() -> None:
    x = draw_images(8)
    share = torch.zeros(5, 8, dtype=torch.float64)
    share[0, [1, 4]] = torch.tensor([0.5, -0.2], dtype=torch.float64)
    share[1, 2] = 0.4  # of one image only, which links nothing
    share[2] = 0.1  # of more images than allowed
    share[3, [0, 3]] = torch.tensor([0.2, 0.3], dtype=torch.float64)
    share[4, [5, 6]] = torch.tensor([0.3, 0.3], dtype=torch.float64)
    bias = share.sum(dim=1)
    bias[3] = -bias[3]
    rows = join(share @ x, bias)
    rows[4, :-1] += draw_images(9)[8] / 10  # with an image that is not known
    assert [(neuron, sorted(used)) for neuron, used in explain_rows(rows, x)] == [(0, [1, 4])]


def test_examples_are_joined_once_those_that_moved_the_neuron_are_of_one_client() -> None:
    def pair(on: set[int], turned_on: set[int]) -> tuple[frozenset[int], frozenset[int]]:
        return frozenset(on), frozenset(turned_on)

    relations = {pair({0, 1}, {2}), pair({0}, {1}), pair({3, 2}, {4}), pair(set(), {5, 0})}
    assert join_groups(relations, 6) == [[0, 1, 2]]
