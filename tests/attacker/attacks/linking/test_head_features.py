"""Tests that features computed from the last layer's gradient equal the true ones."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from attacker.attacks.linking import HeadFeatures, solve_head_features


class Layer:
    """A last layer with the input features of a batch, and its gradient."""

    def __init__(self, labels: list[int], *, classes: int = 12, width: int = 20, scale: float = 0.2, bias: bool = True) -> None:
        rng = torch.Generator().manual_seed(7)
        self.labels = torch.tensor(labels)
        self.features = torch.rand(len(labels), width, generator=rng)
        self.weight = (scale * torch.randn(classes, width, generator=rng)).requires_grad_()
        self.bias = (scale * torch.randn(classes, generator=rng)).requires_grad_() if bias else None
        logits = torch.nn.functional.linear(self.features, self.weight, self.bias)
        parts = [self.weight, *([] if self.bias is None else [self.bias])]
        self.gradient = torch.autograd.grad(cross_entropy(logits, self.labels), parts)

    def read(self, labels: Tensor | None = None, *, recount: bool = False, sign: float = 1.0) -> HeadFeatures:
        gradient, bias_gradient = (*self.gradient, None)[:2]
        return solve_head_features(
            sign * gradient,
            None if bias_gradient is None else sign * bias_gradient,
            self.labels if labels is None else labels,
            weight=self.weight.detach(),
            bias=None if self.bias is None else self.bias.detach(),
            rng=torch.Generator().manual_seed(0),
            recount=recount,
        )


def measure_largest_distance(found: Tensor, true: Tensor) -> float:
    """Return the largest relative distance of a true feature vector from the nearest one found."""
    return float((torch.cdist(true.double(), found).min(dim=1).values / true.norm(dim=1)).max())


@pytest.mark.parametrize("scale", [0.05, 0.5], ids=["hardly trained", "sure of its answers"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("labels", [[3], [0, 5, 7, 9], [2, 2, 5, 7], [4, 4, 4, 1]], ids=str)
def test_features_are_recovered_also_where_labels_repeat(labels: list[int], bias: bool, scale: float) -> None:
    layer = Layer(labels, bias=bias, scale=scale)
    found = layer.read()
    assert found.misfit < 1e-5
    assert measure_largest_distance(found.features, layer.features) < 2e-3
    assert not found.shared.any()


def test_features_are_in_the_order_of_the_labels() -> None:
    layer = Layer([9, 0, 7, 5])
    assert torch.allclose(layer.read().features.float(), layer.features, atol=1e-4)


def test_too_many_examples_of_one_label_share_their_mean() -> None:
    layer = Layer([0] * 10 + [3] * 9 + [5], classes=40, width=60, scale=0.01)
    found = layer.read()
    assert found.shared.tolist() == [True] * 19 + [False]
    mean = layer.features[:10].mean(dim=0)
    assert torch.nn.functional.cosine_similarity(found.features[0].float(), mean, dim=0) > 0.999
    assert torch.equal(found.features[0], found.features[9])
    assert not torch.allclose(found.features[0], found.features[10])


def test_recount_corrects_a_wrong_label() -> None:
    layer = Layer([1, 4, 8, 8], scale=0.5)
    wrong = torch.tensor([1, 4, 6, 8])
    assert layer.read(wrong).misfit > 1e-3
    found = layer.read(wrong, recount=True)
    assert found.labels.tolist() == [1, 4, 8, 8]
    assert found.misfit < 1e-5
    assert measure_largest_distance(found.features, layer.features) < 2e-3


def test_recount_keeps_right_labels() -> None:
    assert Layer([9, 0, 7, 5]).read(recount=True).labels.tolist() == [9, 0, 7, 5]


def test_a_gradient_of_the_wrong_sign_does_not_fit() -> None:
    assert Layer([0, 5, 7, 9], scale=0.5).read(sign=-1).misfit > 0.05


def test_single_logit_gives_one_row_for_all_examples() -> None:
    features, slope = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([0.3, -0.6, 0.4])
    rng, weight = torch.Generator(), torch.zeros(1, 5)

    def read(count: int) -> HeadFeatures:
        gradient = (slope[:count, None] * features[:count]).mean(dim=0)[None]
        bias = slope[:count].mean()[None]
        return solve_head_features(gradient, bias, torch.zeros(count).long(), weight=weight, bias=torch.zeros(1), rng=rng)

    assert torch.allclose(read(1).features.float(), features[:1])
    assert (read(1).shared.tolist(), read(3).shared.tolist()) == ([False], [True] * 3)


def test_wrong_shapes_labels_and_values_are_refused() -> None:
    rng, weight, bias = torch.Generator(), torch.zeros(3, 5), torch.zeros(3)
    y = torch.tensor([0])
    with pytest.raises(ValueError, match="gradient must have the weight's shape"):
        solve_head_features(torch.zeros(3, 4), bias, y, weight=weight, bias=bias, rng=rng)
    with pytest.raises(ValueError, match="each from 0 to 2"):
        solve_head_features(weight, bias, torch.tensor([3]), weight=weight, bias=bias, rng=rng)
    with pytest.raises(ValueError, match="contain NaN or infinite values"):
        solve_head_features(torch.full((3, 5), torch.nan), bias, y, weight=weight, bias=bias, rng=rng)


def test_gradient_of_zeros_gives_finite_features() -> None:
    found = solve_head_features(
        torch.zeros(3, 5),
        torch.zeros(3),
        torch.tensor([0, 1]),
        weight=torch.ones(3, 5),
        bias=torch.zeros(3),
        rng=torch.Generator(),
    )
    assert found.features.isfinite().all()


def test_estimated_error_is_larger_for_rows_that_hardly_differ() -> None:
    """Two of four examples share a label and have equal predictions, so that they differ only by rounding."""
    rng = torch.Generator().manual_seed(4)
    features, weight = (torch.randn(n, 64, generator=rng, dtype=torch.float64) for n in (4, 10))
    features, weight = 1 + 0.05 * features, 0.05 * weight
    weight[8] += 0.15
    labels = torch.tensor([0, 0, 1, 2])
    a = ((features @ weight.T).softmax(dim=1) - torch.nn.functional.one_hot(labels, 10)) / 4
    found = solve_head_features(
        (a.T @ features).float(), a.sum(dim=0).float(), labels, weight=weight, bias=torch.zeros(10), rng=rng
    )
    distance = torch.stack([(found.features[i] - features).norm(dim=1)[labels == labels[i]].min() for i in range(4)])
    assert float(found.error[:2].min()) > 3 * float(found.error[2:].max())
    assert bool((distance <= 10 * found.error).all())


def test_labels_are_counted_even_if_noise_makes_all_counts_negative() -> None:
    layer = Layer([0, 1, 0, 1, 1], classes=2)
    layer.gradient = (layer.gradient[0], torch.full((2,), 9.0))
    assert len(layer.read(recount=True).labels) == 5
