"""Charts as SVG in the page's colours and fonts. Equal names and data give equal SVG texts."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attacker.report.contents import GrowthLine
from attacker.scoring.statistics import Floats

INK_COLOUR, ACCENT_COLOUR, FAINT_COLOUR = "#010203", "#040506", "#070809"
PAGE_COLOURS = {INK_COLOUR: "currentColor", ACCENT_COLOUR: "var(--accent)", FAINT_COLOUR: "var(--rule)"}
MAX_POINTS, MAX_LINES = 160, 60
CHART_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "text.color": INK_COLOUR,
    "axes.edgecolor": FAINT_COLOUR,
    "axes.labelcolor": INK_COLOUR,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT_COLOUR,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT_COLOUR,
    "ytick.color": FAINT_COLOUR,
    "xtick.labelcolor": INK_COLOUR,
    "ytick.labelcolor": INK_COLOUR,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "svg.fonttype": "none",
}


def draw_loss_curves(name: str, losses: Sequence[Floats]) -> str | None:
    """Return a chart of the attack's own loss over its iterations, on a log scale; None if no case has a positive loss.

    Each thin line is one case; at most `MAX_LINES` cases have one. The thick line is the median over all cases with a positive
    loss; after its last iteration, a case counts with its last loss.
    losses: for each case, the loss after each iteration.
    name: text that differs from the names of all other charts of the page, so that no element ids are equal.
    """
    curves = [loss for loss in losses if (np.isfinite(loss) & (loss > 0)).any()]
    if not curves:
        return None
    longest = max(map(len, curves))
    with _open_chart(name, width=4.8, height=2.7) as (axes, svg):
        for curve in curves[:: -(-len(curves) // MAX_LINES)]:
            axes.plot(
                *_thin_curve(_mask_non_positive(curve)),
                color=INK_COLOUR,
                linewidth=0.6,
                alpha=0.28,
                marker="." if len(curve) == 1 else "",
            )
        held = np.stack([np.pad(_mask_non_positive(curve), (0, longest - len(curve)), mode="edge") for curve in curves])
        axes.plot(*_thin_curve(_compute_median(held)), color=ACCENT_COLOUR, linewidth=2, marker="o" if longest == 1 else "")
        axes.set(yscale="log", xlabel="iteration")
        _widen_axis(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    return svg[0]


def draw_over_rounds(name: str, rounds: Sequence[int], values: Sequence[float | None], *, share: bool) -> str | None:
    """Return a chart of one quantity over the rounds; None if no value is a finite number.

    name: as in `draw_loss_curves`. values: one per round; the line connects the neighbours of a round whose value is None or not
    finite. share: whether the vertical axis runs from 0 to 1; by default it runs from 0 to above the largest value.
    """
    known = [(round, value) for round, value in zip(rounds, values, strict=True) if value is not None and np.isfinite(value)]
    if not known:
        return None
    with _open_chart(name, width=3.4, height=2.0) as (axes, svg):
        marker = "o" if len(known) <= 30 else ""
        axes.plot(*zip(*known, strict=True), color=ACCENT_COLOUR, linewidth=1.6, marker=marker, markersize=3.5, clip_on=False)
        axes.set_ylim((0, 1) if share else (0, 1.08 * max(value for _, value in known) or 1))
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
    return svg[0]


DASHES = ("solid", (0, (6, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
"""Dash patterns that distinguish the lines of attacks, also in print."""


def draw_growth(name: str, lines: Sequence[GrowthLine]) -> str | None:
    """Return a chart of the share of examples recovered against the number of recorded rounds; None without lines.

    The line of the attack that recovers most at the end has the accent colour. Nulls are faint, bounds are thin with triangles.
    name: as in `draw_loss_curves`.
    """
    if not lines:
        return None
    best = max(range(len(lines)), key=lambda i: lines[i].points[-1].share)
    with _open_chart(name, width=6.4, height=3.2) as (axes, svg):
        for i, line in enumerate(lines):
            colour, style = ACCENT_COLOUR if i == best else INK_COLOUR, DASHES[i % len(DASHES)]
            label, common = line.spec.removesuffix("()"), dict[str, Any](linestyle=style, clip_on=False)
            axes.plot(*zip(*line.points, strict=True), color=colour, linewidth=1.8, marker="o", markersize=3.5, **common)
            axes.lines[-1].set_label(label)
            if line.null:
                axes.plot(*zip(*line.null, strict=True), color=INK_COLOUR, alpha=0.35, linewidth=1, marker="x", markersize=3.5)
                axes.lines[-1].set_label(f"{label}, null")
            if line.bound:
                axes.plot(*zip(*line.bound, strict=True), color=colour, linewidth=0.8, marker="v", markersize=3.5, **common)
                axes.lines[-1].set_label(f"{label}, bound")
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("recorded rounds")
        axes.set_ylabel("share of examples recovered")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return svg[0]


def _widen_axis(axes: Axes) -> None:
    """Widen the logarithmic y axis to at least a factor of 10, so that a loss that hardly changed looks flat."""
    low, high = axes.get_ylim()
    if high < 10 * low:
        middle = np.sqrt(low * high)
        axes.set_ylim(middle / np.sqrt(10), middle * np.sqrt(10))


def _mask_non_positive(curve: Floats) -> Floats:
    """Return the curve with NaN, drawn as a gap, in place of values that are not positive or not finite."""
    return np.where(np.isfinite(curve) & (curve > 0), curve, np.nan)


def _compute_median(curves: Floats) -> Floats:
    """Return the median (T,) of curves (N, T) at each point, ignoring NaN; NaN at points where all curves are NaN."""
    median = np.full(curves.shape[1], np.nan)
    known = ~np.isnan(curves).all(axis=0)
    median[known] = np.nanmedian(curves[:, known], axis=0)
    return median


def _thin_curve(curve: Floats) -> tuple[Floats, Floats]:
    chosen = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), MAX_POINTS)).round().astype(int))
    return chosen + 1.0, curve[chosen]


@contextmanager
def _open_chart(name: str, *, width: float, height: float) -> Iterator[tuple[Axes, list[str]]]:
    """Return a context manager that yields axes to draw on, and a list that receives the SVG text when the `with` block ends.

    name: text that differs from the names of all other charts of the page, so that no element ids are equal. width, height: in
    inches.
    """
    svg: list[str] = []
    with mpl.rc_context({**CHART_STYLE, "svg.hashsalt": f"fedleak {name}"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure.add_subplot(), svg
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
        svg.append(_make_inline(buffer.getvalue(), PAGE_COLOURS))


def _make_inline(svg: str, colours: Mapping[str, str]) -> str:
    """Return the text of an SVG file as an element for use inside an HTML page.

    Prologue, metadata, fixed sizes and names of fonts are removed, and so are element ids such as "figure_1", which matplotlib
    gives in every chart. colours: dict from colours in the SVG to the CSS colours that replace them.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|width|height|version)="[^"]*"', "", svg.split(">", 1)[0]) + ">" + svg.split(">", 1)[1]
    svg = re.sub(r' id="(?=[a-z0-9.]+_\d+")[^"]*"', "", svg, flags=re.IGNORECASE).replace("xlink:href", "href")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    for sentinel, colour in colours.items():
        svg = svg.replace(sentinel, colour)
    return svg.strip()
