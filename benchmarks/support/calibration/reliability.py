"""Calibration of probabilities: bins, Brier score, expected calibration error, and the reliability diagram."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attacker.scoring.statistics import Floats

NUM_BINS = 10


def make_bins(said: Floats, right: Floats, count: int = NUM_BINS) -> list[dict[str, Any]]:
    """Return one row for each bin of confidence that is not empty: number of answers, mean confidence and share of successes.

    said: confidences (N,), in [0, 1]. right: outcomes (N,), 0 or 1. count: number of bins of equal width.
    """
    at = np.clip((said * count).astype(int), 0, count - 1)
    rows = []
    for k in range(count):
        inside = at == k
        if inside.any():
            numbers = {"answers": int(inside.sum()), "said": float(said[inside].mean()), "recovered": float(right[inside].mean())}
            rows.append({"bin": f"{k / count:.1f} to {(k + 1) / count:.1f}", **numbers})
    return rows


def measure_calibration_error(said: Floats, right: Floats, count: int = NUM_BINS) -> float:
    """Return the expected calibration error (Naeini et al. 2015).

    It is the mean over answers of the absolute difference between mean confidence and share of successes in their bin.
    Arguments are those of `make_bins`.
    """
    rows = make_bins(said, right, count)
    return sum(row["answers"] * abs(row["said"] - row["recovered"]) for row in rows) / max(1, len(said))


def brier(said: Floats, right: Floats) -> float:
    """Return the Brier score: the mean squared difference of probabilities `said` and outcomes `right` (0 or 1)."""
    return float(np.mean((said - right) ** 2))


def draw_diagram(of: Mapping[str, tuple[Floats, Floats]], path: Path) -> None:
    """Draw a reliability diagram: the share of successes by confidence, with one panel for each route.

    of: dict from a route to the confidences of its answers and their outcomes (0 or 1), both (N,).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(of))
    lines = -(-len(of) // columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(3 * columns, 3.2 * lines), squeeze=False)
    for axis in axes.flat[len(of) :]:
        axis.set_visible(False)
    for axis, (name, (said, right)) in zip(axes.flat, of.items(), strict=False):
        rows = make_bins(said, right)
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        sizes = [12 + 4 * row["answers"] ** 0.8 for row in rows]
        axis.scatter([row["said"] for row in rows], [row["recovered"] for row in rows], s=sizes, alpha=0.8)
        axis.set(xlim=(-0.05, 1.05), ylim=(-0.05, 1.05), xlabel="confidence", ylabel="recovered")
        axis.set_title(f"{name}\n{len(said)} examples", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)
