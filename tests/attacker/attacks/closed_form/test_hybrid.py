"""Tests of the criteria without reference by which H-GAP chooses between two answers, and of its choice."""

import numpy as np
import pytest
import torch
from generators import seeded
from observations import make_image_case
from scipy.ndimage import correlate

from attacker.attacks import hgap, rgap
from attacker.attacks.closed_form.hybrid import CRITERIA, measure_roughness, total_variation
from attacker.attacks.confidence.evidence import measure_outside


def test_roughness_is_the_distance_to_the_mean_of_the_neighbours_that_exist() -> None:
    x = torch.rand(2, 3, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for image in x.numpy():
        off = []
        for channel in image:
            count = correlate(np.ones_like(channel), np.ones((3, 3)), mode="constant")
            off.append(channel - correlate(channel, np.ones((3, 3)), mode="constant") / count)
        expected.append(np.mean(np.square(off)))
    assert measure_roughness(x).numpy() == pytest.approx(expected)


def test_total_variation_of_a_step_is_its_height() -> None:
    x = torch.zeros(1, 1, 2, 4)
    x[..., 2:] = 1
    assert float(total_variation(x)) == pytest.approx(1 / 3)
    assert float(total_variation(x.mT)) == pytest.approx(1 / 3)


def test_only_what_is_beyond_the_range_of_data_is_outside() -> None:
    x = torch.tensor([[[[0.0, 1.0], [-0.5, 1.5]]], [[[0.2, 0.4], [0.6, 1.0]]]])
    assert measure_outside(x).tolist() == pytest.approx([0.125, 0.0])


@pytest.mark.parametrize("name", sorted(CRITERIA))
def test_every_criterion_prefers_an_image_to_noise(name: str) -> None:
    ramp = torch.linspace(0, 1, 16).expand(1, 3, 16, 16)
    noise = 2 * torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    assert float(CRITERIA[name](ramp)) < float(CRITERIA[name](noise))


@pytest.mark.parametrize("criterion", ["roughness", "total_variation", "outside", "gradient"])
def test_exact_closed_form_is_preferred_to_a_search_of_two_steps(criterion: str) -> None:
    case, x, _ = make_image_case()
    (answer,) = hgap(criterion=criterion, steps=2)([case], rng=seeded())
    assert answer.route == "layers"
    assert float((answer.x - x).square().mean()) < 1e-6
    assert any(
        note.startswith(f"the answer of layers is kept, because its score by the criterion {criterion} ") for note in answer.notes
    )
    assert answer.iterations > 0  # the search ran as well


def test_search_is_preferred_to_a_closed_form_that_failed() -> None:
    """Noise, amplified by inverse activations, makes the closed form rough; even an unfinished search is smoother."""
    case, x, _ = make_image_case(defense="gaussian(0.001)")
    (closed,), (answer,) = rgap()([case], rng=seeded()), hgap(steps=60)([case], rng=seeded())
    errors = [float((found.x - x).square().mean()) for found in (closed, answer)]
    assert answer.route == "optimisation"
    assert errors[1] < errors[0]


def test_an_unknown_criterion_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown criterion 'beauty'\. Known: roughness, total_variation, outside, gradient"):
        hgap(criterion="beauty")
