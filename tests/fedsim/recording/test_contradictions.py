"""Tests of contradictions between the stated training settings and what a client returned after its real training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsim.recording import Training
from fedsim.recording.contradictions import EVEN_MAGNITUDES, find_contradictions, has_even_magnitudes

EXAMPLES = 20


def train_client(*, batch: int = 8, epochs: int = 2, rate: float = 1e-3, mode: str = "train", **settings: Any) -> Any:
    """Return the state dict of a network with batch norm before and after a training by PyTorch's own optimisers."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(EXAMPLES, 6), torch.arange(EXAMPLES) % 3
    before = {name: t.clone() for name, t in network.state_dict().items()}
    optimiser = settings.get("optimiser", torch.optim.AdamW)(network.parameters(), lr=rate)
    network.train(mode == "train")
    for _ in range(epochs):
        for rows in torch.arange(EXAMPLES).split(batch):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return before, network.state_dict()


def judge(states: tuple[dict[str, Tensor], dict[str, Tensor]], **stated: Any) -> list[str]:
    settings = {"learning_rate": 1e-3, "batch_size": 8, "epochs": 2, "optimiser": "adamw", "mode": "train", **stated}
    return find_contradictions(Training(**settings), EXAMPLES, *states)


def test_training_as_stated_contradicts_nothing() -> None:
    assert judge(train_client()) == []
    assert judge(train_client(mode="eval"), mode="eval") == []
    assert judge(train_client(rate=0.03), learning_rate=0.03) == []
    assert judge(train_client(batch=3, epochs=1), batch_size=3, epochs=1) == []
    assert judge(train_client(optimiser=torch.optim.Adam), optimiser="adam") == []
    assert judge(train_client(optimiser=torch.optim.SGD, rate=0.5), optimiser="sgd") == []


def test_batch_norm_that_clients_keep_is_named_unless_stated() -> None:
    """Clients return the server's statistics unchanged."""
    before, after = train_client()
    kept = {name: before[name] if "running" in name or "tracked" in name else value for name, value in after.items()}
    (found,) = judge((before, kept))
    assert found.startswith("batch norm saw 0 batches in a round")
    assert 'state buffers="local"' in found
    assert judge((before, kept), buffers="local") == []


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"batch_size": 2}, "batch norm saw 6 batches in a round, and 20 follow from batch_size=2, epochs=2 and 20 examples"),
        ({"epochs": 1}, "saw 6 batches in a round, and 3 follow"),
        ({"epochs": None, "steps": 1}, "saw 6 batches in a round, and 1 follow from batch_size=8, steps=1: compare"),
        ({"drop_last": True}, "saw 6 batches in a round, and 4 follow"),
        ({"mode": "eval"}, 'do not train with mode="eval"'),
        ({"learning_rate": 1e-5}, "adamw with a learning rate of 1e-05 and 6 steps changes weights by up to about 6e-05"),
        ({"learning_rate": 1.0}, "compare learning_rate"),
    ],
)
def test_wrong_setting_is_named(stated: dict[str, Any], words: str) -> None:
    found = judge(train_client(), **stated)
    assert any(words in sentence for sentence in found), found


def test_settings_are_not_judged_without_evidence() -> None:
    """Without batch norm's buffers, and with SGD, nothing tells the number of steps or the learning rate."""
    before, after = (
        {name: t for name, t in state.items() if "num" not in name and "running" not in name} for state in train_client()
    )
    assert judge((before, after), batch_size=2, optimiser="sgd", learning_rate=7.0) == []


def test_changes_in_place_of_weights_are_named() -> None:
    before, after = train_client()
    deltas = {name: after[name] - before[name] for name in after}
    assert any("look like changes of the weights" in one for one in judge((before, deltas)))
    assert not any("look like changes" in one for one in judge(train_client(rate=0.1, epochs=20), epochs=20, learning_rate=0.1))


def test_layer_that_is_not_trained_is_named_unless_stated() -> None:
    before, after = train_client()
    after = {**after, "0.weight": before["0.weight"]}
    assert any(one.startswith("0.weight did not change") for one in judge((before, after)))
    assert judge((before, after), frozen=("0.*",)) == []
    assert not any("did not change" in one for one in judge((before, before)))


def test_layer_behind_a_matrix_of_zeros_may_stay_unchanged() -> None:
    """LoRA starts with a second matrix of zeros, so that the first one gets no gradient in the first round."""
    start = {"a": torch.ones(2, 3), "b": torch.zeros(3, 2), "head": torch.ones(3, 3)}
    after = {**start, "b": torch.arange(6.0).square().reshape(3, 2), "head": torch.full((3, 3), 1.1)}
    settings = Training(learning_rate=0.1, batch_size=4, steps=1, mode="eval")
    assert find_contradictions(settings, 4, start, after) == []
    later = {**after, "head": torch.ones(3, 3)}
    assert "a, b did not change" in find_contradictions(settings, 4, after, later)[0]


@pytest.mark.parametrize("optimiser", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_unstated_optimiser_is_named(optimiser: type[torch.optim.Optimizer]) -> None:
    states = train_client(optimiser=optimiser, batch=EXAMPLES, epochs=1)
    stated = {"optimiser": "sgd", "batch_size": EXAMPLES, "epochs": 1}
    assert judge(states, **stated) == [EVEN_MAGNITUDES]
    assert judge(train_client(optimiser=torch.optim.SGD, batch=EXAMPLES, epochs=1), **stated) == []
    settings = Training(learning_rate=1e-3, batch_size=EXAMPLES, epochs=1)
    assert find_contradictions(settings, EXAMPLES, *states, is_defended=True) == []


def test_inputs_of_zeros_and_ones_make_no_even_magnitudes() -> None:
    torch.manual_seed(0)
    x, y = (torch.rand(1, 30) < 0.5).float(), torch.tensor([1])
    for network in (nn.Linear(30, 2), nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))):
        loss = nn.functional.cross_entropy(network(x), y)
        names, parameters = zip(*network.named_parameters(), strict=True)
        assert not has_even_magnitudes(dict(zip(names, torch.autograd.grad(loss, parameters), strict=True)))


def test_inputs_of_zeros_and_ones_make_no_rows_of_equal_size() -> None:
    """Behind binary inputs, the rows of neurons that one example turns on are sign patterns by SGD as well."""
    for seed in range(5):
        torch.manual_seed(seed)
        x, y = (torch.rand(6, 30) < 0.5).float(), torch.arange(6) % 3
        network = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 3))
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
        start = {name: p.detach().clone() for name, p in network.named_parameters()}
        for rows in torch.arange(6).split(2):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
        update = {name: p.detach() - start[name] for name, p in network.named_parameters()}
        assert not has_even_magnitudes(update)
