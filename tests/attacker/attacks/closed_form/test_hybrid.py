"""Tests that H-GAP chooses between two answers by a criterion without reference."""

from collections.abc import Callable

import pytest
from generators import seeded
from torch import Tensor

from attacker.attacks import Case, hgap, rgap

Make = Callable[..., tuple[Case, Tensor, Tensor]]


@pytest.mark.parametrize("criterion", ["roughness", "total_variation", "outside", "gradient"])
def test_exact_closed_form_is_preferred_to_a_search_of_two_steps(criterion: str, image_case: Make) -> None:
    case, x, _ = image_case()
    (answer,) = hgap(criterion=criterion, steps=2)([case], rng=seeded())
    assert answer.route == "layers"
    assert float((answer.x - x).square().mean()) < 1e-6
    assert any(
        note.startswith(f"the answer of layers is kept, because its score by the criterion {criterion} ") for note in answer.notes
    )
    assert answer.iterations > 0  # the search ran as well


def test_search_is_preferred_to_a_closed_form_that_failed(image_case: Make) -> None:
    """Noise, amplified by inverse activations, makes the closed form rough; even an unfinished search is smoother."""
    case, x, _ = image_case(defense="gaussian(0.001)")
    (closed,), (answer,) = rgap()([case], rng=seeded()), hgap(steps=60)([case], rng=seeded())
    errors = [float((found.x - x).square().mean()) for found in (closed, answer)]
    assert answer.route == "optimisation"
    assert errors[1] < errors[0]


def test_an_unknown_criterion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown criterion 'beauty'\. Known: roughness, total_variation, outside, gradient"):
        hgap(criterion="beauty")
