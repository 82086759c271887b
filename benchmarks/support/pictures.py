"""Pictures for the documentation, drawn with Matplotlib."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@contextmanager
def open_picture(path: Path, width: float, height: float) -> Iterator[Axes]:
    """Yield the axes of a figure of this size in inches, and write it to `path` at the end of the `with` block.

    Lines with a label are listed to the right of the axes.
    """
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        yield axes
        if axes.get_legend_handles_labels()[1]:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figure.savefig(path, dpi=160, facecolor="white")
