"""Pictures of reconstructions, drawn with Matplotlib."""

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torch import Tensor

from fedsim.recording import DataSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_EXAMPLES = 8
"""Default number of examples that are drawn."""
CELL_INCHES = 1.2
"""Inches of one image."""


def can_draw() -> bool:
    """Return whether Matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw_grid(rows: Mapping[str, Tensor | Sequence[Tensor | None]], data: DataSpec, captions: Sequence[str] = ()) -> "Figure":
    """Draw rows of examples with one example per column; None leaves a gap.

    rows: dict from the title of a row to its examples, (*shape) each. data: the shape in it decides whether examples are images.
    captions: text below the columns.
    Values are clamped to [0, 1], and NaN is drawn as 0. Images with three channels are drawn in colour; of other images, the
    first channel is drawn in grey. Table rows are drawn as strips of grey. Raises ImportError without Matplotlib, and ValueError
    without examples.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("Matplotlib is not installed: pip install matplotlib; the tensors are in result.x") from None
    columns = max(len(examples) for examples in rows.values())
    if not columns:
        raise ValueError(
            f"there is nothing to draw, since the figure would show no example in its rows {' and '.join(rows)}; draw a result "
            "with at least one reconstructed example"
        )
    figure = Figure(figsize=(CELL_INCHES * columns + 1, (CELL_INCHES + 0.15) * len(rows) + 0.2), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (title, examples) in enumerate(rows.items()):
        for column in range(columns):
            cell: Axes = axes[line, column]
            cell.set_xticks([])
            cell.set_yticks([])
            example = examples[column] if column < len(examples) else None
            if example is None:
                cell.axis("off")
            else:
                _draw_example(cell, example, data)
            if column == 0:
                cell.set_ylabel(title, fontsize=8)
            if line == len(rows) - 1 and column < len(captions):
                cell.set_xlabel(captions[column], fontsize=8)
    return figure


def _draw_example(cell: "Axes", example: Tensor, data: DataSpec) -> None:
    values = example.detach().cpu().float().nan_to_num().clamp(0, 1)
    if not data.is_image:
        cell.imshow(values[:, None].numpy(), cmap="gray", vmin=0, vmax=1, aspect="auto")
    elif len(values) == 3:
        cell.imshow(values.permute(1, 2, 0).numpy())
    else:
        cell.imshow(values[0].numpy(), cmap="gray", vmin=0, vmax=1)


def to_png(figure: "Figure") -> bytes:
    """Return a figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def to_html(text: str, picture: bytes | None) -> str:
    """Return HTML for a notebook: `text`, which is HTML already, and a PNG image below them. None: no image."""
    shown = "" if picture is None else f'<br><img src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
    return f"<div><code>{text}</code>{shown}</div>"
