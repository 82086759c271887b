"""Table and picture of secure sums: in which rounds each client takes part, and after which its examples' span is isolated."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from support.contract import Options, ResultRow
from support.rounds.cohorts import CohortSetting, measure_isolation, record
from support.splits import load_images
from torch import Generator


def make_isolation_rows(options: Options) -> list[ResultRow]:
    """Return a row for each client of random cohorts: the rounds it takes part in, and the first after which it is isolated.

    isolated_after: the smallest number of recorded rounds with which the attack `cohort_spans` separates the linear span of the
    client's examples from the spans of all other clients; None if the attack never does.
    """
    setting = CohortSetting(clients=8, cohort=2, rounds=8) if options.quick else CohortSetting(steps=4, batch=2)
    images = load_images(options, "cifar10", setting.clients * setting.examples)
    names = [f"c{number:02d}" for number in range(setting.clients)]
    holdings = {name: images.of(range(i * setting.examples, (i + 1) * setting.examples)) for i, name in enumerate(names)}
    case = record(options, setting, images, holdings)
    after: dict[str, int] = {}
    for count in range(1, setting.rounds + 1):
        first = replace(case, observations=case.observations[:count])
        for name in measure_isolation(first, Generator().manual_seed(options.seed)):
            after.setdefault(name, count)
        if len(after) == setting.clients:
            break
    return [
        {
            "client": name,
            "rounds": " ".join(str(observation.round) for observation in case.observations if name in observation.cohort),
            "isolated_after": after.get(name),
            "part": images.part,
        }
        for name in names
    ]


def draw_isolation(rows: Sequence[ResultRow], path: Path) -> None:
    """Draw clients against rounds, and write the picture to `path`: a circle for each round in which a client takes part.

    Circles are filled from the round on with which the client is isolated, see `make_isolation_rows`, which returns `rows`.
    """
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "fedleak isolation"}):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        last = max(int(round) for row in rows for round in row["rounds"].split())
        for place, row in enumerate(rows):
            rounds, after = [int(round) for round in row["rounds"].split()], row["isolated_after"]
            axes.scatter(rounds, [place] * len(rounds), s=22, facecolors="white", edgecolors="#8a8f98", zorder=3)
            if after is not None:
                axes.plot([after, last], [place, place], color="#c0392b", linewidth=3, alpha=0.35, solid_capstyle="butt")
                seen = [round for round in rounds if round >= after]
                axes.scatter(seen, [place] * len(seen), s=22, color="#c0392b", zorder=4)
        axes.set_yticks(range(len(rows)), [row["client"] for row in rows], fontsize=7)
        axes.set_xlabel("recorded rounds")
        axes.set_title("takes part (circle); span isolated from the other clients' (red)", fontsize=9)
        axes.set_xlim(0.5, last + 0.5)
        figure.savefig(path, dpi=160, facecolor="white")
