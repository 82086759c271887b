"""Measures of the calibration of stated confidences: bins, Brier score, expected calibration error, and a reliability diagram."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attacker.scoring.statistics import Floats

NUM_BINS = 10


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
