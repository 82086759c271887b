"""Calibration curves: logistic regressions that estimate from evidence the probability that an example is recovered.

`benchmarks/tuning.py confidence` fits them to answers whose originals are known.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

CALIBRATION_FILE = Path(__file__).with_name("calibration.json")
INFERRED_ORDER = "optimisation in an inferred order"
"""Route of searches for images that simulate local steps in an order which was inferred from a single update."""
MIN_PROBABILITY = 0.005
"""Smallest probability that is returned; the largest is 1 - MIN_PROBABILITY, as the calibration has too few extreme answers."""


OTHER_LOSS = (
    "; the answer does not explain the gradient, as if clients had another loss than stated, for example that of a regression "
    "with several outputs, or trained otherwise than stated"
)
FACT_WORDS = {
    "examples": ("a number of examples", 2.0),
    "drift": ("a change of the gradient over the local steps, as a share of its power,", 10.0),
    "outside": ("a mean squared distance of values to [0, 1]", 10.0),
    "misfit": ("an unexplained share of the gradient's power", 10.0),
}
"""Names of features in `Curve.facts`, in words, and the base of their logarithm (`FEATURE_NAMES`)."""


@dataclass(frozen=True)
class Curve:
    """A logistic regression of "the example is recovered" on evidence, with the range of evidence on which it was fitted.

    features:  names of the features. weights: one per feature. intercept: of the regression.
    low, high: range of each feature; values outside of it are clamped.
    facts:     ranges of features outside of which the curve does not apply: mostly of features that are known before the attack,
               such as the number of examples.
    answers, recovered: number of reconstructed examples on which it was fitted, and how many of them were recovered.
    unsure:    (low, high), the open interval of probabilities that are replaced by NaN (undecided), since they were wrong for
               groups of cases that were left out of the fit; empty if both are equal.
    """

    features: tuple[str, ...]
    weights: tuple[float, ...]
    intercept: float
    low: tuple[float, ...]
    high: tuple[float, ...]
    facts: Mapping[str, tuple[float, float]]
    answers: int
    recovered: int
    unsure: tuple[float, float]

    def explain_mismatch(self, evidence: Mapping[str, Tensor]) -> str:
        """Return why the curve does not apply to answers with this evidence, tensors by feature name; "" if it does.

        It does not apply if a feature is missing, if it is NaN or infinite for one of the examples, or if a feature of `facts` is
        outside of its range for one of them.
        """
        if missing := [name for name in self.features if name not in evidence]:
            return f"its calibration curve needs the feature {missing[0]}, which was not computed"
        if wrong := [name for name in self.features if not bool(evidence[name].isfinite().all())]:
            return f"the feature {wrong[0]} of the answer is NaN or infinite"
        return self.explain_unfitted_facts(evidence)

    def explain_unfitted_facts(self, evidence: Mapping[str, Tensor]) -> str:
        """Return a sentence on the first feature of `facts` that is outside of its range, or "" if none is.

        `evidence` must hold these features; it needs no others.
        """
        for name, (low, high) in self.facts.items():
            minimum, maximum = float(evidence[name].min()), float(evidence[name].max())
            if not low <= minimum <= maximum <= high:
                value, bound, side = (minimum, low, "least") if minimum < low else (maximum, high, "most")
                words, base = FACT_WORDS[name]
                reason = (
                    f"its calibration curve is for {words} of at {side} {base**bound:.3g}, and this answer has {base**value:.3g}"
                )
                return f"{reason}{OTHER_LOSS if name == 'misfit' and value > high else ''}"
        return ""


def estimate_probabilities(curve: Curve, evidence: Mapping[str, Tensor], examples: int) -> Tensor:
    """Return the estimated probability that each example is recovered, (N,), within MIN_PROBABILITY and 1 - MIN_PROBABILITY.

    It is NaN inside `curve.unsure`.
    evidence: features by name, each (N,). examples: N, since a curve may have no features.
    """
    score = torch.full((examples,), curve.intercept, dtype=torch.float64)
    for name, weight, low, high in zip(curve.features, curve.weights, curve.low, curve.high, strict=True):
        score = score + weight * evidence[name].double().clamp(low, high)
    probabilities, (least, most) = score.sigmoid().clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY).float(), curve.unsure
    return probabilities.masked_fill((probabilities > least) & (probabilities < most), torch.nan)


def find_curve(route: str, *, is_image: bool) -> Curve | None:
    """Return the calibration curve of a route (method that found an answer) for images or table rows; None if there is none."""
    return _read_curves().get((get_curve_family(route), "images" if is_image else "rows"))


def get_curve_family(route: str) -> str:
    """Return the name of a route's curve: "optimisation from a closed form" for any "optimisation from ...", else the route."""
    return "optimisation from a closed form" if route.startswith("optimisation from") else route


@cache
def _read_curves() -> dict[tuple[str, str], Curve]:
    curves = json.loads(CALIBRATION_FILE.read_text())["curves"]
    return {(entry["route"], entry["data"]): _read_curve(entry) for entry in curves}


def _read_curve(entry: Mapping[str, object]) -> Curve:
    return Curve(
        features=tuple(_check_list(entry["features"])),
        weights=tuple(map(float, _check_list(entry["weights"]))),
        intercept=float(str(entry["intercept"])),
        low=tuple(map(float, _check_list(entry["low"]))),
        high=tuple(map(float, _check_list(entry["high"]))),
        facts={str(name): (float(low), float(high)) for name, (low, high) in dict(entry["facts"]).items()},  # type: ignore[call-overload]
        answers=int(str(entry["answers"])),
        recovered=int(str(entry["recovered"])),
        unsure=(float(_check_list(entry["unsure"])[0]), float(_check_list(entry["unsure"])[1])),
    )


def _check_list(value: object) -> Sequence[str]:
    assert isinstance(value, list)
    return value
