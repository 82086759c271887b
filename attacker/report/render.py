"""Rendering of a report as one HTML page, which needs no other files, on one or several runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from attacker.reconstruction import MAX_RECOVERED_MSE
from attacker.report import conclusions, figures, formats
from attacker.report.contents import AttackOnRun, Example, ReportedRun
from attacker.report.gather import MAX_PAIRS, gather_run
from attacker.report.pairs import Picture
from attacker.report.templates import make_environment
from attacker.report.unscored import UnscoredExample
from attacker.scoring.metrics import TABLE_TOLERANCE
from fedsim.recording import find_run
from fedsim.recording.files import make_private, write_bytes

STRIP_EXAMPLES = 5
"""Largest number of examples beside the verdict."""
MIN_PICTURE_WIDTH = 112
"""Smallest width of a picture on the page, in CSS pixels."""
MAX_PICTURE_WIDTH = 192


@dataclass(frozen=True)
class Chart:
    """A chart as SVG, with its title and its alternative text for screen readers."""

    title: str
    svg: Markup
    alt: str


def build(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report on `runs`, in their order, to one HTML file that loads no other files, and return its path.

    runs: folders of runs or of recordings, at least one.
    out:  by default report.html in the folder of the first run. Only its owner can read the file, since it shows private
          originals.
    Raises ValueError if a folder is neither a run nor a recording, or if `runs` is empty.
    """
    if not runs:
        raise ValueError("a report needs at least one run, got none")
    out = out or find_run(Path(runs[0])) / "report.html"
    page = render([gather_run(Path(folder)) for folder in runs])
    if not out.parent.exists():
        make_private(out.parent)
    write_bytes(out, page.encode())
    return out


def render(runs: Sequence[ReportedRun]) -> str:
    """Return the report on `runs` as the text of one HTML page."""
    template = _make_environment().get_template("page.html")
    return template.render(
        runs=[_make_context(i, run) for i, run in enumerate(runs, start=1)],
        differences=conclusions.list_differences(runs),
        names=", ".join(run.name for run in runs),
        max_mse=MAX_RECOVERED_MSE,
        tolerance=TABLE_TOLERANCE,
        most=MAX_PAIRS,
        originals=any(attack.examples for run in runs for attack in run.attacks),
    )


def _make_context(number: int, run: ReportedRun) -> dict[str, Any]:
    return {
        "id": f"run-{number}",
        "run": run,
        "verdict": conclusions.describe_verdict(run),
        "coverage": conclusions.describe_coverage(run),
        "not_finished": conclusions.describe_unfinished(run),
        "best": conclusions.find_best_attack(run),
        "strip": _select_strip(run),
        "unscored_strip": _select_unscored_strip(run),
        "nothing_finished": bool(run.attacks) and not conclusions.is_finished(run),
        "losses": {attack.source: _draw_loss_chart(number, attack) for attack in run.attacks},
        "growth": _draw_growth_chart(number, run),
        "utility": _draw_utility_charts(number, run),
        "no_lpips": _list_lpips_reasons(run),
    }


def _list_lpips_reasons(run: ReportedRun) -> dict[str, list[str]]:
    """Return a dict from each reason for missing LPIPS to the specifications of its attacks; [] means all attacks of the run."""
    reasons = sorted({reason for attack in run.attacks for reason in attack.lpips_reasons})
    held = {reason: [attack.spec for attack in run.attacks if reason in attack.lpips_reasons] for reason in reasons}
    return {reason: specs if len(specs) < len(run.attacks) else [] for reason, specs in held.items()}


def _select_strip(run: ReportedRun) -> list[Example]:
    """Return the first `STRIP_EXAMPLES` examples of the best attack with a picture of the original, for the top of the page."""
    best = conclusions.find_best_attack(run)
    shown = best.examples if best else ()
    return [example for example in shown if example.row.is_finished and example.pair.original][:STRIP_EXAMPLES]


def _select_unscored_strip(run: ReportedRun) -> list[UnscoredExample]:
    """Return up to `STRIP_EXAMPLES` reconstructed images of the first attack that has reconstructions without scores.

    The result is empty if the run has scores of finished cases (done or failed), and for table rows.
    """
    first = next((attack.unscored.found for attack in run.attacks if attack.unscored.found), ())
    return (
        [example for example in first if example.shown.reconstruction][:STRIP_EXAMPLES]
        if conclusions.find_best_attack(run) is None
        else []
    )


def _draw_loss_chart(number: int, attack: AttackOnRun) -> Chart | None:
    svg = figures.draw_loss_curves(f"run-{number} {attack.source}", attack.losses)
    if svg is None:
        return None
    title = f"{formats.format_attack_name(attack.attack)}, {formats.format_count(len(attack.losses), 'case')}"
    return Chart(title, Markup(svg), f"Loss of {attack.spec} over its iterations, one line a case, and their median")


def _draw_growth_chart(number: int, run: ReportedRun) -> Chart | None:
    """Return the chart of the share recovered by number of rounds, or None. number: that of the run, for unique ids."""
    svg = figures.draw_growth(f"run-{number} growth", run.growth)
    if svg is None:
        return None
    description = "; ".join(f"{line.spec}: {formats.describe_growth(line.points)}" for line in run.growth)
    return Chart("Examples recovered, by number of recorded rounds", Markup(svg), f"Share of examples recovered. {description}")


def _draw_utility_charts(number: int, run: ReportedRun) -> list[Chart]:
    rounds = [int(row["round"]) for row in run.metrics]
    unit, size = ("MB", 1e6) if max((row.get("bytes_up") or 0 for row in run.metrics), default=0) >= 1e5 else ("kB", 1e3)
    quantities = (
        ("Held-out loss", "loss", 1.0),
        ("Held-out accuracy", "accuracy", 1.0),
        (f"Sent by all clients, {unit}", "bytes_up", size),
    )
    charts = []
    for title, key, scale in quantities:
        values = [None if row.get(key) is None else row[key] / scale for row in run.metrics]
        if svg := figures.draw_over_rounds(f"run-{number} {key}", rounds, values, share=key == "accuracy"):
            charts.append(Chart(title, Markup(svg), f"{title} of {run.name} by round"))
    return charts


def _make_environment() -> Environment:
    environment = make_environment("attacker.report")
    environment.filters |= {
        name: getattr(formats, name)
        for name in (
            "format_attack_name",
            "format_rate",
            "format_percent",
            "format_percent_interval",
            "format_interval",
            "format_count",
            "format_duration",
            "format_bytes",
            "describe_privacy",
            "format_finished",
            "describe_growth",
        )
    }
    environment.filters["zoom"] = _choose_width
    return environment


def _choose_width(picture: Picture) -> int:
    """Return the width in CSS pixels: at most `MAX_PICTURE_WIDTH`, or the least multiple of at least `MIN_PICTURE_WIDTH`."""
    if picture.width >= MIN_PICTURE_WIDTH:
        return min(picture.width, MAX_PICTURE_WIDTH)
    return picture.width * -(-MIN_PICTURE_WIDTH // picture.width)
