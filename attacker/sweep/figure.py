"""The plot of accuracy against the RMSE of the strongest attack, with its Pareto front (`SettingResult.on_front`), as SVG."""

import io
from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from attacker.sweep.comparison import SettingResult

SIZE_INCHES = (6.4, 4.0)


def draw_front(settings: Sequence[SettingResult]) -> str:
    """Return an SVG with one point per audited setting and the Pareto front as a line; "" without points.

    settings: settings of one kind of training.
    Up is more accurate, right is better protected (larger error of the strongest attack).
    Which settings are audited is defined in `SettingResult.audited`. Settings that are not audited are not drawn, since a better
    attack might find more; nor are settings without a known accuracy.
    """
    points = [
        (setting.leak.rmse.value, setting.accuracy, setting)
        for setting in settings
        if setting.audited and setting.accuracy is not None and setting.leak is not None and setting.leak.rmse is not None
    ]
    if not points:
        return ""
    with mpl.rc_context({"svg.hashsalt": "fedleak sweep", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for x, y, setting in points:
            axes.plot(x, y, marker="o" if setting.on_front else ".", color="tab:blue" if setting.on_front else "tab:gray")
            axes.annotate(setting.name, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=8)
        front = sorted((x, y) for x, y, setting in points if setting.on_front)
        axes.plot(*zip(*front, strict=True), color="tab:blue", linewidth=1)
        axes.set(xlabel="RMSE of the strongest attack (larger: less leaks)", ylabel="accuracy")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
