"""Tests of losses against hand-computed values and textbook formulas, also for two classes with a single logit."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedsim.models import find_loss, predict_classes, predict_probabilities


def draw_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cross_entropy_is_minus_the_mean_log_probability() -> None:
    logits, y = draw_logits(4, 3), torch.tensor([0, 2, 1, 2])
    by_hand = [-math.log(row.exp()[c] / row.exp().sum()) for row, c in zip(logits, y, strict=True)]
    assert find_loss("cross_entropy")(logits, y).item() == pytest.approx(sum(by_hand) / 4)


def test_logistic_is_log_of_one_plus_exp_of_minus_mu() -> None:
    logits, y = torch.tensor([[1.5], [-0.5], [2.0]]), torch.tensor([1, 1, 0])
    by_hand = [math.log(1 + math.exp(-mu)) for mu in (1.5, -0.5, -2.0)]
    assert find_loss("logistic")(logits, y).item() == pytest.approx(sum(by_hand) / 3)


def test_the_slope_of_the_logistic_loss_is_that_of_rgap() -> None:
    """dl/dmu = -1 / (1 + exp(mu)), with mu = -logit for class 0."""
    logit = torch.tensor([[0.7]], dtype=torch.float64)
    for y, sign in ((0, -1), (1, 1)):
        slope = grad(lambda z, y=y: find_loss("logistic")(z, torch.tensor([y])))(logit)
        assert slope.item() == pytest.approx(-sign / (1 + math.exp(sign * 0.7)))


@pytest.mark.parametrize("logit", [-800.0, -40.0, 40.0, 800.0])
def test_logistic_is_accurate_far_from_zero(logit: float) -> None:
    value = find_loss("logistic")(torch.tensor([[logit]], dtype=torch.float64), torch.tensor([1])).item()
    assert value == pytest.approx(math.log1p(math.exp(-logit)) if logit > 0 else -logit + math.exp(logit), rel=1e-14)


def test_logistic_is_cross_entropy_of_that_logit_and_zero() -> None:
    logits, hard = draw_logits(5, 1), torch.tensor([0, 1, 1, 0, 1])
    soft = draw_logits(5, 2, seed=1).softmax(1)
    for y in (hard, soft):
        two = torch.cat([torch.zeros_like(logits), logits], dim=1)
        torch.testing.assert_close(find_loss("logistic")(logits, y), find_loss("cross_entropy")(two, y))


@pytest.mark.parametrize(("name", "logits"), [("cross_entropy", draw_logits(4, 2)), ("logistic", draw_logits(4, 1))])
def test_one_hot_labels_give_the_loss_of_class_indices(name: str, logits: Tensor) -> None:
    y = torch.tensor([1, 0, 0, 1])
    soft = torch.nn.functional.one_hot(y, 2).double()
    torch.testing.assert_close(find_loss(name)(logits, soft), find_loss(name)(logits, y))


@pytest.mark.parametrize(("name", "width"), [("cross_entropy", 2), ("logistic", 1)])
def test_losses_can_be_differentiated_twice_and_for_many_problems_at_once(name: str, width: int) -> None:
    logits, y = draw_logits(3, 4, width), torch.tensor([[0, 1, 1, 0]] * 3)

    def steepness(z: Tensor, y: Tensor) -> Tensor:
        return grad(find_loss(name))(z, y).square().sum()

    together = vmap(grad(steepness))(logits, y)
    for i in range(3):
        z = logits[i].clone().requires_grad_()
        (first,) = torch.autograd.grad(find_loss(name)(z, y[i]), z, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), z)
        torch.testing.assert_close(together[i], second)


def test_a_wrong_number_of_logits_is_refused_with_advice() -> None:
    y = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="single logit, and this model has 2; give the model outputs = 1"):
        find_loss("logistic")(draw_logits(2, 2), y)
    with pytest.raises(ValueError, match=r"cross_entropy cannot use; set training\.loss to 'logistic'"):
        find_loss("cross_entropy")(draw_logits(2, 1), y)
    with pytest.raises(ValueError, match=r"unknown loss 'hinge'\. Known: cross_entropy, logistic"):
        find_loss("hinge")


def test_predictions_and_probabilities_support_a_single_logit() -> None:
    single = torch.tensor([[math.log(3.0)], [-math.log(4.0)]])
    torch.testing.assert_close(predict_probabilities(single), torch.tensor([[0.25, 0.75], [0.8, 0.2]]))
    assert predict_classes(single).tolist() == [1, 0]
    several = draw_logits(6, 3)
    torch.testing.assert_close(predict_probabilities(several), several.softmax(1))
    assert torch.equal(predict_classes(several), several.argmax(1))
    assert predict_classes(single).dtype == predict_classes(several).dtype == torch.int64
