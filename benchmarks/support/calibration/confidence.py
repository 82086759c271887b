"""Calibration of confidence on the report part, for each answering method.

Its measures are bins, Brier score, expected calibration error, and a reliability diagram.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.calibration.cases import Cell, JudgedReconstruction, attack_cell
from support.calibration.grid import CELLS, SMOOTH_DECODER_CELLS, UNFITTED_NETWORK_CELLS
from support.contract import Options, ResultRow

from attacker.attacks.confidence.curves import get_curve_family
from attacker.scoring.statistics import Floats

DIAGRAM_FILE = Path(__file__).parents[3] / "docs" / "reliability.png"
SEED_OFFSET = 100
"""Added to the seed, so that networks have other weights than those that the curves were fitted on."""
NUM_NETWORKS = 2
"""Number of networks, each with weights of its own, on which every cell is attacked; the quick run uses one. Answers on one
network succeed or fail together, so that a single network would say little about the calibration error."""
NETWORK_SEED_STEP = 2000
"""Difference between the seeds of the networks."""
QUICK_CELL_COUNTS = {"single": 1, "exact": 8, "rows": 2, "nulls": 1, "outside": 1}
"""Number of cells (settings that are attacked) of each group in a quick run, with one case each."""
NUM_BINS = 10


def measure_confidence(options: Options) -> tuple[list[ResultRow], dict[str, Any]]:
    """Attack all cells of the calibration grid with examples of the report split; return the results of `summarise_answers`.

    Each cell has half of its cases, rounded up. The cells in `UNFITTED_NETWORK_CELLS` are attacked as well. With --quick, a few
    cells are attacked, with one case each. Without it, the reliability diagram is also drawn and written to `DIAGRAM_FILE`.
    """
    torch.set_num_threads(1)
    answers = [one for k in range(1 if options.quick else NUM_NETWORKS) for one in _attack_cells(options, network=k)]
    if not options.quick:
        draw_diagram({route: pair for route, pair in group_by_route(answers).items() if len(pair[0])}, DIAGRAM_FILE)
    return summarise_answers(answers)


def measure_smooth_decoder(options: Options) -> tuple[list[ResultRow], dict[str, Any]]:
    """Attack `SMOOTH_DECODER_CELLS` with examples of the report split, as `measure_confidence` does, on one network.

    Return the rows of `summarise_answers`, and its calibration error and number of examples. A quick run attacks one case.
    """
    torch.set_num_threads(1)
    cells = SMOOTH_DECODER_CELLS if not options.quick else [replace(SMOOTH_DECODER_CELLS[0], cases=1)]
    answers = _attack_placed([("smooth", cell) for cell in cells], options)
    rows, summary = summarise_answers(answers)
    return rows, {f"smooth_decoder_{name}": summary[name] for name in ("ece", "examples")}


def summarise_answers(answers: Sequence[JudgedReconstruction]) -> tuple[list[ResultRow], dict[str, Any]]:
    """Return rows with the calibration bins and a summary of every route, and a summary of all routes.

    A route is a method that gave answers, for images or for rows of tables. In the last summary, `ece` is the largest expected
    calibration error of a route.
    """
    groups = group_by_route(answers)
    rows = [
        {"route": route, **row}
        for route, (p, right) in groups.items()
        for row in (*make_bins(p, right), _summarise_route(p, right, compute_undecided_share(answers, route)))
    ]
    errors = {route: measure_calibration_error(*pair) for route, pair in groups.items() if len(pair[0])}
    everything = [np.concatenate(parts) for parts in zip(*groups.values(), strict=True)]
    return rows, {
        "ece": max(errors.values(), default=None),
        "ece_route": max(errors, key=errors.__getitem__, default=None),
        "ece_all": measure_calibration_error(*everything),
        "brier_all": brier(*everything),
        "examples": sum(len(answer.recovered) for answer in answers),
        "cases": len(answers),
        "undecided": compute_undecided_share(answers),
    }


def group_by_route(answers: Sequence[JudgedReconstruction]) -> Mapping[str, tuple[Floats, Floats]]:
    """Return a dict from route to the confidences and the outcomes (0 or 1) of its examples that have a confidence, both (N,).

    A route is the method that gave the answer, with the kind of data, such as "optimisation, images".
    """
    found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for one in answers:
        probabilities, right = found[_name_group(one)]
        for p, recovered in zip(one.confidence, one.recovered, strict=True):
            if not isnan(p):
                probabilities.append(p)
                right.append(float(recovered))
    return {name: (np.array(probabilities), np.array(right)) for name, (probabilities, right) in sorted(found.items())}


def compute_undecided_share(answers: Sequence[JudgedReconstruction], route: str = "") -> float:
    """Return the share of examples without a confidence. route: a key of `group_by_route`; by default, all are counted."""
    of_all = [isnan(p) for answer in answers if route in ("", _name_group(answer)) for p in answer.confidence]
    return sum(of_all) / max(1, len(of_all))


def _name_group(one: JudgedReconstruction) -> str:
    return f"{get_curve_family(one.route)}, {'images' if one.is_image else 'rows'}"


def _summarise_route(p: Floats, right: Floats, undecided: float) -> dict[str, Any]:
    """Return the summary row of a route. said: confidences. right: outcomes, 0 or 1. undecided: share without a confidence.

    ece_of_chance: the expected `ece` if these confidences were perfectly calibrated; above 0 because the sample is finite.
    """
    rng = np.random.default_rng(0)
    drawn = [measure_calibration_error(p, (rng.random(len(p)) < p).astype(float)) for _ in range(200)]
    return {
        "bin": "all", "answers": len(p), "said": float(p.mean()) if len(p) else None,
        "recovered": float(right.mean()) if len(p) else None, "brier": brier(p, right) if len(p) else None,
        "ece": measure_calibration_error(p, right), "ece_of_chance": float(np.mean(drawn)), "undecided": undecided,
    }  # fmt: skip


def _select_cells(options: Options) -> list[tuple[str, Cell]]:
    if not options.quick:
        every = [(group, cell) for group, cells in {**CELLS, "unseen": UNFITTED_NETWORK_CELLS}.items() for cell in cells]
        return [(group, replace(cell, cases=-(-cell.cases // 2))) for group, cell in every]
    return [(group, replace(cell, cases=1)) for group, count in QUICK_CELL_COUNTS.items() for cell in CELLS[group][:count]]


def place_cells(cells: Sequence[tuple[str, Cell]]) -> list[tuple[str, Cell, int]]:
    """Return (group, cell, number of examples to skip) for each pair (group, cell).

    Cells of one data set then share no example, if it is large enough. group: any name, which is returned unchanged.
    """
    taken: dict[str, int] = defaultdict(int)
    found = []
    for group, cell in cells:
        found.append((group, cell, taken[cell.data]))
        taken[cell.data] += cell.cases * cell.examples
    return found


def _attack_cells(options: Options, *, network: int) -> list[JudgedReconstruction]:
    """Attack all cells with the weights of one seed, and return the scored reconstructions.

    network: number of the seed, from 0. Examples from data sets are the same for each seed. The random pixels of cells with the
    data "noise", their labels, and the random numbers of the attacks change with the seed.
    """
    options = replace(options, seed=options.seed + SEED_OFFSET + NETWORK_SEED_STEP * network)
    return _attack_placed(_select_cells(options), options)


def _attack_placed(cells: Sequence[tuple[str, Cell]], options: Options) -> list[JudgedReconstruction]:
    return [one for _, cell, at in place_cells(cells) for one in attack_cell(cell, options, part="report", skip=at)]


def make_bins(p: Floats, right: Floats, count: int = NUM_BINS) -> list[dict[str, Any]]:
    """Divide [0, 1] into `count` bins of equal width, and return a row for each bin in which a confidence lies.

    p: confidences (N,), in [0, 1]. right: outcomes (N,), 1 for a success, otherwise 0.
    The row holds the bin's range and, of the confidences in it, the number ("answers"), the mean ("said"), and the share of
    successes ("recovered"). The lower end of a bin belongs to it; the last bin also contains 1.
    """
    at = np.clip((p * count).astype(int), 0, count - 1)
    rows = []
    for k in range(count):
        inside = at == k
        if inside.any():
            numbers = {"answers": int(inside.sum()), "said": float(p[inside].mean()), "recovered": float(right[inside].mean())}
            rows.append({"bin": f"{k / count:.1f} to {(k + 1) / count:.1f}", **numbers})
    return rows


def measure_calibration_error(p: Floats, right: Floats, count: int = NUM_BINS) -> float:
    """Return the expected calibration error (Naeini et al. 2015).

    It is the mean over answers of the absolute difference between mean confidence and share of successes in their bin; 0 without
    answers. p: confidences (N,), in [0, 1]. right: outcomes (N,), 0 or 1. count: number of bins of equal width.
    """
    rows = make_bins(p, right, count)
    return sum(row["answers"] * abs(row["said"] - row["recovered"]) for row in rows) / max(1, len(p))


def brier(p: Floats, right: Floats) -> float:
    """Return the Brier score: the mean squared difference of confidences `p` (N,) and outcomes `right` (N,), 0 or 1."""
    return float(np.mean((p - right) ** 2))


def draw_diagram(of: Mapping[str, tuple[Floats, Floats]], path: Path) -> None:
    """Draw a reliability diagram, the share of successes by confidence, and write it to `path` as an image.

    It has one panel for each key of `of`: a dict from a route, the method that gave the answers, to their confidences (N,) and
    outcomes (N,), 0 or 1. Folders on the way to `path` are created.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(of))
    lines = -(-len(of) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3 * columns, 3.2 * lines), squeeze=False)
    for axis in axes.flat[len(of) :]:
        axis.set_visible(False)
    for axis, (name, (p, right)) in zip(axes.flat, of.items(), strict=False):
        rows = make_bins(p, right)
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        sizes = [12 + 4 * row["answers"] ** 0.8 for row in rows]
        axis.scatter([row["said"] for row in rows], [row["recovered"] for row in rows], s=sizes, alpha=0.8)
        axis.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), xlabel="confidence", ylabel="recovered")
        axis.set_title(f"{name}\n{len(p)} examples", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
