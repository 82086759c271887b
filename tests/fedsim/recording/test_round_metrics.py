"""Tests of reading `metrics.jsonl`, which anybody may have changed: invalid values are reported with row and key."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsim.recording import DamagedFile
from fedsim.recording.round_metrics import read_metrics
from fedsim.recording.safe_files import UNPRINTABLE_PATTERN

ROW: dict[str, Any] = {"round": 1, "loss": 0.5, "accuracy": None, "clients": 2, "missing": 0, "seconds": 1.0}


def write(run: Path, *rows: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_are_read_as_the_server_wrote_them(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    without = {key: value for key, value in ROW.items() if key not in ("loss", "accuracy")}
    first = {"round": 0, "loss": 2.5, "accuracy": 0.1, "seconds": 0.1}
    write(tmp_path, first, ROW, without)
    assert read_metrics(tmp_path) == [first, ROW, without]


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in ("round", "clients", "missing") for value in (None, True, -1, 0.5, "1", [], 2**70)]
    + [(key, value) for key in ("loss", "accuracy") for value in (True, "0", [], {})],
)
def test_a_value_that_no_server_writes_is_named(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, ROW, {**ROW, key: value})
    with pytest.raises(DamagedFile, match=rf"metrics\.jsonl: row 2: .* is not a valid value of {key}; remove the row"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("text", ["a\x1b[2J", "a\nb", "\x9b1m", "\u2028", "x" * 10_001])
@pytest.mark.parametrize("place", [("privacy", "why"), ("privacy", "central", "why"), ("note",), ("notes", 1), ("text",)])
def test_no_text_may_steer_a_terminal_or_forge_a_line(tmp_path: Path, place: tuple[Any, ...], text: str) -> None:
    row = {
        **ROW,
        "privacy": {"epsilon": None, "why": "", "central": {"why": ""}},
        "note": "",
        "notes": ["", ""],
        "text": {text: 1},
    }
    write(tmp_path, ROW, {**row, "text": {}})
    assert len(read_metrics(tmp_path)) == 2
    if place != ("text",):
        row["text"], inner = {}, row
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = text
    write(tmp_path, ROW, row)
    with pytest.raises(
        DamagedFile, match=rf"metrics\.jsonl: row 2: {place[0]} has a text with over .*; remove the row"
    ) as damaged:
        read_metrics(tmp_path)
    assert UNPRINTABLE_PATTERN.search(str(damaged.value)) is None


def test_a_missing_count_is_named(tmp_path: Path) -> None:
    write(tmp_path, {key: value for key, value in ROW.items() if key != "clients"})
    with pytest.raises(DamagedFile, match="row 1: clients is missing"):
        read_metrics(tmp_path)
