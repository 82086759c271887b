"""Tests that the simulated gradient at the true examples is the client's, also with batch norm, a single logit or dropout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from generators import seed_default
from observations import make_observation
from torch import Tensor, nn
from torch.func import vmap

from attacker.attacks import Case, cpl, dlg, find_unmet, inverting_gradients
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.attacks.needs import Need
from attacker.attacks.simulation.client import build_network, convert_to_gradient, get_buffers
from attacker.attacks.simulation.gradients import build_gradient
from fedsim import models
from fedsim.models import building
from fedsim.recording import DataSpec, ModelSpec, Observation, Training
from fedsim.training.local import train

DATA = DataSpec(shape=(1, 6, 6), num_classes=3, mean=(0.4,), std=(0.5,))
TWO = DataSpec(shape=(1, 6, 6), num_classes=2, mean=(0.4,), std=(0.5,))


def normed(shape: tuple[int, ...], num_classes: int, dropout: float = 0.0) -> nn.Module:
    """Return a network of a convolution and a linear layer, each with batch norm."""
    layers = [nn.Conv2d(shape[0], 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Dropout(dropout), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, num_classes))


@pytest.fixture(autouse=True)
def _normed_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(building._ADMITTED, "normed", normed)


def draw_statistics(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return running statistics different from 0 and 1, with small variances, so that gradients are large."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {name: 0.5 * torch.rand(b.shape, generator=rng) + 0.02 for name, b in model.named_buffers()}
    return {name: drawn[name] if b.is_floating_point() else b + seed for name, b in model.named_buffers()}


def draw_examples(count: int, seed: int = 5, classes: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 3, 3, generator=rng).repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    return x, torch.randint(classes, (count,), generator=rng).sort().values


def observe_client(
    batch: tuple[Tensor, Tensor],
    *,
    mode: str = "eval",
    buffers: dict[str, Tensor] | None = None,
    name: str = "normed",
    data: DataSpec = DATA,
    loss: str = "cross_entropy",
    seed: int = 0,
    client: str = "c",
    **arguments: Any,
) -> Observation:
    """Return the observation of a client that takes one step on `batch`."""
    spec = ModelSpec(name=name, arguments=arguments)
    model = models.build(spec, data, seed=seed)
    weights = {key: p.detach() for key, p in model.named_parameters()}
    size = len(batch[1])
    training = Training(learning_rate=0.1, batch_size=size, steps=1, loss=loss, mode=mode, buffers="shared")
    trained = train(model, weights, [batch], training, data, buffers=buffers or {})
    facts = {"model": spec, "data": data, "training": training, "buffers": buffers or {}}
    return make_observation(trained.update, weights, client=client, **facts)


def simulate_gradient(observation: Observation, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model = build_network(observation)
    buffers, _ = get_buffers(model, [observation])
    return build_gradient(model, observation.data, observation.training.loss)(observation.weights, x, y, buffers)


def seen(observation: Observation) -> dict[str, Tensor]:
    return convert_to_gradient(observation.update, observation.weights, observation.training, 1)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


STATISTICS = draw_statistics(normed((1, 6, 6), 3), 2)


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("buffers", [None, STATISTICS], ids=["own", "sent"])
def test_simulated_gradient_at_the_true_examples_is_the_clients(mode: str, buffers: dict[str, Tensor] | None) -> None:
    x, y = draw_examples(4)
    observation = observe_client((x, y), mode=mode, buffers=buffers)
    assert_same(simulate_gradient(observation, x, y), seen(observation))
    assert_same(simulate_gradient(observation, x, torch.nn.functional.one_hot(y, 3).float()), seen(observation))
    other = simulate_gradient(observation, x.flip(0), y)
    assert not torch.allclose(other["8.weight"], seen(observation)["8.weight"], rtol=1e-2)


def test_sent_statistics_matter_in_eval_mode_only() -> None:
    x, y = draw_examples(4)
    for mode, same in (("eval", False), ("train", True)):
        own, sent = (seen(observe_client((x, y), mode=mode, buffers=b))["0.weight"] for b in (None, STATISTICS))
        assert torch.allclose(own, sent, rtol=1e-3) == same


@pytest.mark.parametrize("name", ["cnn6", "mlp", "normed"])
@pytest.mark.parametrize("count", [1, 4])
def test_simulated_logistic_gradient_at_the_true_examples_is_the_clients(name: str, count: int) -> None:
    x, y = draw_examples(count, classes=2)
    arguments = {} if name == "cnn6" else {"outputs": 1}
    observation = observe_client((x, y), name=name, data=TWO, loss="logistic", **arguments)
    assert_same(simulate_gradient(observation, x, y), seen(observation))
    assert_same(simulate_gradient(observation, x, torch.nn.functional.one_hot(y, 2).float()), seen(observation))


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_simulation_changes_no_model_or_observation(mode: str) -> None:
    x, y = draw_examples(4)
    observation = observe_client((x, y), mode=mode, buffers={name: b.clone() for name, b in STATISTICS.items()})
    model = build_network(observation)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    buffers, _ = get_buffers(model, [observation])
    build_gradient(model, DATA)(observation.weights, x, y, buffers)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(torch.equal(b, STATISTICS[name]) for name, b in observation.buffers.items())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batched_rounds_are_simulated_with_their_own_statistics(mode: str) -> None:
    x, y = draw_examples(4)
    observations = [observe_client((x, y), mode=mode, buffers=draw_statistics(normed((1, 6, 6), 3), s), seed=s) for s in (2, 3)]
    (batch,) = CaseBatch(cpl(), [Case((o,)) for o in observations]).views
    assert batch.same_buffers == (mode == "train")
    dims = (0, None, None, None if batch.same_buffers else 0)
    together = vmap(batch.gradient, in_dims=dims)(batch.weights, x, y, batch.buffers)
    for i, observation in enumerate(observations):
        assert_same({name: g[i] for name, g in together.items()}, seen(observation))
        assert_same({name: g[i] for name, g in batch.gradients.items()}, seen(observation))


def test_equal_statistics_are_stored_once_and_missing_ones_refused() -> None:
    observation = observe_client(draw_examples(2), buffers=STATISTICS)
    model = build_network(observation)
    kept, same = get_buffers(model, [observation, observe_client(draw_examples(3), buffers=dict(STATISTICS))])
    assert same
    assert kept["1.running_mean"].shape == (4,)
    own, _ = get_buffers(model, [observe_client(draw_examples(2))])
    assert torch.equal(own["1.running_var"], torch.ones(4))
    stacked, same = get_buffers(model, [observation, observe_client(draw_examples(2))])
    assert not same
    assert stacked["1.running_mean"].shape == (2, 4)
    lacking = {name: b for name, b in STATISTICS.items() if name != "1.running_var"}
    with pytest.raises(ValueError, match=r"buffers lack 1\.running_var"):
        get_buffers(model, [replace(observation, buffers=lacking)])


@pytest.mark.parametrize(("mode", "buffers"), [("eval", STATISTICS), ("eval", None), ("train", None)])
@pytest.mark.parametrize(
    "attack", [cpl(init="uniform", steps=8), inverting_gradients(steps=160, tv=0.0), dlg(steps=8)], ids=lambda a: a.name
)
def test_attacks_lower_the_loss_on_models_with_batch_norm(attack: Any, mode: str, buffers: dict[str, Tensor] | None) -> None:
    x, y = draw_examples(4)
    known = None if attack.labels.rule is None else y  # inferred labels of several examples may be wrong
    case = Case((observe_client((x, y), mode=mode, buffers=buffers),), known_labels=known)
    assert find_unmet(attack, case) == []
    (found,) = attack([case], rng=torch.Generator().manual_seed(1))
    assert found.x.shape == x.shape
    assert torch.isfinite(found.loss).all()
    assert found.loss[-1] < found.loss[0]
    guess = torch.rand(x.shape, generator=torch.Generator().manual_seed(2))
    assert found.loss[-1] < 0.1 * attack.objective.distance(
        simulate_gradient(case.observations[0], guess, y), seen(case.observations[0])
    )
    (null,) = attack.null()([case], rng=torch.Generator().manual_seed(1))
    assert null.explained.max() == 0
    assert null.confidence.max() < 0.05


def test_one_example_is_recovered_through_batch_norm_in_eval_mode() -> None:
    cases, truths = [], []
    for s in (2, 3):
        x, y = draw_examples(1, seed=s)
        buffers = draw_statistics(normed((1, 6, 6), 3), s)
        cases.append(Case((observe_client((x, y), buffers=buffers, seed=s, client=f"c{s}", name="normed"),)))
        truths.append((x, y))
    found = cpl(steps=60, restarts=3)(cases, rng=torch.Generator().manual_seed(0))
    for answer, (x, y) in zip(found, truths, strict=True):
        assert torch.equal(answer.y, y)
        assert answer.explained.item() > 0.999
        assert (answer.x - x).square().mean() < 5e-3


@pytest.mark.parametrize("label", [0, 1])
def test_one_example_with_a_single_logit_is_recovered_with_its_label(label: int) -> None:
    x, y = draw_examples(1)[0], torch.tensor([label])
    observation = observe_client((x, y), name="mlp", data=TWO, loss="logistic", outputs=1, hidden=[32])
    (found,) = cpl(steps=60, restarts=3)([Case((observation,))], rng=torch.Generator().manual_seed(0))
    assert torch.equal(found.y, y)
    assert found.explained.item() > 0.99
    assert (found.x - x).square().mean() < 1e-2


def test_soft_labels_with_a_single_logit_can_be_searched_for() -> None:
    observation = observe_client(draw_examples(2, classes=2), name="mlp", data=TWO, loss="logistic", outputs=1, hidden=[32])
    (found,) = dlg(steps=8)([Case((observation,))], rng=torch.Generator().manual_seed(0))
    assert found.loss[-1] < 0.5 * found.loss[0]


def test_labels_of_several_examples_with_a_single_logit_are_counted() -> None:
    x, y = draw_examples(3, classes=2)
    observation = observe_client((x, y), name="mlp", data=TWO, loss="logistic", outputs=1)
    (found,) = cpl(steps=2)([Case((observation,))], rng=torch.Generator().manual_seed(0))
    assert found.y.sum() == y.sum()
    assert 0 < y.sum() < 3


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_dropout_is_switched_off_in_simulations(mode: str) -> None:
    x, y = draw_examples(2)
    with seed_default(0):
        observation = observe_client((x, y), mode=mode, dropout=0.5)
    assert_same(simulate_gradient(observation, x, y), simulate_gradient(observation, x, y))
    plain = seen(observe_client((x, y), mode=mode))
    assert_same(simulate_gradient(observation, x, y), plain)
    if mode == "eval":  # in which the client's dropout was off too
        assert_same(plain, seen(observation))
    first, again = (
        cpl(steps=3)([Case((observation,)), Case((observation,))], rng=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert first[0].loss[-1] < first[0].loss[0]
    assert torch.equal(first[0].x, again[0].x)


def noisy(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1)) + 1e-3 * torch.randn(len(x), num_classes)

    return Noisy(36, num_classes)


def test_model_with_random_outputs_can_be_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(building._ADMITTED, "noisy", noisy)
    observation = observe_client(draw_examples(1), name="noisy")
    (found,) = cpl(steps=3)([Case((observation,))], rng=torch.Generator().manual_seed(0))
    assert torch.isfinite(found.loss).all()


def test_linear_head_is_detected_without_building_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((replace(observe_client(draw_examples(1), name="mlp"), model=ModelSpec(name="resnet18")),))
    monkeypatch.setattr(models, "build", None)
    assert Need.LINEAR_HEAD.is_met(case)
