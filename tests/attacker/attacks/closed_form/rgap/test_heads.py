"""Tests that features, labels and logit gradients are recovered from the last layer's gradient."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from attacker.attacks.closed_form.rgap.heads import LOSS_EQUATION_MINIMISER, HeadReading, has_rank_above_one, read_heads
from fedsim.models import find_loss

F64 = torch.float64


class Problem(NamedTuple):
    """N last layers, (N, ...) each, with the features and gradients of one example each."""

    weight: Tensor
    bias: Tensor | None
    features: Tensor
    y: Tensor
    k: Tensor
    gradient: Tensor


def draw_problem(outputs: int, *, count: int = 60, spread: float = 1.0, bias: bool = False, seed: int = 0) -> Problem:
    """Draw random last layers. A larger spread makes some predictions more confident, right or wrong."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, outputs, 40, dtype=F64, generator=rng) / 40**0.5
    features = torch.randn(count, 40, dtype=F64, generator=rng) * spread * torch.rand(count, 1, dtype=F64, generator=rng)
    offset = torch.randn(count, outputs, dtype=F64, generator=rng) if bias else None
    y = torch.randint(max(outputs, 2), (count,), generator=rng)
    return make_accurate_problem(weight, offset, features, y)


def make_accurate_problem(weight: Tensor, bias: Tensor | None, features: Tensor, y: Tensor) -> Problem:
    """Return a problem with accurate k = dL/dlogits: p_y - 1 is computed as minus the sum of the others."""
    logits = (weight @ features[..., None])[..., 0] + (0 if bias is None else bias)
    if weight.shape[1] == 1:
        sign = 2.0 * y[:, None] - 1
        k = -sign * torch.sigmoid(-sign * logits)
    else:
        k = logits.softmax(dim=1).scatter(1, y[:, None], 0)
        k = k.scatter(1, y[:, None], -k.sum(dim=1, keepdim=True))
    return Problem(weight, bias, features, y, k, k[..., None] * features[:, None])


def name_loss(outputs: int) -> str:
    return "logistic" if outputs == 1 else "cross_entropy"


def read(p: Problem, *, rounded: bool = False, with_bias: bool = True) -> list[HeadReading]:
    gradient, k = (p.gradient.float().double(), p.k.float().double()) if rounded else (p.gradient, p.k)
    loss = name_loss(p.weight.shape[1])
    return read_heads(loss, p.weight, p.bias, gradient, k if p.bias is not None and with_bias else None)


def measure_errors(head: HeadReading, p: Problem) -> Tensor:
    """Return the relative error (N,) of a solution's features; infinite if the solution is not valid."""
    wrong = (head.features - p.features).norm(dim=1) / p.features.norm(dim=1)
    return torch.where(head.valid & (head.y == p.y), wrong, torch.inf)


def measure_best_error(heads: list[HeadReading], p: Problem) -> Tensor:
    return torch.stack([measure_errors(head, p) for head in heads]).amin(dim=0)


@pytest.mark.parametrize("outputs", [1, 2, 3, 10])
def test_logit_gradients_of_this_file_agree_with_autograd(outputs: int) -> None:
    p = draw_problem(outputs, count=5, bias=True)
    assert p.bias is not None
    for i in range(5):
        logits = (p.weight[i] @ p.features[i] + p.bias[i]).requires_grad_()
        (k,) = torch.autograd.grad(find_loss(name_loss(outputs))(logits[None], p.y[i : i + 1]), logits)
        assert torch.allclose(k, p.k[i], atol=1e-14)


@pytest.mark.parametrize("outputs", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("rounded", [False, True])
def test_with_a_bias_the_only_solution_is_the_true_one(outputs: int, rounded: bool) -> None:
    p = draw_problem(outputs, spread=8.0, bias=True)
    (head,) = read(p, rounded=rounded)
    assert head.y.tolist() == p.y.tolist()
    assert measure_errors(head, p).max() < (1e-6 if rounded else 1e-13)
    assert torch.allclose(head.k, p.k, rtol=1e-6, atol=0)
    assert head.valid.all()
    assert not head.clamped.any()
    assert head.misfit.max() < (1e-5 if rounded else 1e-10)


@pytest.mark.parametrize("outputs", [2, 3, 10, 100])
@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_without_a_bias_one_of_the_solutions_is_true(outputs: int, spread: float, rounded: bool) -> None:
    p = draw_problem(outputs, spread=spread, seed=outputs)
    heads = read(p, rounded=rounded)
    assert measure_best_error(heads, p).max() < (2e-5 if rounded else 1e-9)
    if outputs == 10 and spread <= 1:
        assert len(heads) == 1
        assert torch.allclose(heads[0].k, p.k, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("outputs", [3, 10])
def test_a_bias_whose_gradient_was_not_sent_still_counts_in_the_logits(outputs: int) -> None:
    p = draw_problem(outputs, bias=True, seed=4)
    assert measure_best_error(read(p, with_bias=False), p).max() < 1e-10
    without = p._replace(bias=None)
    assert measure_best_error(read(without), p).median() > 0.01
    zero = read_heads("cross_entropy", p.weight, p.bias, p.gradient, torch.zeros_like(p.k))
    assert measure_best_error(zero, p).max() < 1e-10


def test_a_single_logit_needs_the_gradient_of_its_bias() -> None:
    p = draw_problem(1, bias=True)
    with pytest.raises(ValueError, match=r"gradient of the last layer's bias .* is zero or the client did not send it"):
        read(p, with_bias=False)


def make_confident_problem(outputs: int, short: float, *, seed: int = 0, count: int = 20) -> Problem:
    """Return last layers that predict the label with the probability 1 - `short`."""
    p = draw_problem(outputs, count=count, seed=seed)
    rows = []
    for i in range(count):
        direction = p.features[i] / p.features[i].square().sum()
        wanted = torch.randn(outputs, dtype=F64, generator=torch.Generator().manual_seed(i))
        others = wanted.scatter(0, p.y[i], -torch.inf).logsumexp(0)
        wanted[p.y[i]] = others + np.log1p(-short) - np.log(short)
        rows.append(p.weight[i] + (wanted - p.weight[i] @ p.features[i])[:, None] * direction)
    return make_accurate_problem(torch.stack(rows), None, p.features, p.y)


@pytest.mark.parametrize("outputs", [2, 3, 10, 100])
@pytest.mark.parametrize("short", [1e-8, 1e-5, 1e-2, 0.5, 0.99, 1 - 1e-5, 1 - 1e-8])
@pytest.mark.parametrize("rounded", [False, True])
def test_confidently_right_or_wrong_predictions_are_solved(outputs: int, short: float, rounded: bool) -> None:
    p = make_confident_problem(outputs, short, seed=outputs)
    assert torch.allclose(p.k.gather(1, p.y[:, None]), torch.tensor(-short, dtype=F64), rtol=1e-6)
    assert measure_best_error(read(p, rounded=rounded), p).max() < (1e-4 if rounded else 1e-7)


@pytest.mark.parametrize("outputs", [3, 10])
@pytest.mark.parametrize("short", [1e-9, 1e-7, 1e-6])
def test_confident_prediction_is_solved_although_float32_rounds_the_labels_entry(outputs: int, short: float) -> None:
    p = make_confident_problem(outputs, short)
    lost = (p.k + torch.nn.functional.one_hot(p.y, outputs)).float() - torch.nn.functional.one_hot(p.y, outputs)
    kept = p.k.scatter(1, p.y[:, None], lost.double().gather(1, p.y[:, None]))
    assert (kept - p.k).abs().max() > 1e-2 * short
    assert measure_best_error(read(p._replace(gradient=kept[..., None] * p.features[:, None])), p).max() < 1e-5


@pytest.mark.parametrize("outputs", [3, 10])
def test_labels_row_need_not_have_the_largest_norm(outputs: int) -> None:
    p = make_confident_problem(outputs, 1e-7)
    shortened = p.k.scatter(1, p.y[:, None], p.k.gather(1, p.y[:, None]) / 2)
    assert (shortened.abs().argmax(dim=1) != p.y).any()
    assert measure_best_error(read(p._replace(gradient=shortened[..., None] * p.features[:, None])), p).max() < 1e-5


def make_single_logit(mu: float, y: int, seed: int = 0) -> Problem:
    """Return a last layer without bias whose logit, times the sign of the label, is mu."""
    p = draw_problem(1, count=1, seed=seed)
    logit = (p.weight[0] @ p.features[0]).item()
    return make_accurate_problem(p.weight * ((2 * y - 1) * mu / logit), None, p.features, torch.tensor([y]))


@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("mu", [-30.0, -1.0, -1e-3, 0.4, 1.2, 1.4, 6.0, 30.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_single_logit_has_solutions_of_both_labels_one_of_them_true(mu: float, y: int, rounded: bool) -> None:
    p = make_single_logit(mu, y)
    heads = read(p, rounded=rounded)
    assert measure_best_error(heads, p).item() < (2e-5 if rounded else 1e-9)
    valid = [head for head in heads if bool(head.valid)]
    assert len(valid) == (2 if mu < 0 else 4)
    assert {int(head.y) for head in valid} == {0, 1}
    for head in valid:  # each is an example that has this gradient
        assert torch.allclose(
            make_accurate_problem(p.weight, None, head.features, head.y).gradient, p.gradient, rtol=1e-5, atol=0
        )


def test_first_solution_of_a_single_logit_has_positive_features() -> None:
    for y in (0, 1):
        p = draw_problem(1, count=20, seed=y)
        positive = make_accurate_problem(p.weight, None, p.features.abs(), torch.full((20,), y))
        assert (read(positive)[0].y == y).all()


@pytest.mark.parametrize("seed", range(3))
def test_all_solutions_of_two_logits_have_the_observed_gradient(seed: int) -> None:
    p = draw_problem(2, count=40, seed=seed)
    heads = read(p)
    for head in heads:
        again = make_accurate_problem(p.weight, None, head.features, head.y)
        assert torch.allclose(again.gradient[head.valid], p.gradient[head.valid], rtol=1e-6, atol=1e-12)
    right = p.k.abs().amax(dim=1) < 0.5  # then mu > 0, and there is a twin
    count = torch.stack([head.valid for head in heads]).sum(dim=0)
    assert (count[right] == 4).all()
    assert (count[~right] == 2).all()


def test_nearly_equal_twins_are_found() -> None:
    mus = LOSS_EQUATION_MINIMISER + torch.linspace(-0.02, 0.02, 41, dtype=F64)
    p = draw_problem(2, count=41, seed=8)
    logit = ((p.weight[:, 1] - p.weight[:, 0]) * p.features).sum(dim=1)
    y = torch.ones(41, dtype=torch.long)
    p = make_accurate_problem(p.weight * (mus / logit)[:, None, None], None, p.features, y)
    assert measure_best_error(read(p), p).max() < 1e-5


def make_problems_of_lost_labels() -> Problem:
    """Return problems of three logits; for every second one the label's entry of k is rounded to zero."""
    p = make_confident_problem(3, 1e-9, count=20)
    p = make_accurate_problem(p.weight, None, p.features, torch.zeros(20, dtype=torch.long))
    kept = p.k.scatter(1, p.y[:, None], 0)
    return join_problems(p._replace(k=kept, gradient=kept[..., None] * p.features[:, None]), draw_problem(3, count=20, seed=5))


def join_problems(one: Problem, other: Problem) -> Problem:
    return Problem(*[None if a is None or b is None else torch.cat([a, b]) for a, b in zip(one, other, strict=True)])


def make_problems_at_turn(count: int) -> Problem:
    """Return a problem of two logits at the point where both solutions (twins) coincide."""
    p = draw_problem(2, count=count, seed=1)
    logit = ((p.weight[:, 1] - p.weight[:, 0]) * p.features).sum(dim=1)
    return make_accurate_problem(
        p.weight * (LOSS_EQUATION_MINIMISER / logit)[:, None, None], None, p.features, torch.ones(count, dtype=torch.long)
    )


def make_problems_beyond_turn(count: int) -> Problem:
    """Return problems of two logits with a gradient that no example has."""
    p = make_problems_at_turn(count)
    return p._replace(gradient=3 * p.gradient)


TOGETHER = {
    "twins": draw_problem(2, count=40, spread=3.0, seed=1),
    "lost labels": make_problems_of_lost_labels(),
    "beside none": join_problems(make_problems_beyond_turn(20), draw_problem(2, count=20, spread=3.0, seed=1)),
}


@pytest.mark.parametrize("p", TOGETHER.values(), ids=TOGETHER.keys())
def test_no_solution_is_returned_twice(p: Problem) -> None:
    heads = read(p)
    for i in range(40):
        found = [(int(h.y[i]), h.features[i]) for h in heads if bool(h.valid[i])]
        assert found
        for a, (y, f) in enumerate(found):
            for label, g in found[:a]:
                assert label != y or (f - g).norm() > 1e-6 * f.norm()


def test_batched_heads_are_solved_like_single_ones() -> None:
    p = draw_problem(3, count=12, spread=6.0, seed=2)
    heads = read(p)
    for i in range(12):
        alone = read(Problem(*[t if t is None else t[i : i + 1] for t in p]))
        for rank, head in enumerate(heads):
            assert bool(head.valid[i]) == (rank < len(alone) and bool(alone[rank].valid))
            if bool(head.valid[i]):
                assert torch.allclose(head.features[i], alone[rank].features[0], rtol=1e-10)


@pytest.mark.parametrize("outputs", [1, 10])
def test_one_weight_is_shared_by_all_heads(outputs: int) -> None:
    p = draw_problem(outputs, count=6, seed=3)
    shared = make_accurate_problem(p.weight[:1].expand_as(p.weight), None, p.features, p.y)
    few = read_heads(name_loss(outputs), p.weight[:1], None, shared.gradient, None)
    many = read_heads(name_loss(outputs), shared.weight, None, shared.gradient, None)
    assert all(torch.equal(a.features, b.features) for a, b in zip(few, many, strict=True))
    assert measure_best_error(few, shared).max() < 1e-10


def test_gradient_that_no_example_has_is_clamped_to_the_nearest() -> None:
    p = make_single_logit(LOSS_EQUATION_MINIMISER, 1)
    far = read_heads("logistic", p.weight, None, 3 * p.gradient, None)
    assert far[0].clamped.all()
    assert [bool(h.valid) for h in far] == [True, True, False, False]
    heads = read(make_problems_beyond_turn(10))
    assert heads[0].clamped.all()
    assert heads[0].valid.all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [3, 10])
def test_gradient_of_another_loss_has_a_large_misfit(outputs: int, bias: bool) -> None:
    p = draw_problem(outputs, bias=bias, seed=6)
    logits = (p.weight @ p.features[..., None])[..., 0] + (0 if p.bias is None else p.bias)
    squared = 2 * (logits - torch.nn.functional.one_hot(p.y, outputs)) / outputs  # of the mean squared error
    heads = read(p._replace(k=squared, gradient=squared[..., None] * p.features[:, None]))
    assert heads[0].misfit.median() > 0.1
    assert read(p)[0].misfit.max() < 1e-6
    half = read(p._replace(k=p.k / 2, gradient=p.gradient / 2))[0]  # of a batch of two whose second example has no gradient
    assert not bias or half.misfit.min() > 0.1


def test_single_logit_with_other_weights_has_a_large_misfit() -> None:
    p = draw_problem(1, bias=True, spread=3.0)
    assert read(p)[0].misfit.max() < 1e-12
    assert read(p._replace(weight=-p.weight))[0].misfit.median() > 0.1


@pytest.mark.parametrize("outputs", [3, 10, 100])
def test_one_example_is_told_from_several_at_any_scale(outputs: int) -> None:
    p = draw_problem(outputs, count=30, seed=7)
    for scale in (1e-10, 1.0, 1e10):
        assert not has_rank_above_one(scale * p.gradient.float().double()).any()
        pairs = scale * (p.gradient[:15] + p.gradient[15:])
        assert has_rank_above_one(pairs).float().mean() > 0.9


def test_one_or_two_logits_and_zeros_never_show_several_examples() -> None:
    for outputs in (1, 2):
        gradient = draw_problem(outputs, count=8).gradient
        assert has_rank_above_one(gradient[:4] + gradient[4:]).tolist() == [False] * 4
    assert has_rank_above_one(torch.zeros(2, 3, 9)).tolist() == [False] * 2


def test_where_selects_between_two_solutions_by_example() -> None:
    p = draw_problem(1, count=3)
    a, b, *_ = read(p)
    mixed = a.where(torch.tensor([True, False, True]), b)
    assert torch.equal(mixed.features[[0, 2]], a.features[[0, 2]])
    assert torch.equal(mixed.features[1], b.features[1])
    assert mixed.y.tolist() == [a.y[0], b.y[1], a.y[2]]
