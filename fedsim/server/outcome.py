"""How a federation ended, by what its server wrote down: one in which nobody ever answered has failed, whoever ran it."""

from collections.abc import Callable
from pathlib import Path

from fedsim.recording.files import read_json_lines
from fedsim.recording.reader import Recording


class EmptyRunError(RuntimeError):
    """A run came to its last round and has nothing to show for it; the message says why, and the mend."""


def check_end(folder: Path, tell: Callable[[str], None]) -> None:
    """Look back at the run in `folder`, with `metrics.jsonl` and `recording`, after its last round.

    tell: is told of missing replies, in one line, where there are any. Raises EmptyRunError where no client answered in any
    round, or nothing was recorded.
    """
    rounds = [row for row in read_json_lines(folder / "metrics.jsonl") if row["round"]]
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
    """What makes room for another run. The folders of a deployment are linked and mounted, so they must stay."""
    link = folder / "recording"
    if link.is_symlink():
        return f"delete all in {link.resolve()}, and all in {folder} but the link to it"
    return f"fedsim delete {folder}"


def _first(recording: Recording) -> str:
    """Why the first of the missing replies is, in one line. A client wrote the reason, so it may be anything."""
    reason = next((row.reason for row in recording.rows() if row.status in ("failed", "late")), "")
    return f"the first: {' '.join(reason.split())}" if reason.strip() else "why is not recorded: see the clients' logs"
