"""Tests of `find_mixed_labels` on gradients that are made by hand, and on those of losses other than cross entropy."""

import pytest
import torch
from torch.nn import functional

from attacker.attacks.closed_form.linear.label_gradients import find_mixed_labels

CLASSES, WIDTH = 6, 20


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of one example, (CLASSES,), and the weights between logits and neurons, (CLASSES, WIDTH)."""
    rng = torch.Generator().manual_seed(0)
    return (0.5 * torch.randn(CLASSES, generator=rng)).softmax(dim=0).double(), torch.randn(
        CLASSES, WIDTH, generator=rng, dtype=torch.float64
    )


@pytest.mark.parametrize(
    ("target", "mixed"),
    [
        ((0.3, 0.7, 0, 0, 0, 0), True),
        ((0, 0, 0.5, 0, 0, 0.5), True),
        ((1, 0, 0, 0, 0, 0), False),
        ((0.99, 0.01, 0, 0, 0, 0), False),
        ((0.4, 0.3, 0.3, 0, 0, 0), False),
        ((0.95, 0.01, 0.01, 0.01, 0.01, 0.01), False),
    ],
)
@pytest.mark.parametrize("factor", [1.0, 0.2])
def test_only_two_labels_of_comparable_weight_are_mixed(target: tuple[float, ...], mixed: bool, factor: float) -> None:
    """factor: of the gradient, as of an undeclared learning rate."""
    p, weights = draw()
    expected = ((p - torch.eye(CLASSES)) @ weights)[:, None]
    part = factor * ((p - torch.tensor(target)) @ weights)[None]
    assert find_mixed_labels(expected, part).tolist() == [mixed]


def test_a_negative_weight_is_no_label() -> None:
    p, weights = draw()
    expected = ((p - torch.eye(CLASSES)) @ weights)[:, None]
    assert find_mixed_labels(expected, 1.5 * expected[0] - 0.5 * expected[1]).tolist() == [False]


def test_mean_squared_error_is_not_taken_for_two_labels() -> None:
    rng = torch.Generator().manual_seed(1)
    logits, y = torch.randn(40, CLASSES, generator=rng, dtype=torch.float64), torch.arange(40) % CLASSES
    weights = draw()[1]
    expected = torch.stack(
        [(logits.softmax(dim=1) - functional.one_hot(torch.tensor(k), CLASSES)) @ weights for k in range(CLASSES)]
    )
    part = (logits - functional.one_hot(y, CLASSES)) @ weights
    assert int(find_mixed_labels(expected, part).sum()) == 0


def test_two_classes_have_no_pairs_to_compare() -> None:
    assert find_mixed_labels(torch.ones(2, 1, 3), torch.ones(1, 3)).tolist() == [False]
