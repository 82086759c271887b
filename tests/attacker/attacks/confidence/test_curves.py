"""Tests of the calibration curves: their file, their limits, and probabilities that are too inaccurate to be given."""

import json

import pytest
import torch

from attacker.attacks.confidence import estimate_probabilities, evidence, find_curve
from attacker.attacks.confidence.curves import CALIBRATION_FILE, FACT_WORDS, MIN_PROBABILITY, Curve


def test_probabilities_within_the_unsure_range_are_undecided() -> None:
    own = Curve(("misfit",), (-1.0,), 0.0, (-9.0,), (9.0,), {}, 10, 5, unsure=(0.1, 0.9))
    probabilities = estimate_probabilities(own, {"misfit": torch.tensor([-4.0, -1.0, 0.0, 1.0, 4.0])}, 5)
    assert probabilities.isnan().tolist() == [False, True, True, True, False]
    assert float(probabilities[0]) > 0.9
    assert float(probabilities[4]) < 0.1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("examples", 6.0, "a number of examples of at most 16, and this answer has 64"),
        ("misfit", -3.0, "an unexplained share of the gradient's power of at least 0.01, and this answer has 0.001"),
    ],
)
def test_a_curve_that_does_not_apply_names_the_limit_in_its_own_unit(name: str, value: float, words: str) -> None:
    own = Curve((), (), 0.0, (), (), {"examples": (0.0, 4.0), "misfit": (-2.0, 0.0)}, 10, 5, unsure=(0.0, 0.0))
    inside = {"examples": torch.tensor([3.0]), "misfit": torch.tensor([-1.0])}
    assert own.explain_unfitted_facts(inside) == ""
    assert words in own.explain_unfitted_facts(inside | {name: torch.tensor([value])})


def test_the_calibration_file_and_the_code_agree() -> None:
    stated = json.loads(CALIBRATION_FILE.read_text())["curves"]
    known = set(evidence.FEATURE_NAMES)
    assert {(one["route"], one["data"]) for one in stated} >= {
        ("optimisation", "images"), ("optimisation", "rows"), ("optimisation from a closed form", "images"),
        ("linear", "images"), ("linear", "rows"), ("layers", "images"),
        ("prior alone", "images"), ("prior alone", "rows"),
    }  # fmt: skip
    for one in stated:
        own = find_curve(one["route"], is_image=one["data"] == "images")
        assert set(own.features) <= known
        assert set(own.facts) <= set(FACT_WORDS)
        assert len(own.features) == len(own.weights) == len(own.low) == len(own.high)
        assert 0 <= own.recovered <= own.answers
        for ends in (own.low, own.high):
            p = estimate_probabilities(own, {name: torch.tensor([end]) for name, end in zip(own.features, ends, strict=True)}, 1)
            assert float(p[0]) == pytest.approx(min(max(float(p[0]), MIN_PROBABILITY), 1 - MIN_PROBABILITY))
