"""Tables of a sweep (CSV per setting and attack, LaTeX and HTML per setting), and the plot of accuracy against error on its page.

A setting is one defense at one strength with one choice of batch size, local work and rounds.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from attacker.report.templates import make_environment
from attacker.scoring.statistics import Estimate
from attacker.sweep.comparison import AttackOnSetting, PairedComparison, SettingResult
from attacker.sweep.grid import SweepGrid
from fedsim.recording.files import write_bytes

NOT_AUDITED = "not audited"
TABLE_COLUMNS = (
    "batch",
    "local work",
    "rounds",
    "defense",
    "accuracy",
    "MB sent",
    "epsilon",
    "strongest attack",
    "RMSE",
    "recovered",
)
LATEX_SPECIAL = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
SIZE_INCHES = (6.4, 4.0)


def write_tables(
    grid: SweepGrid, settings: Sequence[SettingResult], comparisons: Sequence[PairedComparison], out: Path
) -> list[Path]:
    """Write sweep.csv, sweep.tex and sweep.html into `out`, and return their paths."""
    contents = {
        "sweep.csv": to_csv(settings),
        "sweep.tex": to_latex(settings),
        "sweep.html": to_html(grid, settings, comparisons),
    }
    for name, text in contents.items():
        write_bytes(out / name, text.encode())
    return [out / name for name in contents]


def to_csv(settings: Sequence[SettingResult]) -> str:
    """Return a CSV table with one line per setting and attack, and one for a setting without attacks.

    The column `counts` is True for the strongest attack of a setting, by which the setting is judged.
    """
    text = io.StringIO()
    rows = [
        _describe_attack(setting, name) for setting in settings for name in (*setting.attacks, *([] if setting.attacks else [""]))
    ]
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _describe_attack(setting: SettingResult, name: str) -> dict[str, Any]:
    attack = setting.attacks.get(name) or AttackOnSetting(name="", specs=(), knows=False, errors={}, cases={})
    rmse, recovered = attack.rmse, attack.recovered
    batch, work, rounds = setting.training
    return {
        "batch_size": batch,
        "local_work": work,
        "rounds": rounds,
        "defense": setting.defense,
        "strength": setting.strength,
        "settings": setting.settings,
        "seeds": setting.finished,
        "seeds_wanted": setting.seeds,
        "failed": setting.failed,
        "accuracy": _round(setting.accuracy),
        "loss": _round(setting.loss),
        "bytes_up": _round(setting.bytes_up),
        "epsilon": _round(setting.epsilon),
        "attack": name,
        "spec": "; ".join(attack.specs),
        "knows_defense": attack.knows,
        "refused": attack.refused,
        "counts": name == setting.strongest and bool(name),
        "audited": setting.audited,
        "on_front": setting.on_front,
        "examples": len(attack.errors),
        "rmse": _round(rmse.value if rmse else None),
        "rmse_low": _round(rmse.low if rmse else None),
        "rmse_high": _round(rmse.high if rmse else None),
        "null_rmse": _round(attack.null_rmse),
        "psnr": _round(attack.psnr),
        "recovered": _round(recovered.value if recovered else None),
        "recovered_low": _round(recovered.low if recovered else None),
        "recovered_high": _round(recovered.high if recovered else None),
        "null_recovered": _round(attack.null_recovered),
    }


def _round(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def list_cells(setting: SettingResult) -> list[str]:
    """Return the texts of a setting's line, in the order of `TABLE_COLUMNS`."""
    batch, work, rounds = setting.training
    leak = setting.leak
    shown = NOT_AUDITED if leak is not None and not setting.audited else leak.name if leak else setting.failed or "not finished"
    epsilon = "infinite" if setting.epsilon is None else f"{setting.epsilon:.3g}"
    return [
        str(batch),
        work,
        str(rounds),
        f"{setting.name}: {setting.settings}" if setting.settings else setting.name,
        "" if setting.accuracy is None else f"{setting.accuracy:.3f}",
        "" if setting.bytes_up is None else f"{setting.bytes_up / 1e6:.3g}",
        epsilon if setting.finished else "",
        shown,
        _format_estimate(leak.rmse) if leak else "",
        _format_estimate(leak.recovered) if leak else "",
    ]


def _format_estimate(estimate: Estimate | None) -> str:
    """Return a value with its interval, such as "0.120 (0.100 to 0.140)", or its "range" if examples are few; "" for None."""
    if estimate is None:
        return ""
    return f"{estimate.value:.3f} ({'' if estimate.is_interval else 'range '}{estimate.low:.3f} to {estimate.high:.3f})"


def to_latex(settings: Sequence[SettingResult]) -> str:
    """Return a tabular of the LaTeX package booktabs with one line per setting, in bold if the setting is on the Pareto front.

    The two objectives are accuracy and protection, the RMSE of the strongest attack, see `SettingResult.on_front`.
    """
    lines = [rf"\begin{{tabular}}{{{'l' * len(TABLE_COLUMNS)}}}", r"\toprule", " & ".join(TABLE_COLUMNS) + r" \\", r"\midrule"]
    for setting in settings:
        cells = [escape_latex(cell) for cell in list_cells(setting)]
        lines.append(" & ".join(rf"\textbf{{{cell}}}" if setting.on_front and cell else cell for cell in cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escape_latex(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return "".join(LATEX_SPECIAL.get(character, character) for character in text)


def to_html(grid: SweepGrid, settings: Sequence[SettingResult], comparisons: Sequence[PairedComparison]) -> str:
    """Return one page that loads no other files: for each kind of training the best protected setting, the plot and the table."""
    trainings = list(dict.fromkeys(setting.training for setting in settings))
    figures = {training: draw_front([setting for setting in settings if setting.training == training]) for training in trainings}
    return (
        make_environment("attacker.sweep")
        .get_template("sweep.html")
        .render(
            grid=grid,
            settings=settings,
            comparisons=comparisons,
            trainings=trainings,
            figures=figures,
            columns=TABLE_COLUMNS,
            cells=list_cells,
            describe_comparison=describe_comparison,
            describe_training=describe_training,
            unfinished=sum(setting.seeds - setting.finished for setting in settings),
        )
    )


def describe_training(training: tuple[int, str, int]) -> str:
    """Return batch size, local work and number of rounds as text."""
    batch, work, rounds = training
    return f"batches of {batch}, {work} a round, {rounds} round{'s' * (rounds != 1)}"


def describe_comparison(comparison: PairedComparison) -> str:
    """Return one sentence that compares the best protected setting (the winner) with another one.

    It gives the difference of the two settings' RMSE with its interval, the numbers of examples and of batches, and the adjusted
    p-value.
    """
    difference = comparison.difference
    ends = f"{'simultaneous 95 % interval' if difference.is_interval else 'too few batches for an interval; values from'}"
    names = f"behind {comparison.winner.name} than behind {comparison.other.name}"
    text = f"reconstructions have a higher RMSE, which is better protection, {names}, by {difference.value:+.3f}"
    chance = "" if comparison.adjusted is None else f", p = {comparison.adjusted:.2g} after Holm's correction"
    sample = f"{difference.count} examples in {difference.clusters} batches"
    return f"{text} ({ends} {difference.low:+.3f} to {difference.high:+.3f}, {sample}{chance})."


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
