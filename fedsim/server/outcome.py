"""Outcome of a federation, judged from the files that its server wrote. A run in which no client ever answered has failed."""

from collections.abc import Callable
from pathlib import Path

from fedsim.recording.reader import Recording
from fedsim.recording.round_metrics import read_metrics


class EmptyRunError(RuntimeError):
    """Raised if a run reached its last round without recording anything; the message states the reason and what to do."""


def check_end(folder: Path, tell: Callable[[str], None]) -> None:
    """Check the run in `folder` (`metrics.jsonl`, `recording`) after its last round.

    tell: called with one line about missing replies, if there are any.
    Raises EmptyRunError if no client answered in any round, or nothing was recorded.
    """
    rounds = [row for row in read_metrics(folder) if row["round"]]
    answers, missing = (sum(row[key] for row in rounds) for key in ("clients", "missing"))
    recording = Recording(folder / "recording")
    words = f"{missing} of {answers + missing} replies are missing, {_first(recording)}" if missing else ""
    again = f"then {_cleared(folder)}, and run again: there is no round left to go on with"
    if rounds and not answers:
        raise EmptyRunError(f"no client ever answered: {words}; mend that, {again}")
    if words:
        tell(words)
    if rounds and not recording.clients():
        raise EmptyRunError(
            f"nothing was recorded: no client of record.clients, or no round of record.rounds, took part; change these, {again}"
        )


def _cleared(folder: Path) -> str:
    """Return instructions to clear the run. The folders of a deployment are linked and mounted, so they must stay."""
    link = folder / "recording"
    if link.is_symlink():
        return f"delete all in {link.resolve()}, and all in {folder} but the link to it"
    return f"fedsim delete {folder}"


def _first(recording: Recording) -> str:
    """Return the reason of the first missing reply in one line. A client wrote it, so it may contain anything."""
    reason = next((row.reason for row in recording.rows() if row.status in ("failed", "late")), "")
    return f"the first: {' '.join(reason.split())}" if reason.strip() else "why is not recorded: see the clients' logs"
