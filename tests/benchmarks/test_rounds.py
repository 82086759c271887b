"""Tests of the benchmark of attacks over many rounds, on one small client."""

import pytest
import rounds
from support.contract import Options
from support.rounds import spans


def test_table_of_spans_counts_exact_images_of_attack_and_null(monkeypatch: pytest.MonkeyPatch) -> None:
    small = spans.SpanSetting(batch=4, examples=16, clients=1, epochs=3)
    monkeypatch.setattr(spans, "list_settings", lambda quick: [small])
    rows, summary = rounds.run_spans_table(Options(quick=True, json=False, data=None, device="cpu", seed=0, table=None))
    (row,) = rows
    assert row["with_relu"] > row["null"] == 0
    assert row["certain_and_wrong"] == row["below_60_db"] == 0
    assert row["answers"] == 16 * row["with_relu"]
    assert summary["span_recovered_3_epochs"] == row["with_relu"]
