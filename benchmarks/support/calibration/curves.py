"""The fit of the calibration curves of confidence on the tuning part: attacker/attacks/confidence/calibration.json.

Beside every curve stands its calibration error where the cells of one network, data set and defense were left out of its fit.
Where that error is large, the probabilities in the middle are left undecided.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit
from support.calibration.cases import attack_cell
from support.calibration.grid import CELLS
from support.calibration.reliability import measure_calibration_error
from support.contract import Options, ResultRow

from attacker.attacks.confidence.curves import CALIBRATION_FILE, get_curve_family
from attacker.attacks.confidence.curves import MIN_PROBABILITY as LEAST_SAID
from attacker.scoring.statistics import Floats

RECORDS = Path(__file__).parents[3] / "build" / "confidence.jsonl"
SEEDS = (1, 2)
RIDGE = 0.002
"""Penalty on squared weights of features of variance 1, an answer, of which there are `FEW` at least."""
FEW = 300
SMOOTHING = 1.0
"""Answers of either outcome that are added at the mean evidence of all: no curve is surer than its number of answers allows."""
MIN_PROBABILITY, MOST = {"error": -3.0, "step": -5.0}, {"equations": 1.0}
"""Evidence beyond which an answer is no surer: what the posterior leaves is then no longer why answers are wrong."""
LOWER_IS_BETTER = ("misfit", "error", "step", "outside", "roughness", "drift", "examples", "doubt")
SEARCH = ("misfit", "error", "step", "roughness", "outside", "equations")
FEATURES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("optimisation", "images"): SEARCH,
    ("optimisation", "rows"): ("misfit", "error", "step", "outside", "examples"),
    ("optimisation from a closed form", "images"): SEARCH,
    ("joint over rounds", "images"): (*SEARCH, "linked"),
    ("linear", "images"): ("misfit", "doubt", "outside"),
    ("linear", "rows"): ("misfit", "doubt", "outside"),
    ("layers", "images"): ("misfit", "doubt", "outside"),
    ("prior alone", "images"): (),
    ("prior alone", "rows"): (),
}
ALIKE = ("optimisation from a closed form", "joint over rounds")
"""Routes that have few answers of their own: those of plain searches are added, and count a third as much."""
FACTS = ("examples", "drift")
LIMITS: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("linear", "rows"): {"misfit": -2.5},
}
"""Evidence above which answers are undecided: there, one data set, network and defense says nothing of another.

Linear answers that miss more of the gradient's power were right in 0 to 60 % of a kind.
"""
BANDS = ((0.5, 0.5), (0.4, 0.6), (0.3, 0.7), (0.2, 0.8), (0.1, 0.9))
ROUGH = 0.04
"""Calibration error, with the cells of one network, data set and defense left out, above which a route is unsure of a band."""
SOME = 100
"""Answers of a route's own from which their calibration error can be told."""
EVIDENCE_FLOOR = -20.0
"""Below any evidence, all of which are logarithms."""
ENDS = ((MIN_PROBABILITY, -np.inf), (MOST, np.inf))


def fit_confidence(asked: Options) -> tuple[list[ResultRow], ResultRow]:
    """Fit all curves, and write them to calibration.json; with `--quick` attack a corner of the grid, and write nothing.

    Answers are kept in `RECORDS`. Where there is no such file, all cells of `support.calibration.grid` are attacked first, which
    takes half an hour of one core.
    """
    if asked.quick:
        corner = [replace(cell, cases=1) for cell in CELLS["single"][:2]]
        records = [asdict(one) for cell in corner for one in attack_cell(cell, asked, part="tuning", skip=0)]
    else:
        if not RECORDS.exists():
            _record_answers(asked)
        records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    curves = [curve for key in FEATURES if (curve := fit_route(records, *key)) is not None]
    if not asked.quick:
        CALIBRATION_FILE.write_text(
            json.dumps({"fitted by": "benchmarks/tuning.py confidence", "curves": curves}, indent=1) + "\n"
        )
    shown = ("route", "data", "answers", "recovered", "unsure")
    return [{key: curve[key] for key in shown} for curve in curves], {"curves": len(curves)}


def _record_answers(asked: Options) -> None:
    """Attack all cells with examples of the tuning part, and write one record per reconstruction."""
    torch.set_num_threads(1)
    RECORDS.parent.mkdir(parents=True, exist_ok=True)
    partial = RECORDS.with_suffix(".partial")
    with partial.open("w") as file:
        for seed in SEEDS:
            taken: dict[str, int] = {}
            for cell in (cell for cells in CELLS.values() for cell in cells):
                skip = taken.get(cell.data, 0) + 150 * (seed - 1)
                taken[cell.data] = taken.get(cell.data, 0) + cell.cases * cell.examples
                for one in attack_cell(cell, replace(asked, seed=seed), part="tuning", skip=skip):
                    file.write(json.dumps(asdict(one)) + "\n")
                file.flush()
    partial.rename(RECORDS)


def fit_route(records: Sequence[ResultRow], route: str, kind: str) -> ResultRow | None:
    """Return the curve of a route as calibration.json holds it; None where there are no answers."""
    features = FEATURES[route, kind]
    own = [r for r in records if get_curve_family(r["route"]) == route and r["is_image"] == (kind == "images")]
    if not own:
        return None
    if route in ALIKE:
        own += [r for r in records if r["route"] == "optimisation" and r["is_image"] == (kind == "images")]
    limits = LIMITS.get((route, kind), {})
    own = [kept for r in own if (kept := _select_within(r, limits))["recovered"]]
    y = np.array([float(right) for r in own for right in r["recovered"]])
    count = np.array([1.0 if get_curve_family(r["route"]) == route else 1 / 3 for r in own for _ in r["recovered"]])
    kind_of = np.array([r["cell"]["network"] + r["cell"]["data"] + r["cell"]["defense"] for r in own for _ in r["recovered"]])
    x = _select_outcomes(own, features).reshape(len(y), len(features))
    x = x.clip(*([limits.get(name, end) for name in features] for limits, end in ENDS)) if features else x
    low, high = (x.min(axis=0), x.max(axis=0)) if len(features) else (x[0], x[0])
    weights, intercept = fit_logistic(x, y, features, count)
    unsure = (0.5, 0.5)
    if features:
        said, right = _predict_left_out(x, y, features, kind_of, count)
        unsure = _find_rough_band(said, right)
        decided = ~_is_between(said, unsure)
        error = measure_calibration_error(said[decided], right[decided])
        print(f"{route}, {kind}: left out: {decided.sum()} of {len(said)} decided outside {unsure}, ECE {error:.3f}")
    print("   " + ", ".join(f"{name} {w:.3g}" for name, w in zip(features, weights, strict=True)) + f"; {intercept:.3g}")
    known = [name for name in FACTS if all(name in r["evidence"] for r in own)]
    facts = {name: [float(_select_outcomes(own, [name]).min()), float(_select_outcomes(own, [name]).max())] for name in known}
    facts |= {name: [EVIDENCE_FLOOR, most] for name, most in limits.items()}
    return {
        "route": route, "data": kind, "features": list(features), "weights": [float(w) for w in weights],
        "intercept": intercept, "low": low.tolist(), "high": high.tolist(), "facts": facts,
        "answers": int((count == 1).sum()), "recovered": int(y[count == 1].sum()), "unsure": list(unsure),
    }  # fmt: skip


def _select_within(record: ResultRow, limits: Mapping[str, float]) -> ResultRow:
    """Return a record of those answers alone that are within the limits of their route."""
    kept = [
        i for i in range(len(record["recovered"])) if all(record["evidence"][name][i] <= most for name, most in limits.items())
    ]
    evidence = {name: [values[i] for i in kept] for name, values in record["evidence"].items()}
    return {**record, "evidence": evidence, "recovered": [record["recovered"][i] for i in kept]}


def _select_outcomes(records: Sequence[ResultRow], features: Sequence[str]) -> Floats:
    """Return the evidence of all examples, (answers, features)."""
    return np.array([[r["evidence"][name][i] for name in features] for r in records for i in range(len(r["recovered"]))])


def fit_logistic(x: Floats, y: Floats, features: Sequence[str], count: Floats) -> tuple[Floats, float]:
    """Return weights and intercept of a ridge regression whose weights have the sign that `LOWER_IS_BETTER` says."""
    middle, spread = x.mean(axis=0), x.std(axis=0).clip(min=1e-6)
    z = np.vstack([(x - middle) / spread, np.zeros((2, x.shape[1]))])
    target, weight = np.append(y, [0.0, 1.0]), np.append(count, [SMOOTHING / 2] * 2)
    penalty = RIDGE * max(FEW, len(y))

    def compute_loss(p: Floats) -> tuple[float, Floats]:
        score = z @ p[:-1] + p[-1]
        off = weight * (expit(score) - target)
        value = (weight * (np.logaddexp(0, score) - target * score)).sum() + penalty * (p[:-1] ** 2).sum()
        return float(value), np.append(z.T @ off + 2 * penalty * p[:-1], off.sum())

    bounds = [(None, 0.0) if name in LOWER_IS_BETTER else (0.0, None) for name in features]
    found = minimize(compute_loss, np.zeros(len(features) + 1), jac=True, bounds=[*bounds, (None, None)], method="L-BFGS-B").x
    weights = found[:-1] / spread
    return weights, float(found[-1] - weights @ middle)


def _predict_left_out(
    x: Floats, y: Floats, features: Sequence[str], kinds: NDArray[np.str_], count: Floats
) -> tuple[Floats, Floats]:
    """Return what the curve that all others fit says of each network, data set and defense, and what came true."""
    said = np.full(len(y), y.mean())
    for name in set(kinds.tolist()):
        rest = kinds != name
        if rest.sum() > 10:
            weights, intercept = fit_logistic(x[rest], y[rest], features, count[rest])
            low, high = x[rest].min(axis=0), x[rest].max(axis=0)
            said[~rest] = expit(x[~rest].clip(low, high) @ weights + intercept)
    own = count == 1
    return said[own].clip(LEAST_SAID, 1 - LEAST_SAID), y[own]


def _find_rough_band(said: Floats, right: Floats) -> tuple[float, float]:
    """Return the narrowest of `BANDS` outside of which what was said is within `ROUGH` of what came true; of few, the widest."""
    for band in BANDS if len(said) >= SOME else ():
        decided = ~_is_between(said, band)
        if measure_calibration_error(said[decided], right[decided]) <= ROUGH:
            return band
    return BANDS[-1]


def _is_between(said: Floats, band: tuple[float, float]) -> NDArray[np.bool_]:
    return (said > band[0]) & (said < band[1])
