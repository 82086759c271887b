"""The command of a deployment's scorer."""

from pathlib import Path

from fedsim.deployment.folders import Layout


def make_scorer_command(layout: Layout, run: Path, count: int) -> list[str]:
    """Return the command that compares the reconstructions in `run` with the examples that `count` clients used."""
    truths = (str(layout.make_client_path(number) / "truth") for number in range(count))
    return ["attacker", "score", str(run), *(word for truth in truths for word in ("--truth", truth))]
