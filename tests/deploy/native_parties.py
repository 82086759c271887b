"""The clients of a prepared deployment in which all folders are on one machine, and the command of its scorer."""

from pathlib import Path

from fedsim.deployment.folders import Layout
from fedsim.deployment.native import Party


def list_parties(layout: Layout, count: int, *, seed: int | None = None) -> list[Party]:
    """Return the first `count` clients of a prepared deployment, each with its own folder.

    seed: number from which each client derives its secrets, for reproducible runs; None for random secrets.
    """
    return [
        Party(
            number=number,
            key=layout.make_key_path(number),
            config=layout.make_client_config(number, count, seed=seed),
            home=layout.make_client_path(number),
        )
        for number in range(count)
    ]


def make_scorer_command(layout: Layout, run: Path, count: int) -> list[str]:
    """Return the command that compares the reconstructions in `run` with the examples that `count` clients used."""
    truths = (str(layout.make_client_path(number) / "truth") for number in range(count))
    return ["attacker", "score", str(run), *(word for truth in truths for word in ("--truth", truth))]
