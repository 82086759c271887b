"""Check of a finished run from the files that its server wrote."""

from collections.abc import Callable
from pathlib import Path

from fedsim.recording.reader import Recording
from fedsim.recording.round_metrics import read_metrics

FAILURE_PREFIX = "not everything succeeded: "
"""Beginning of the line in which a server reports `find_failures`. Programs on other machines search for it."""


class EmptyRunError(RuntimeError):
    """Error for a run in which no client ever answered or nothing was recorded; the message states why and what to do."""


def check_end(folder: Path, tell: Callable[[str], None]) -> None:
    """Check the run in `folder` after its last round, by its `metrics.jsonl` and its `recording`.

    tell: called with one line if some replies, but not all, are missing: their number, and the first one's client, round and
    reason.
    Raises EmptyRunError if no client answered in any round, or nothing was recorded.
    """
    rounds = [row for row in read_metrics(folder) if row["round"]]
    answers, missing = (sum(row[key] for row in rounds) for key in ("clients", "missing"))
    recording = Recording(folder / "recording")
    missing_replies = f"{missing} of {answers + missing} replies are missing, {_read_first_reason(recording)}" if missing else ""
    if rounds and not answers:
        raise EmptyRunError(
            f"no client ever answered: {missing_replies}; correct the cause, then {explain_clearing(folder)}, and run again; "
            "it cannot be resumed, since all rounds are done"
        )
    if missing_replies:
        tell(missing_replies)
    if rounds and not recording.list_clients():
        raise EmptyRunError(
            "nothing was recorded: no client of record.clients, or no round of record.rounds, took part; change these "
            f"settings, then {explain_clearing(folder)}, and run again; it cannot be resumed, since all rounds are done"
        )


def find_failures(folder: Path) -> str:
    """Return a text on the first of these failures that the finished run in `folder` has, in this order, or "" if it has none.

    1. Replies failed or did not come in time.
    2. The loss on held-out data, finite at the beginning, is NaN or infinite after the last round.
    3. Clients sent updates, and each recorded update that can be read contains at least one NaN or infinite value.
    """
    rounds = read_metrics(folder)
    if missing := sum(row["missing"] for row in rounds if row["round"]):
        return f"{missing} {'reply is' if missing == 1 else 'replies are'} missing; fedsim show {folder} lists the rounds"
    losses = [row["loss"] for row in rounds if "loss" in row]
    if losses and losses[0] is not None and losses[-1] is None:
        return "the model diverged: its loss is NaN after the last round; lower training.learning_rate"
    recording = Recording(folder / "recording")
    observations = recording.read_observations(on_damage=lambda error: None)
    finite = (all(bool(t.isfinite().all()) for t in observation.update.values()) for observation in observations)
    if any(count.complete for count in recording.count_replies()) and not any(finite):  # stops at the first finite update
        return "every update holds NaN or infinite values; lower training.learning_rate"
    return ""


def explain_clearing(folder: Path) -> str:
    """Return words that tell the user how to delete the files of the run in `folder`, to start it again.

    In a deployment, `recording` in the run's folder is a symbolic link. In containers, the folder and the link's target are mount
    points, so that only their contents can be deleted.
    """
    link = folder / "recording"
    if link.is_symlink():
        return f"delete all in {link.resolve()}, and all in {folder} but the link to it"
    return f"fedsim delete {folder}"


def _read_first_reason(recording: Recording) -> str:
    """Return, as one line that continues a sentence, why the first missing reply failed, or that this is not recorded.

    The reason may be a client's own words, so it is not to be trusted.
    """
    row = next((row for row in recording.read_rows() if row.status in ("failed", "late")), None)
    if row is None or not row.reason.strip():
        return "why is not recorded: see the clients' logs"
    return f"the first, of client {row.client} in round {row.round}: {' '.join(row.reason.split())}"
