"""The demonstration `attacker demo`: a face detector trained in four federations that are recorded, attacked and scored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape

from attacker.attacks import AttackSpec
from attacker.commands.progress_bar import replay_with_progress
from attacker.replay.replay import Replay
from attacker.report import build
from attacker.scoring import Scorer, Summary, summarise
from fedsim.commands.console import err
from fedsim.commands.run import federate
from fedsim.config.experiment import read
from fedsim.recording import Recording

EXPERIMENT_FILE = Path(__file__).with_name("demo.toml")
DEMO_SEARCH = ("cpl", {"optimiser": "wolfe", "tv": 3e-5, "steps": 60})
"""CPL with a weak smoothness prior. The prior's weight was chosen on photographs and on other faces of LFW."""
SHORT_SEARCH = ("cpl", {"optimiser": "wolfe", "tv": 3e-5, "steps": 20})
"""`DEMO_SEARCH` with fewer iterations, for updates that were computed from many examples."""
BATCH_OVERRIDES = {"training.batch_size": 8, "training.steps": 2, "rounds": 30}
"""Changes of demo.toml that make each update the result of two steps on batches of eight."""
Attacks = tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True, kw_only=True)
class DemoFederation:
    """One federation of the demonstration.

    shows:     what it demonstrates, in one sentence.
    overrides: keys of demo.toml that it changes, with their values.
    attacks:   names and arguments of the attacks. If the clients use a defense, each attack runs twice: knowing the defense, and
               ignoring it.
    """

    shows: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    attacks: Attacks = (DEMO_SEARCH,)

    @property
    def knowledge(self) -> tuple[dict[str, Any], ...]:
        """Return the arguments that are added to each attack, one dict per run of the attack.

        If the clients use a defense, the dicts are {}, with which an attack models the defense, and {"knows_defense": False},
        with which it ignores the defense. Without a defense, {} is the only dict.
        """
        return ({}, {"knows_defense": False}) if "defense" in self.overrides else ({},)


DEMO_FEDERATIONS: dict[str, DemoFederation] = {
    "single": DemoFederation(
        shows="One step on one photograph: every photograph can be computed from the update.",
        attacks=(("exact", {}), DEMO_SEARCH),
    ),
    "compressed": DemoFederation(
        shows="Only the largest tenth of each update is sent: this protects against an attack that ignores it, not against one "
        "that models it.",
        overrides={"defense": "top_k(0.1)"},
    ),
    "batches": DemoFederation(
        shows="Two steps on batches of eight, a more usual training setting: much less leaks.",
        overrides=BATCH_OVERRIDES,
        attacks=(SHORT_SEARCH,),
    ),
    "noisy": DemoFederation(
        shows="Batches of eight with clipped and noised updates: the noise averages out over clients, and the model still "
        "learns.",
        overrides={**BATCH_OVERRIDES, "defense": "clip(0.1) | gaussian(0.02)"},
        attacks=(SHORT_SEARCH,),
    ),
}


def run(folder: Path, *, engine: str = "ray") -> Path:
    """Run the demonstration in `folder` and return the path of its report. Skip finished parts and resume interrupted ones.

    engine: "ray" or "local", which runs the clients.
    """
    for name, federation in DEMO_FEDERATIONS.items():
        err.print(f"[bold]{name}[/]: {federation.shows}")
        experiment = read(EXPERIMENT_FILE, list(federation.overrides.items()))
        federate(experiment, folder / name, engine=engine, client_seed=0, resume=True)
        for summary in attack(folder / name, federation):
            _print_summary(summary)
    return build([folder / name for name in DEMO_FEDERATIONS], folder / "report.html")


def attack(run: Path, federation: DemoFederation) -> list[Summary]:
    """Run the attacks of a federation and their nulls on its recording, and return the summaries.

    There is one summary per attack, or two if the attack runs with and without knowledge of the defense.
    """
    recording, scorer, rows = Recording(run / "recording"), Scorer(run, [run / "truth"]), []
    for name, arguments in federation.attacks:
        for knowledge in federation.knowledge:
            for null in (False, True):
                spec = AttackSpec(name=name, arguments={**arguments, **knowledge}, null=null)
                replay = Replay(recording=recording, spec=spec, out=run / "reconstructions", workers=None)
                replayed = replay_with_progress(replay)
                rows += scorer.score(replayed.folder)
    return summarise(rows)


def _print_summary(summary: Summary) -> None:
    defense = f" under {summary.defense}" if summary.defense else ""
    knows = "" if summary.knows_defense else ", ignoring the defense"
    share = f"{summary.success.value:.0%} of {summary.examples} examples recovered" if summary.success else "nothing finished yet"
    verdict = f"; {summary.verdict.words}" if summary.verdict else ""
    err.print(f"[bold]{summary.attack}[/]{defense}{knows}: {share}{escape(verdict)}")
