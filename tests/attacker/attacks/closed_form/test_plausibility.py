"""Tests of criteria of how plausible an image is, against values computed by hand and an independent filter."""

import numpy as np
import pytest
import torch
from scipy.ndimage import correlate

from attacker.attacks.closed_form.plausibility import CRITERIA, measure_roughness, total_variation
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
