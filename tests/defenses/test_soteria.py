"""Tests of Soteria, a defense that prunes the last layer's gradient, against scores computed one derivative at a time."""

import numpy as np
import pytest
import torch
from generators import seed_default
from torch import Generator, Tensor, nn
from torch.func import functional_call

from defenses.rules import GradientProblem, LocalStep, TrainingContext, plain
from defenses.soteria import choose_kept, compute_scores, soteria
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

DATA = DataSpec(shape=(3, 16, 16), num_classes=4)


def network(name: str = "lenet_cpl") -> tuple[nn.Module, GradientProblem, dict[str, Tensor]]:
    model = models.build(ModelSpec(name=name), DATA, seed=1).eval()
    problem = GradientProblem(
        model, lambda weights, x: functional_call(model, dict(weights), (DATA.normalise(x),)), nn.functional.cross_entropy
    )
    return model, problem, {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}


def draw_examples(count: int = 3) -> tuple[Tensor, Tensor]:
    rng = Generator().manual_seed(1)
    return torch.rand(count, *DATA.shape, generator=rng), torch.randint(4, (count,), generator=rng)


def features_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return the input of the last layer, by running the layers before it."""
    layers = list(model.children())
    return nn.Sequential(*layers[:-1])(x)


def compute_scores_in_loop(model: nn.Module, x: Tensor) -> Tensor:
    """Compute the scores (R,) with one derivative for each feature of each example."""
    total = 0
    for one in x:
        own = one[None].clone().requires_grad_()
        features = features_of(model, own)[0]
        each = [torch.autograd.grad(f, own, retain_graph=True)[0].norm() / f.detach().abs() for f in features]
        total = total + torch.stack(each)
    return torch.as_tensor(total)


def small() -> tuple[nn.Module, GradientProblem, dict[str, Tensor]]:
    with seed_default(4):
        model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 4)).eval()
    problem = GradientProblem(model, lambda weights, x: functional_call(model, dict(weights), (x,)), nn.functional.cross_entropy)
    return model, problem, {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}


def test_scores_equal_those_of_a_loop_and_the_columns_with_the_smallest_are_zeroed() -> None:
    model, problem, weights = small()
    x, y = draw_examples()
    slow = compute_scores_in_loop(model, x).numpy()
    own = x.clone().requires_grad_()
    fast = compute_scores(features_of(model, own), own).numpy()
    assert np.allclose(fast, slow, rtol=1e-4)
    gradient, _ = soteria(prune=0.75).gradient(problem, weights, x, y, Generator())
    full, _ = plain().gradient(problem, weights, x, y, Generator())
    gone = (gradient["4.weight"] == 0).all(dim=0).numpy()
    assert set(np.flatnonzero(gone)) == set(np.argsort(slow)[:12])
    assert set(np.flatnonzero(gone)) == set(np.flatnonzero(slow < np.percentile(slow, 75)))  # as published
    assert torch.equal(gradient["4.weight"][:, ~gone], full["4.weight"][:, ~gone])
    assert all(torch.equal(gradient[name], full[name]) for name in full if name != "4.weight")


def test_the_right_share_of_many_features_is_pruned() -> None:
    _, problem, weights = network()
    x, y = draw_examples(2)
    gradient, _ = soteria(prune=0.8).gradient(problem, weights, x, y, Generator())
    name, _ = models.find_head(problem.model)
    width = weights[name].shape[1]
    assert width > 128
    assert int((gradient[name] == 0).all(dim=0).sum()) == round(0.8 * width)


def test_a_dead_feature_is_pruned_first_and_has_a_finite_score() -> None:
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    features = torch.stack([x[:, 0] * 3, torch.relu(-x[:, 1]), x[:, 1] / 4], dim=1)
    assert torch.allclose(compute_scores(features, x), torch.tensor([1.0, 0.0, 0.5]))
    assert choose_kept(compute_scores(features, x), 0.34).tolist() == [True, False, True]
    assert choose_kept(torch.tensor([2.0, 1.0, 3.0]), 2 / 3).tolist() == [False, False, True]
    assert choose_kept(torch.ones(4), 0.5).tolist() == [False, False, True, True]


def test_the_network_is_left_as_it_was() -> None:
    model, problem, weights = network()
    before, mode = {n: t.clone() for n, t in model.state_dict().items()}, [m.training for m in model.modules()]
    soteria().gradient(problem, weights, *draw_examples(), Generator())
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    assert [m.training for m in model.modules()] == mode
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    broken = problem._replace(criterion=lambda logits, y: logits.missing)
    with pytest.raises(AttributeError):
        soteria().gradient(broken, weights, *draw_examples(), Generator())
    assert all(not m._forward_pre_hooks for m in model.modules())


def test_batch_norm_moves_its_statistics_once_and_dropout_draws_once() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 4)).train()
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    x, y = draw_examples(4)
    found = []
    for rule in (plain(), soteria(prune=0.5)):
        moved = {n: b.clone() for n, b in model.named_buffers()}

        def forward(weights: dict[str, Tensor], x: Tensor, moved: dict[str, Tensor] = moved) -> Tensor:
            return functional_call(model, {**moved, **weights}, (x,))

        with seed_default(3):
            gradient, _ = rule.gradient(GradientProblem(model, forward, nn.functional.cross_entropy), weights, x, y, Generator())
        found.append((gradient, moved))
    (plainly, moved), (pruned, moved_too) = found
    assert all(torch.equal(moved[n], moved_too[n]) for n in moved)
    assert int(moved["2.num_batches_tracked"]) == 1
    assert all(torch.equal(plainly[n], pruned[n]) for n in plainly if n != "4.weight")
    assert int((pruned["4.weight"] == 0).all(dim=0).sum()) >= 3


def test_another_layer_can_be_defended_and_a_wrong_one_is_named() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Sigmoid(), nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 4))
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    problem = GradientProblem(model, lambda weights, x: functional_call(model, dict(weights), (x,)), nn.functional.cross_entropy)
    gradient, _ = soteria(prune=0.5, layer="3").gradient(problem, weights, *draw_examples(), Generator())
    zeros = {n: int((g == 0).all(dim=0).sum()) for n, g in gradient.items() if g.ndim == 2}
    assert zeros == {"1.weight": 0, "3.weight": 4, "5.weight": 0}
    with pytest.raises(ValueError, match="'2' is not a linear layer of this model"):
        soteria(layer="2").gradient(problem, weights, *draw_examples(), Generator())


def test_the_attacker_compares_the_columns_that_were_sent_or_leaves_the_layer_out() -> None:
    model, problem, weights = small()
    x, y = draw_examples()
    gradient, _ = soteria(prune=0.75).gradient(problem, weights, x, y, Generator())
    full, _ = plain().gradient(problem, weights, x, y, Generator())
    rule = soteria(prune=0.75)
    exact = TrainingContext(model, [LocalStep(3, 0.1)], exact=True)
    channel = rule.channel(exact)
    sent = {name: -0.1 * g for name, g in gradient.items()}
    expected = channel.expect({name: -0.1 * g for name, g in full.items()}, channel.learn(sent))
    assert all(torch.allclose(expected[name], sent[name]) for name in sent)
    assert rule.omitted(exact) == frozenset()
    blurred = exact._replace(exact=False)
    assert rule.omitted(blurred) == {"4.weight"}
    assert rule.channel(blurred).learn(sent) == {}
