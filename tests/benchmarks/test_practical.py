"""Tests of the control in the benchmark of Flower's quickstart."""

import pytest
import torch
from support.rounds.practical import exchange_scores


@pytest.mark.parametrize("clients", [2, 3, 10])
def test_control_scores_no_client_by_its_own_updates(clients: int) -> None:
    scores = [torch.full((4,), float(i)) for i in range(clients)]
    found = exchange_scores(scores)
    assert len(found) == clients
    assert all(not torch.equal(found[i], scores[i]) for i in range(1, clients))
