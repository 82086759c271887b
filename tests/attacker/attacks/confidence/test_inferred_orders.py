"""Tests of the confidence in images of clients with several local batches, whose order is inferred."""

import math
from dataclasses import replace

import pytest
import torch
from generators import seeded
from hypothesis import given
from hypothesis import strategies as st

from attacker.attacks.confidence import INFERRED_ORDER, estimate_probabilities, find_curve
from attacker.attacks.confidence.evidence import SAME, measure_likeness


def test_likeness_is_that_of_the_nearest_image_with_the_same_label() -> None:
    """Grey images of 0.1, 0.3, 0.9 and 0.35, of which the last has another label than the others."""
    x = torch.tensor([0.1, 0.3, 0.9, 0.35]).view(4, 1, 1, 1).expand(4, 3, 8, 8)
    found = measure_likeness(x, torch.tensor([5, 5, 5, 2]))
    assert found.tolist() == pytest.approx(
        [math.log10(0.04 + SAME), math.log10(0.04 + SAME), math.log10(0.36 + SAME), 0.0], abs=1e-4
    )


@given(share=st.floats(0.05, 0.5), seed=st.integers(0, 9))
def test_mixtures_of_images_with_equal_labels_are_more_alike_and_less_probable(share: float, seed: int) -> None:
    x, curve = torch.rand(3, 3, 8, 8, generator=seeded(seed)), find_curve(INFERRED_ORDER, is_image=True)
    mixed = torch.stack([(1 - share) * x[0] + share * x[1], share * x[0] + (1 - share) * x[1], x[2]])
    middle = {
        name: torch.full((3,), (low + high) / 2) for name, low, high in zip(curve.features, curve.low, curve.high, strict=True)
    }
    certain = replace(curve, unsure=(0.5, 0.5))
    labels = torch.tensor([1, 1, 0])
    alone, together = (
        estimate_probabilities(certain, middle | {"alike": measure_likeness(images, labels)}, 3) for images in (x, mixed)
    )
    assert bool((together[:2] < alone[:2]).all())
    assert together[2] == alone[2] > alone[0]
