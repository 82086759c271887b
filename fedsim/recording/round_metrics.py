"""Reader of a run's `metrics.jsonl`, in which the server writes one row per round, with checks of its values."""

from pathlib import Path
from typing import Any

from fedsim.recording.files import read_json_lines
from fedsim.recording.manifest import check_plain
from fedsim.recording.safe_files import DamagedFile, is_count, shorten, to_printable

METRICS_FILE = "metrics.jsonl"
COUNT_KEYS = ("round", "clients", "missing")
"""Keys of a row that hold whole numbers: the round, replies that came, and missing replies. Round 0 has no replies."""
MEASURE_KEYS = ("loss", "accuracy")
"""Keys of a row that hold numbers, or null for NaN and infinity."""
ROW_ADVICE = "remove the row, or the file"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl` in order, as dicts; an empty list if the run has no such file.

    Raises DamagedFile, naming the row, if it is no JSON object, one of `COUNT_KEYS` is not a whole number of at least 0 (round 0
    needs none but `round`), a loss or accuracy is neither a number nor null, or `check_plain` refuses a text or integer in it.
    """
    path = run / METRICS_FILE
    rows = read_json_lines(path, ROW_ADVICE)
    for number, row in enumerate(rows, start=1):
        for key in (*COUNT_KEYS, *MEASURE_KEYS):
            value = row.get(key)
            if key not in row and (key in MEASURE_KEYS or row.get("round") == 0):
                continue
            if not (is_count(value) if key in COUNT_KEYS else value is None or type(value) in (int, float)):
                reason = f"{shorten(value)} is not a valid value of {key}" if key in row else f"{key} is missing"
                raise DamagedFile(path, f"row {number}: {reason}; {ROW_ADVICE}")
        for key, value in row.items():
            try:
                check_plain(to_printable(key)[:80], {key: value})
            except ValueError as error:
                raise DamagedFile(path, f"row {number}: {error}; {ROW_ADVICE}") from None
    return rows
