"""Figure of a network as a chain of boxes that shows how much of each layer's input its equations determine."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle

from attacker.attacks.closed_form.rank.analysis import LayerRank, RankReport

INK_COLOUR, FAINT_COLOUR, CRITICAL_COLOUR = "#222222", "#8a8f98", "#c81e2b"
GRADIENT_COLOUR, WEIGHT_COLOUR, MISSING_COLOUR, UNUSED_COLOUR = "#2f5d8a", "#a9c6e3", "#fbe3e4", "#e6e8eb"
BOX_WIDTH, BOX_GAP, MIN_BOX_HEIGHT = 1.0, 0.75, 0.035
"""Width of a box, gap between boxes in box widths, and smallest height of a box relative to the tallest."""


def write_chain_picture(report: RankReport, names: Sequence[str], path: Path, *, title: str, verdict: str) -> None:
    """Draw a row of boxes, one per layer, and write the picture as PNG, SVG or PDF, depending on the suffix of `path`.

    The height of each box, down to a smallest one, is proportional to the number of the layer's unknowns, the values of its
    input. Its colours show which share of them gradient constraints determine, which share weight constraints determine in
    addition, which share equations are missing for (hatched in red), and which share the layer does not use. The critical layer
    (`RankReport.critical`) has a red frame, as in R-GAP, figure 2. The critical layer has the most missing equations; if several
    layers have equally many, or if no equation is missing, it is the one of them with the largest `LayerRank.index`, R-GAP's
    index.

    names: description of each layer. title, verdict: text above the boxes.
    """
    tallest = max(layer.unknowns for layer in report.layers)
    count = len(report.layers)
    with mpl.rc_context({"font.size": 9, "text.color": INK_COLOUR, "svg.hashsalt": "fedleak chain", "hatch.linewidth": 0.8}):
        figure = Figure(figsize=(max(6.8, 1.35 * count + 1.9), 4.7))
        axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
        axes.set_axis_off()
        for i, (layer, what) in enumerate(zip(report.layers, names, strict=True)):
            height = max(MIN_BOX_HEIGHT, layer.unknowns / tallest)
            _draw_box(axes, i * (BOX_WIDTH + BOX_GAP), height, layer, critical=i == report.critical)
            _draw_captions(axes, i * (BOX_WIDTH + BOX_GAP), layer, what, critical=i == report.critical)
        for i in range(count + 1):
            _draw_arrow(axes, i * (BOX_WIDTH + BOX_GAP) - BOX_GAP)
        axes.text(-BOX_GAP, 0, "input", ha="right", va="center", color=FAINT_COLOUR)
        axes.text(count * (BOX_WIDTH + BOX_GAP), 0, "logits", ha="left", va="center", color=FAINT_COLOUR)
        middle = (count * (BOX_WIDTH + BOX_GAP) - BOX_GAP) / 2
        axes.text(middle, 0.98, title, ha="center", va="center", fontsize=12, fontweight="bold")
        axes.text(middle, 0.86, fill(verdict, 16 * count + 24), ha="center", va="center", color=INK_COLOUR)
        _draw_legend(axes, report)
        half = max(count * (BOX_WIDTH + BOX_GAP) / 2 + 1.0, 3.4)
        axes.set_xlim(middle - half, middle + half)
        axes.set_ylim(-1.25, 1.08)
        figure.savefig(path, dpi=160, facecolor="white", metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def _draw_box(axes: Axes, left: float, height: float, layer: LayerRank, *, critical: bool) -> None:
    low = -height / 2
    parts = (
        (layer.alone, GRADIENT_COLOUR, None),
        (layer.rank - layer.alone, WEIGHT_COLOUR, None),
        (layer.missing, MISSING_COLOUR, "////"),
        (layer.unknowns - layer.used, UNUSED_COLOUR, None),
    )
    for amount, colour, hatch in parts:
        part = height * amount / layer.unknowns
        axes.add_patch(
            Rectangle(
                (left, low),
                BOX_WIDTH,
                part,
                facecolor=colour,
                edgecolor=CRITICAL_COLOUR if hatch else "none",
                hatch=hatch,
                linewidth=0,
            )
        )
        low += part
    colour, line = (CRITICAL_COLOUR, 2.6) if critical else (INK_COLOUR, 0.8)
    axes.add_patch(Rectangle((left, -height / 2), BOX_WIDTH, height, facecolor="none", edgecolor=colour, linewidth=line))


def _draw_captions(axes: Axes, left: float, layer: LayerRank, title: str, *, critical: bool) -> None:
    middle, colour = left + BOX_WIDTH / 2, CRITICAL_COLOUR if critical else INK_COLOUR
    axes.text(middle, 0.62, fill(title, 14), ha="center", va="center", color=colour, fontweight="bold", fontsize=8.5)
    lines = (
        (f"{layer.unknowns:,} unknowns", INK_COLOUR),
        (f"{layer.gradients:,} gradient", GRADIENT_COLOUR),
        (f"{layer.weights:,} weight", "#5b87b5"),
        (f"RA {layer.index:,}".replace("-", "\u2212"), FAINT_COLOUR),
        (f"{layer.missing:,} missing" if layer.missing else "determined", CRITICAL_COLOUR if layer.missing else FAINT_COLOUR),
    )
    for row, (text, shade) in enumerate(lines):
        strong = "bold" if row == 4 and layer.missing else "normal"
        axes.text(middle, -0.62 - 0.085 * row, text, ha="center", va="center", color=shade, fontsize=8, fontweight=strong)


def _draw_arrow(axes: Axes, start: float) -> None:
    ends = (start + 0.08, 0), (start + BOX_GAP - 0.08, 0)
    axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=10, color=FAINT_COLOUR, linewidth=1))


def _draw_legend(axes: Axes, report: RankReport) -> None:
    handles = [
        Patch(facecolor=GRADIENT_COLOUR, label="determined by gradient constraints"),
        Patch(facecolor=WEIGHT_COLOUR, label="and by weight constraints"),
    ]
    if report.deficient_layers:
        handles.append(
            Patch(facecolor=MISSING_COLOUR, edgecolor=CRITICAL_COLOUR, hatch="////", linewidth=0, label="equations missing")
        )
    if any(layer.unknowns > layer.used for layer in report.layers):
        handles.append(Patch(facecolor=UNUSED_COLOUR, label="never looked at"))
    critical = "critical layer" if not report.full else "largest index (RA)"
    handles.append(Patch(facecolor="none", edgecolor=CRITICAL_COLOUR, linewidth=2, label=critical))
    axes.legend(
        handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8, handlelength=1.4, columnspacing=1.4
    )
