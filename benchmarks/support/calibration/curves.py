"""The fit of the calibration curves of confidence on the tuning part: attacker/attacks/confidence/calibration.json.

Every curve with features is also cross-validated: the answers of each combination of network, data set and defense are predicted
by a curve that was fitted to the others. If the calibration error of these predictions is above `MAX_CALIBRATION_ERROR`, or
answers are few, the curve reports probabilities in one of `UNDECIDED_BANDS` around 0.5 as undecided.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit
from support.calibration.cases import Cell, attack_cell
from support.calibration.confidence import measure_calibration_error
from support.calibration.grid import CELLS
from support.contract import Options, ResultRow
from support.splits import DATA_FILES, count_part

from attacker.attacks.confidence.curves import CALIBRATION_FILE, INFERRED_ORDER, MIN_PROBABILITY, get_curve_family
from attacker.scoring.statistics import Floats

ANSWERS_FILE = Path(__file__).parents[3] / "build" / "confidence.jsonl"
ATTACK_SEEDS = (1, 2)
NUM_SKIPPED_PER_SEED = 150
"""Number of examples of each data set that are left out for each seed after the first."""
RIDGE_PENALTY = 0.002
"""Penalty on the squared weights of standardised features, per answer."""
MIN_PENALISED_ANSWERS = 300
"""Smallest number of answers that the penalty is multiplied by, so that curves with few answers are regularised, too."""
SMOOTHING_ANSWERS = 1.0
"""Number of artificial answers, half of each outcome, that are added at the mean evidence, so that few answers give no extreme
probability."""
MIN_EVIDENCE, MAX_EVIDENCE = {"error": -3.0, "step": -5.0}, {"equations": 1.0}
"""Limits by feature to which evidence is clamped: beyond them, evidence no longer tells whether an answer is right."""
LOWER_IS_BETTER_FEATURES = ("misfit", "error", "step", "outside", "roughness", "drift", "examples", "doubt")
SEARCH_FEATURES = ("misfit", "error", "step", "roughness", "outside", "equations")
ROUTE_FEATURES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("optimisation", "images"): SEARCH_FEATURES,
    ("optimisation", "rows"): ("misfit", "error", "step", "outside", "examples"),
    ("optimisation from a closed form", "images"): SEARCH_FEATURES,
    ("joint over rounds", "images"): (*SEARCH_FEATURES, "linked"),
    (INFERRED_ORDER, "images"): ("error", "alike", "roughness"),
    ("linear", "images"): ("misfit", "doubt", "outside"),
    ("linear", "rows"): ("misfit", "doubt", "outside"),
    ("layers", "images"): ("misfit", "doubt", "outside"),
    ("prior alone", "images"): (),
    ("prior alone", "rows"): (),
}
ROUTES_FITTED_WITH_SEARCHES = ("optimisation from a closed form", "joint over rounds")
"""Routes with few answers of their own. Answers of plain searches are added to their fit, each with a weight of one third."""
RANGE_CHECKED_FEATURES = ("examples", "drift")
"""Evidence for which the range in the fit is stored with the curve."""
INFERRED_ORDER_MIN_EVIDENCE = {"roughness": -1.1}
"""Limits of the route INFERRED_ORDER in place of MIN_EVIDENCE. Its recovered images have expected errors of 1e-4 to 1e-8, and
others of 1e-1 to 1e-5. Images that are smoother than nearly all photographs are not surer: some failed searches return images of
one colour."""
MAX_DECIDED_EVIDENCE: Mapping[tuple[str, str], Mapping[str, float]] = {
    ("linear", "rows"): {"misfit": -2.5},
    (INFERRED_ORDER, "images"): {"outside": -4.9},
}
"""Dict from route and kind of data to the largest value of a feature; answers above it are reported as undecided.

Above it, the share of right answers differs so much between settings that no curve predicts it.

Of the linear answers with a larger misfit, between 0 and 60 % were right, depending on network, data set and defense. No answer
in an inferred order had values outside [0, 1].
"""
UNDECIDED_BANDS = ((0.5, 0.5), (0.4, 0.6), (0.3, 0.7), (0.2, 0.8), (0.1, 0.9))
"""Intervals of probabilities that a curve may report as undecided, from the narrowest to the widest."""
LEAST_BANDS: Mapping[tuple[str, str], tuple[float, float]] = {(INFERRED_ORDER, "images"): (0.02, 0.8)}
"""Band that the curve of a route has at least. In an inferred order, images with probabilities from 0.4 to 0.6 were recovered
less often than said on the tuning part, and from 0.02 to 0.2 more often on the validation part, mostly digits."""
MAX_CALIBRATION_ERROR = 0.04
"""Largest cross-validated calibration error of the probabilities outside the undecided band."""
MIN_OWN_ANSWERS = 100
"""Smallest number of a route's own answers for which the calibration error is computed; with fewer, the widest band is used."""
EVIDENCE_FLOOR = -20.0
"""A number below any evidence. Evidence consists of logarithms."""
EVIDENCE_BOUNDS = ((MIN_EVIDENCE, -np.inf), (MAX_EVIDENCE, np.inf))


def fit_confidence(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Fit all curves, and write them to calibration.json; with --quick attack only two cells of the grid, and write nothing.

    Without --quick, curves are fitted to the answers in `ANSWERS_FILE`. If it does not exist, it is written first: all cells of
    `CELLS` are attacked, which takes about an hour on one core. Returns a row per curve, and a summary with the number of curves.
    """
    if options.quick:
        corner = [replace(cell, cases=1) for cell in CELLS["single"][:2]]
        records = [asdict(one) for cell in corner for one in attack_cell(cell, options, part="tuning", skip=0)]
    else:
        if not ANSWERS_FILE.exists():
            _record_answers(options)
        records = [record for line in ANSWERS_FILE.read_text().splitlines() for record in json.loads(line)]
    curves = [curve for key in ROUTE_FEATURES if (curve := fit_route(records, *key)) is not None]
    if not options.quick:
        write_curves(curves)
    shown = ("route", "data", "answers", "recovered", "unsure")
    return [{key: curve[key] for key in shown} for curve in curves], {"curves": len(curves)}


def write_curves(curves: Sequence[ResultRow]) -> None:
    """Write entries of calibration.json in place of those of the same routes and data; other entries stay as they are."""
    known = json.loads(CALIBRATION_FILE.read_text())
    entries = {(curve["route"], curve["data"]): curve for curve in (*known["curves"], *curves)}
    CALIBRATION_FILE.write_text(json.dumps({**known, "curves": list(entries.values())}, indent=1) + "\n")


def _record_answers(options: Options) -> None:
    """Attack all cells with examples of the tuning part, and write `ANSWERS_FILE`: a line per cell, a list of reconstructions.

    A run that was interrupted continues after the last cell of which all reconstructions were written.
    """
    torch.set_num_threads(1)
    ANSWERS_FILE.parent.mkdir(parents=True, exist_ok=True)
    partial = ANSWERS_FILE.with_suffix(".partial")
    lines = partial.read_text().splitlines(keepends=True) if partial.exists() else []
    done = [line for line in lines if line.endswith("\n")]
    partial.write_text("".join(done))
    with partial.open("a") as file:
        for seed, cell, skip in list(_list_attacked_cells(options))[len(done) :]:
            answers = attack_cell(cell, replace(options, seed=seed), part="tuning", skip=skip)
            file.write(json.dumps([asdict(answer) for answer in answers]) + "\n")
            file.flush()
    partial.rename(ANSWERS_FILE)


def _list_attacked_cells(options: Options) -> Iterator[tuple[int, Cell, int]]:
    """Yield the seed, the cell and the number of examples to skip, for all attacks whose answers the curves are fitted to.

    With one seed, no two cells have the same images, unless the tuning part of a data set has too few: then the first ones are
    used again.
    """
    cells = [cell for group in CELLS.values() for cell in group]
    num_available = {name: count_part(options, name, "tuning") for name in {cell.data for cell in cells} & DATA_FILES.keys()}
    for seed in ATTACK_SEEDS:
        num_taken: dict[str, int] = {}
        for cell in cells:
            skip = num_taken.get(cell.data, 0) + NUM_SKIPPED_PER_SEED * (seed - 1)
            needed = cell.cases * cell.examples
            num_taken[cell.data] = num_taken.get(cell.data, 0) + needed
            if skip + needed > num_available.get(cell.data, skip + needed):
                skip = (skip + needed) % num_available[cell.data]
            yield seed, cell, skip


def fit_route(records: Sequence[ResultRow], route: str, kind: str) -> ResultRow | None:
    """Return the curve of a route as an entry of calibration.json; None if the route has no answers of this kind.

    records: answers of all routes, as in `ANSWERS_FILE`. route: method whose answers the curve is fitted to, such as
    "optimisation"; for routes in ROUTES_FITTED_WITH_SEARCHES also to answers of searches. kind: "images", or "rows" for tables.
    Answers without evidence for all features, such as those of searches that were given up, are left out.
    """
    features = ROUTE_FEATURES[route, kind]
    own = [r for r in records if get_curve_family(r["route"]) == route and r["is_image"] == (kind == "images")]
    if not own:
        return None
    if route in ROUTES_FITTED_WITH_SEARCHES:
        own += [r for r in records if r["route"] == "optimisation" and r["is_image"] == (kind == "images")]
    limits = MAX_DECIDED_EVIDENCE.get((route, kind), {})
    own = [kept for r in own if set(features) <= r["evidence"].keys() and (kept := _select_within(r, limits))["recovered"]]
    y = np.array([float(right) for r in own for right in r["recovered"]])
    count = np.array([1.0 if get_curve_family(r["route"]) == route else 1 / 3 for r in own for _ in r["recovered"]])
    kind_of = np.array([r["cell"]["network"] + r["cell"]["data"] + r["cell"]["defense"] for r in own for _ in r["recovered"]])
    x = _stack_evidence(own, features).reshape(len(y), len(features))
    bounds = ((INFERRED_ORDER_MIN_EVIDENCE, -np.inf), ({}, np.inf)) if route == INFERRED_ORDER else EVIDENCE_BOUNDS
    x = x.clip(*([limits.get(name, end) for name in features] for limits, end in bounds)) if features else x
    low, high = (x.min(axis=0), x.max(axis=0)) if len(features) else (x[0], x[0])
    weights, intercept = fit_logistic(x, y, features, count)
    unsure = (0.5, 0.5)
    if features:
        p, right = _predict_left_out(x, y, features, kind_of, count)
        lower, upper = zip(_find_rough_band(p, right), LEAST_BANDS.get((route, kind), (0.5, 0.5)), strict=True)
        unsure = (min(lower), max(upper))
        decided = ~_is_between(p, unsure)
        error = measure_calibration_error(p[decided], right[decided])
        shares = f"{decided.sum()} of {len(p)} examples of cases left out of the fit are decided (not in {unsure})"
        print(f"{route}, {kind}: {shares}, with a calibration error of {error:.3f}")
    print("   " + ", ".join(f"{name} {w:.3g}" for name, w in zip(features, weights, strict=True)) + f"; {intercept:.3g}")
    known = [name for name in RANGE_CHECKED_FEATURES if all(name in r["evidence"] for r in own)]
    facts = {name: [float(_stack_evidence(own, [name]).min()), float(_stack_evidence(own, [name]).max())] for name in known}
    facts |= {name: [EVIDENCE_FLOOR, most] for name, most in limits.items()}
    return {
        "route": route, "data": kind, "features": list(features), "weights": [float(w) for w in weights],
        "intercept": intercept, "low": low.tolist(), "high": high.tolist(), "facts": facts,
        "answers": int((count == 1).sum()), "recovered": int(y[count == 1].sum()), "unsure": list(unsure),
    }  # fmt: skip


def _select_within(record: ResultRow, limits: Mapping[str, float]) -> ResultRow:
    """Return the record without the examples with a feature above its limit in `limits`, a dict by name of feature.

    Only the record's `recovered` and `evidence` are shortened.
    """
    kept = [
        i for i in range(len(record["recovered"])) if all(record["evidence"][name][i] <= most for name, most in limits.items())
    ]
    evidence = {name: [values[i] for i in kept] for name, values in record["evidence"].items()}
    return {**record, "evidence": evidence, "recovered": [record["recovered"][i] for i in kept]}


def _stack_evidence(records: Sequence[ResultRow], features: Sequence[str]) -> Floats:
    """Return the evidence of all examples, (examples, features), with the features in the given order."""
    return np.array([[r["evidence"][name][i] for name in features] for r in records for i in range(len(r["recovered"]))])


def fit_logistic(x: Floats, y: Floats, features: Sequence[str], count: Floats) -> tuple[Floats, float]:
    """Return weights (F,) and intercept of a logistic regression of outcomes y (N,) on x (N, F), with a ridge penalty.

    Weights of `LOWER_IS_BETTER_FEATURES` are at most 0, all others at least 0. features: names of the columns. count: weight of
    each answer, (N,).
    """
    middle, spread = x.mean(axis=0), x.std(axis=0).clip(min=1e-6)
    z = np.vstack([(x - middle) / spread, np.zeros((2, x.shape[1]))])
    target, weight = np.append(y, [0.0, 1.0]), np.append(count, [SMOOTHING_ANSWERS / 2] * 2)
    penalty = RIDGE_PENALTY * max(MIN_PENALISED_ANSWERS, len(y))

    def compute_loss(p: Floats) -> tuple[float, Floats]:
        score = z @ p[:-1] + p[-1]
        off = weight * (expit(score) - target)
        value = (weight * (np.logaddexp(0, score) - target * score)).sum() + penalty * (p[:-1] ** 2).sum()
        return float(value), np.append(z.T @ off + 2 * penalty * p[:-1], off.sum())

    bounds = [(None, 0.0) if name in LOWER_IS_BETTER_FEATURES else (0.0, None) for name in features]
    solution = minimize(compute_loss, np.zeros(len(features) + 1), jac=True, bounds=[*bounds, (None, None)], method="L-BFGS-B").x
    weights = solution[:-1] / spread
    return weights, float(solution[-1] - weights @ middle)


def _predict_left_out(
    x: Floats, y: Floats, features: Sequence[str], kinds: NDArray[np.str_], count: Floats
) -> tuple[Floats, Floats]:
    """Return the cross-validated probabilities of a route's own answers, and their outcomes, in the order of `y`.

    The answers of each kind (network, data set and defense, by name in `kinds`) are predicted by a curve fitted to all other
    kinds; if all other kinds together have at most ten answers, by the mean of the whole `y`.
    count: weight of each answer; 1 for the route's own answers, less for those of the route "optimisation" that were added to the
           fit (`ROUTES_FITTED_WITH_SEARCHES`).
    """
    p = np.full(len(y), y.mean())
    for name in set(kinds.tolist()):
        rest = kinds != name
        if rest.sum() > 10:
            weights, intercept = fit_logistic(x[rest], y[rest], features, count[rest])
            low, high = x[rest].min(axis=0), x[rest].max(axis=0)
            p[~rest] = expit(x[~rest].clip(low, high) @ weights + intercept)
    own = count == 1
    return p[own].clip(MIN_PROBABILITY, 1 - MIN_PROBABILITY), y[own]


def _find_rough_band(p: Floats, right: Floats) -> tuple[float, float]:
    """Return the narrowest of `UNDECIDED_BANDS` outside of which the calibration error is at most `MAX_CALIBRATION_ERROR`.

    If no band suffices, or there are fewer than `MIN_OWN_ANSWERS` answers, return the widest band. p: probabilities. right:
    outcomes.
    """
    for band in UNDECIDED_BANDS if len(p) >= MIN_OWN_ANSWERS else ():
        decided = ~_is_between(p, band)
        if measure_calibration_error(p[decided], right[decided]) <= MAX_CALIBRATION_ERROR:
            return band
    return UNDECIDED_BANDS[-1]


def _is_between(p: Floats, band: tuple[float, float]) -> NDArray[np.bool_]:
    return (p > band[0]) & (p < band[1])
