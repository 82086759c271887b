"""Tests of the score row: a round trip through JSON, invalid rows, CSV, and pandas."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attacker.scoring import ScoreRow, read_rows, to_pandas, write_csv
from fedsim.recording.files import append_json_lines

ROW = ScoreRow(
    run="digits",
    source="cpl-1",
    attack="cpl",
    spec="cpl()",
    oracles=("labels",),
    case="00001-ada",
    rounds=(1, 3),
    index=7,
    psnr=31.5,
    success=True,
    notes=('says "so", twice', "second"),
    secure_aggregation={"threshold": 2},
    constant={"psnr": 9.0},
    environment={"torch": "2.6"},
)
FAILED = ScoreRow(
    run="digits", source="idlg-1", attack="idlg", case="00001-ada", rounds=(1,), index=3, success=False, failure="gave up"
)


def test_row_is_equal_after_a_round_trip_through_json() -> None:
    written = json.loads(json.dumps(ROW.to_dict(), allow_nan=False))
    assert written["version"] == 1
    assert ScoreRow.from_dict(written) == ROW


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "score row has version 2, and this program reads version 1; score again"),
        ({"version": True}, "score row has version True"),
        ({"psnr": "high"}, "the field psnr of a score row is invalid"),
        ({"index": None}, "the field index of a score row is invalid"),
        ({"oracles": 3}, "the field oracles of a score row is invalid"),
    ],
)
def test_invalid_row_is_refused_with_its_field(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    append_json_lines(tmp_path / "scores.jsonl", {**ROW.to_dict(), **change})
    with pytest.raises(ValueError, match=rf"scores\.jsonl: {words}"):
        read_rows(tmp_path / "scores.jsonl")


def test_csv_has_a_line_per_row_and_a_column_per_field(tmp_path: Path) -> None:
    write_csv([ROW, FAILED], tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["notes"] == 'says "so", twice; second'
    assert (first["psnr"], first["rounds"], first["constant.psnr"], first["environment.torch"]) == ("31.5", "1; 3", "9.0", "2.6")
    assert (second["psnr"], second["constant.psnr"], second["failure"]) == ("", "", "gave up")
    assert set(ROW.to_dict()) - {"constant", "environment"} <= set(first)


def test_pandas_table_has_a_column_per_field_and_numeric_types() -> None:
    table = to_pandas([ROW, FAILED])
    assert len(table) == 2
    assert list(table["rounds"]) == ["1; 3", "1"]
    assert table["psnr"].mean() == 31.5
    assert (str(table["psnr"].dtype), str(table["index"].dtype)) == ("float64", "int64")
    assert table.groupby("attack")["success"].mean().to_dict() == {"cpl": 1.0, "idlg": 0.0}
    assert table["constant.psnr"].isna().tolist() == [False, True]
    assert set(ROW.flatten_values()) <= set(table.columns)


def test_missing_pandas_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        to_pandas([ROW])


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A1", "+1+1", "-1+1", "@SUM(A1)", "\tx"])
def test_text_in_csv_is_never_a_spreadsheet_formula(tmp_path: Path, text: str) -> None:
    """Reasons of failures come from the run, which somebody else may have made."""
    write_csv([replace(FAILED, failure=text)], tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["failure"] == f"'{text}"
