"""Where truth lies, for the commands that score, and for oracles."""

from pathlib import Path


def truth_of(run: Path, given: list[Path] | None) -> list[Path]:
    """Folders of truth. Raises ValueError where none is given and the run has none of its own."""
    if not given and not (run / "truth").exists():
        raise ValueError(
            f"{run} has no truth of its own: name that of the clients with --truth FOLDER; "
            f"what was reconstructed is shown without it by: attacker report {run}"
        )
    return given or [run / "truth"]
