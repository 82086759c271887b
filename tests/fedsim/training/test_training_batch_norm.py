"""Tests of local training of models with batch norm against PyTorch's own module and SGD."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.models import find_loss
from fedsim.recording import DataSpec, Training
from fedsim.training.local import evaluate, train

DATA = DataSpec(shape=(2, 6, 6), num_classes=3, mean=(0.3,), std=(0.7,))


def network(outputs: int = 3) -> nn.Module:
    """Return a network with two kinds of batch norm, and with no parameter or statistic at its default of 0 or 1."""
    rng = torch.Generator().manual_seed(4)
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5))
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(5, outputs)).double()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=rng) * 0.5 + (0.5 if tensor.ndim == 1 else -0.2))
            else:
                tensor.fill_(7)
    return model


def state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tensors = ({name: t.detach().clone() for name, t in named} for named in (model.named_parameters(), model.named_buffers()))
    return next(tensors), next(tensors)


def some_batches(*sizes: int, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(6)
    return [
        (torch.rand(n, 2, 6, 6, generator=rng, dtype=torch.float64), torch.randint(0, classes, (n,), generator=rng))
        for n in sizes
    ]


def settings(**changes: Any) -> Training:
    return Training(**{"learning_rate": 0.3, "batch_size": 4, "steps": 1, "mode": "train", "buffers": "shared", **changes})


def compute_by_torch(model: nn.Module, batches: list[tuple[Tensor, Tensor]], training: Training) -> tuple[dict[str, Tensor], ...]:
    """Return parameters and buffers after training the module itself with torch.optim.SGD."""
    model = copy.deepcopy(model).train(training.mode == "train")
    kinds = {"lr": training.learning_rate, "momentum": training.momentum, "weight_decay": training.weight_decay}
    sgd = torch.optim.SGD(model.parameters(), **kinds)
    for x, y in batches:
        sgd.zero_grad()
        find_loss(training.loss)(model((x - 0.3) / 0.7), y).backward()
        sgd.step()
    return state(model)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("buffers", ["shared", "local"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.05), (0.9, 0.05)])
def test_several_steps_are_torchs_own(mode: str, buffers: str, momentum: float, decay: float) -> None:
    model, batches = network(), some_batches(4, 2, 5)
    training = settings(mode=mode, buffers=buffers, momentum=momentum, weight_decay=decay)
    weights, before = state(model)
    after, moved = compute_by_torch(model, batches, training)
    trained = train(model, weights, batches, training, DATA)
    for name, tensor in after.items():
        torch.testing.assert_close(trained.update[name], tensor - weights[name], rtol=0, atol=1e-10)
    assert list(trained.buffers) == list(before)
    for name, tensor in moved.items():
        torch.testing.assert_close(trained.buffers[name], tensor, rtol=1e-12, atol=1e-12)
        assert trained.buffers[name].dtype == before[name].dtype
        assert torch.equal(trained.buffers[name], before[name]) == (mode == "eval")
    assert trained.buffers["1.num_batches_tracked"].item() == (10 if mode == "train" else 7)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_with_buffers_none_statistics_stay_and_the_update_is_the_same(mode: str) -> None:
    model, batches = network(), some_batches(4, 3)
    weights, before = state(model)
    kept, moved = (train(model, weights, batches, settings(mode=mode, buffers=kind), DATA) for kind in ("none", "shared"))
    assert all(torch.equal(kept.buffers[name], before[name]) for name in before)
    assert all(torch.equal(kept.update[name], moved.update[name]) for name in weights)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_starts_from_the_statistics_that_were_sent(mode: str) -> None:
    model, batches = network(), some_batches(4, 3)
    sent = {name: b + 1 for name, b in state(model)[1].items()}
    copied = copy.deepcopy(model)
    copied.load_state_dict({**dict(copied.named_parameters()), **sent})
    weights, _ = state(model)
    trained = train(model, weights, batches, settings(mode=mode), DATA, buffers=sent)
    after, moved = compute_by_torch(copied, batches, settings(mode=mode))
    for name in weights:
        torch.testing.assert_close(trained.update[name], after[name] - weights[name], rtol=0, atol=1e-10)
    for name in sent:
        torch.testing.assert_close(trained.buffers[name], moved[name])
    own = train(model, weights, batches, settings(mode=mode), DATA)
    same = all(torch.allclose(own.update[name], trained.update[name]) for name in weights)
    assert same == (mode == "train")  # in training mode, running statistics are not used


@pytest.mark.parametrize("buffers", ["none", "shared", "local"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_changes_none_of_its_arguments(buffers: str, mode: str) -> None:
    model, batches = network(), some_batches(4, 3)
    weights, sent = state(model)
    training = settings(mode=mode, buffers=buffers, momentum=0.5, weight_decay=0.1)
    trained = train(model, weights, batches, training, DATA, buffers=sent)
    evaluate(model, weights, *batches[0], DATA, settings(mode=mode, buffers=buffers), buffers=sent)
    for tensor in trained.buffers.values():
        tensor.zero_()
    for given, kept in zip((weights, sent), state(network()), strict=True):
        assert all(torch.equal(given[name], kept[name]) and not given[name].requires_grad for name in kept)
    for given_batch, kept_batch in zip(batches, some_batches(4, 3), strict=True):
        assert all(torch.equal(*pair) for pair in zip(given_batch, kept_batch, strict=True))
    assert all(torch.equal(t, network().state_dict()[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_buffer_that_is_missing_is_named() -> None:
    model, batches = network(), some_batches(4)
    weights, sent = state(model)
    del sent["5.running_var"]
    with pytest.raises(ValueError, match=r"buffers lack 5\.running_var;"):
        train(model, weights, batches, settings(), DATA, buffers=sent)
    with pytest.raises(ValueError, match=r"buffers lack 5\.running_var;"):
        evaluate(model, weights, *batches[0], DATA, settings(), buffers=sent)


def test_a_model_without_statistics_has_none_to_return() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    assert train(model, state(model)[0], some_batches(2), settings(), DATA).buffers == {}


@pytest.mark.parametrize(("mode", "buffers"), [("eval", "none"), ("eval", "local"), ("eval", "shared"), ("train", "shared")])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_evaluation_uses_the_global_statistics(mode: str, buffers: str, chunk: int) -> None:
    model, ((x, y),) = network(), some_batches(7)
    weights, sent = state(model)
    sent = {name: b + 1 for name, b in sent.items()}
    found = evaluate(model, weights, x, y, DATA, settings(mode=mode, buffers=buffers), buffers=sent, chunk=chunk)
    model.load_state_dict({**weights, **sent})
    logits = model.eval()((x - 0.3) / 0.7)
    assert found["loss"] == pytest.approx(cross_entropy(logits, y).item(), rel=1e-12)
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == y).double().mean().item())


@pytest.mark.parametrize("buffers", ["none", "local"])
def test_without_global_statistics_evaluation_uses_those_of_the_held_out_examples(buffers: str) -> None:
    model, ((x, y),) = network(), some_batches(7)
    weights, _ = state(model)
    whole, halves = (evaluate(model, weights, x, y, DATA, settings(buffers=buffers), chunk=chunk)["loss"] for chunk in (512, 6))
    inputs = (x - 0.3) / 0.7
    model.train()
    assert whole == pytest.approx(cross_entropy(model(inputs), y).item(), rel=1e-12)
    parts = torch.cat([model(inputs[:4]), model(inputs[4:])])  # seven examples in parts of at most six: four and three
    assert halves == pytest.approx(cross_entropy(parts, y).item(), rel=1e-12)


def test_dropout_is_off_in_evaluation_even_if_batch_norm_uses_the_examples() -> None:
    model, ((x, y),) = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(72, 3)).double(), some_batches(7)
    first, second = (evaluate(model, state(model)[0], x, y, DATA, settings(buffers="none")) for _ in range(2))
    assert first == second
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_logistic_loss_is_trained_and_measured(momentum: float) -> None:
    model, batches = network(outputs=1), some_batches(4, 3, classes=2)
    weights, _ = state(model)
    training = settings(loss="logistic", momentum=momentum)
    after, moved = compute_by_torch(model, batches, training)
    trained = train(model, weights, batches, training, DATA)
    for name in weights:
        torch.testing.assert_close(trained.update[name], after[name] - weights[name], rtol=0, atol=1e-10)
    x, y = batches[0]
    found = evaluate(model, after, x, y, DATA, training, buffers=moved)
    model.load_state_dict({**after, **moved})
    logit = model.eval()((x - 0.3) / 0.7)[:, 0]
    by_hand = torch.log1p(torch.exp(-torch.where(y == 1, logit, -logit))).mean().item()
    assert found["loss"] == pytest.approx(by_hand, rel=1e-12)
    assert found["accuracy"] == pytest.approx(((logit > 0) == (y == 1)).double().mean().item())


def test_one_step_of_float32_is_still_the_gradient_to_the_last_bit() -> None:
    model, ((x, y),) = network().float(), some_batches(4)
    weights, _ = state(model)
    reference = copy.deepcopy(model).train()
    cross_entropy(reference(DATA.normalise(x.float())), y).backward()
    update = train(model, weights, [(x.float(), y)], settings(learning_rate=1e-4), DATA).update
    assert all(torch.equal(update[name], -1e-4 * p.grad) for name, p in reference.named_parameters() if p.grad is not None)


def test_a_parameter_that_the_loss_does_not_depend_on_stays() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    model.register_parameter("idle", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    update = train(model, state(model)[0], some_batches(2, 2), settings(momentum=0.5), DATA).update
    assert torch.equal(update["idle"], torch.zeros(2))
    assert update["1.weight"].abs().max() > 0
