"""The demonstration: the same federation undefended and defended, recorded, attacked, scored and shown."""

from pathlib import Path
from typing import Any

from attacker.attacks import AttackSpec
from attacker.progress import replay_with_progress
from attacker.report import build
from attacker.scoring import Scorer, Summary, summarise
from fedsim.cli import federate
from fedsim.console import err
from fedsim.experiment import read
from fedsim.wire import Recording

EXPERIMENT = Path(__file__).with_name("demo.toml")
FEDERATIONS = {"undefended": "", "defended": "clip(1) | gaussian(0.1)"}
ATTACKS: dict[str, dict[str, Any]] = {
    "cpl": {"restarts": 2},
    "inverting_gradients": {"steps": 1600, "signed": False, "tv": 1e-3},
}
"""Those of Inverting Gradients were chosen on CIFAR-10 images: nothing here was tuned on what it is shown on."""


def run(folder: Path, *, engine: str = "ray") -> Path:
    """Run all of it in `folder`, skipping what is done and going on with what was cut off; returns the report."""
    runs = []
    for name, defense in FEDERATIONS.items():
        experiment = read(EXPERIMENT, [("defense", defense)])
        federate(experiment, folder / name, engine=engine, client_seed=0, resume=True)
        for summary in attack(folder / name, defended=bool(defense)):
            _tell(summary)
        runs.append(folder / name)
    return build(runs, folder / "report.html")


def attack(run: Path, *, defended: bool) -> list[Summary]:
    """Attack a run with and without the gradient, for an attacker who knows the defense and one who ignores it; score it."""
    recording, scorer, rows = Recording(run / "recording"), Scorer(run, [run / "truth"]), []
    for name, arguments in ATTACKS.items():
        for knowledge in ({}, {"knows_defense": False}) if defended else ({},):
            for null in (False, True):
                spec = AttackSpec(name=name, arguments={**arguments, **knowledge}, null=null)
                replayed = replay_with_progress(recording, spec, run / "reconstructions")
                rows += scorer.score(replayed.folder)
    return summarise(rows)


def _tell(summary: Summary) -> None:
    if summary.success is None:
        err.print(f"[bold]{summary.attack}[/]: nothing finished yet")
        return
    null = f", its null {summary.null.success.value:.0%}" if summary.null and summary.null.success else ""
    quality = f", {summary.psnr.value:.1f} dB" if summary.psnr else ""
    defense = f" under {summary.defense}" if summary.defense else ""
    knows = "" if summary.knows_defense else ", ignoring the defense"
    err.print(
        f"[bold]{summary.attack}[/]{defense}{knows}: {summary.success.value:.0%} of {summary.examples} examples recovered"
        f" (95 % CI {summary.success.low:.0%} to {summary.success.high:.0%}){null}{quality}"
    )
