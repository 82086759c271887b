"""Tests of local training against torch.optim.SGD, and bit for bit against the gradient for a single step."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim import models
from fedsim.recording import DataSpec, ModelSpec, Training
from fedsim.training.local import evaluate, train

DATA = DataSpec(shape=(1, 6, 6), num_classes=4, mean=(0.3,), std=(0.7,))


def network(dtype: torch.dtype = torch.float64, name: str = "mlp") -> nn.Module:
    arguments = {"hidden": [5]} if name == "mlp" else {}
    return models.build(ModelSpec(name=name, arguments=arguments), DATA, seed=2).to(dtype)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def some_batches(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(6)
    return [
        (torch.rand(size, 1, 6, 6, generator=drawn, dtype=dtype), torch.randint(0, 4, (size,), generator=drawn)) for size in sizes
    ]


def settings(**changes: Any) -> Training:
    return Training(**{"learning_rate": 0.3, "batch_size": 3, "steps": 1, **changes})


@pytest.mark.parametrize("name", ["mlp", "lenet_dlg"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_several_steps_are_those_of_torchs_own_sgd(name: str, momentum: float, weight_decay: float) -> None:
    """Batches have unequal sizes, so that a mean over a wrong number of examples would be noticed.

    The reported loss is the mean over examples, each before its own step.
    """
    model, sizes = network(name=name), (3, 1, 4, 2, 3)
    before = weights_of(model)
    reference = copy.deepcopy(model)
    sgd = torch.optim.SGD(reference.parameters(), lr=0.3, momentum=momentum, weight_decay=weight_decay)
    losses = []
    for x, y in some_batches(sizes):
        sgd.zero_grad()
        loss = cross_entropy(reference((x - 0.3) / 0.7), y)
        loss.backward()
        sgd.step()
        losses += [loss.item()] * len(y)
    trained = train(model, before, some_batches(sizes), settings(momentum=momentum, weight_decay=weight_decay), DATA)
    for key, after in weights_of(reference).items():
        assert torch.allclose(trained.update[key], after - before[key], rtol=0, atol=1e-10)
        assert trained.update[key].abs().max() > 1e-4
    assert trained.loss == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def compute_gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    cross_entropy(model(DATA.normalise(batch[0])), batch[1]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("learning_rate", [0.1, 3e-4, 1e-7, 1e-12])
def test_one_step_is_minus_learning_rate_times_gradient_to_the_last_bit(learning_rate: float) -> None:
    model, (batch,) = network(torch.float32), some_batches((3,), torch.float32)
    update = train(model, weights_of(model), [batch], settings(learning_rate=learning_rate), DATA).update
    for name, g in compute_gradient(model, batch).items():
        assert update[name].dtype == torch.float32
        assert torch.equal(update[name], -learning_rate * g)


def test_the_update_is_more_exact_than_the_difference_of_weights() -> None:
    """If a step is about 1e-7 of the weight, `after - before` is rounding error; therefore steps are summed separately."""
    model, (batch,) = network(torch.float32), some_batches((3,), torch.float32)
    before = {name: torch.full_like(w, 1.0) + w for name, w in weights_of(model).items()}
    model.load_state_dict(before)
    g = compute_gradient(model, batch)["3.weight"]
    learning_rate = 1e-7 / g.abs().mean().item()
    exact = -learning_rate * g
    update = train(model, before, [batch], settings(learning_rate=learning_rate), DATA).update["3.weight"]
    difference = (before["3.weight"] + exact) - before["3.weight"]
    assert torch.equal(update, exact)
    assert (difference - exact).norm() > 0.1 * exact.norm()


def test_training_starts_from_the_weights_that_were_sent_and_not_from_the_models_own() -> None:
    model, batches = network(), some_batches((3,))
    sent = {name: w + 0.1 for name, w in weights_of(model).items()}
    other = models.build(ModelSpec(name="mlp", arguments={"hidden": [5]}), DATA, seed=99).double()
    one, two = (train(m, sent, batches, settings(), DATA) for m in (model, other))
    assert one.loss == two.loss
    assert all(torch.equal(one.update[name], two.update[name]) for name in sent)


class Spy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(36, 4, dtype=torch.float64)
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        logits: Tensor = self.linear(x.flatten(1))
        return logits


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("found", [True, False])
def test_the_model_is_in_the_mode_that_the_server_prescribed(mode: str, found: bool) -> None:
    spy = Spy().train(found)
    train(spy, weights_of(spy), some_batches((2, 2)), settings(mode=mode), DATA)
    assert spy.modes == [mode == "train"] * 2
    x, y = some_batches((2,))[0]
    evaluate(spy.train(), weights_of(spy), x, y, DATA, settings(mode=mode))
    assert spy.modes[-1] is False


def test_momentum_starts_at_zero_in_every_round() -> None:
    model, given_batches = network(), some_batches((3,))
    first, second = (train(model, weights_of(model), given_batches, settings(momentum=0.9), DATA) for _ in range(2))
    plain = train(model, weights_of(model), given_batches, settings(), DATA)
    for other in (second, plain):
        assert all(torch.equal(first.update[name], other.update[name]) for name in first.update)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_evaluation_is_mean_loss_and_share_of_hits_whatever_the_chunk(chunk: int) -> None:
    model = network()
    ((x, y),) = some_batches((7,))
    found = evaluate(model, weights_of(model), x, y, DATA, settings(), chunk=chunk)
    logits = model((x - 0.3) / 0.7).detach()
    by_hand = -logits.log_softmax(1)[torch.arange(7), y].mean().item()
    assert found["loss"] == pytest.approx(by_hand, rel=1e-12)
    assert found["accuracy"] == pytest.approx(sum(int(a == b) for a, b in zip(logits.argmax(1), y, strict=True)) / 7)
    assert set(found) == {"loss", "accuracy"}
