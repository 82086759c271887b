"""Tests of the measures in the report: LPIPS and both SSIMs of images, columns and categories of tables."""

import json
from typing import Any

from fedsim.recording import Column

Row = dict[str, Any]


def test_scores_include_lpips_and_both_ssims_or_the_reason(attacked: Any, report: Any) -> None:
    text = report(attacked).text
    assert "No LPIPS (no weights)." in text
    assert "global 0.500" in text
    attacked.rewrite(
        lambda row: {**row, "ssim": 0.25, "ssim_global": 0.75, "lpips": 0.125, "lpips_net": "vgg", "lpips_reason": None}
    )
    text = report(attacked).text.replace("\N{NO-BREAK SPACE}", " ")
    none = "no interval of 4 groups"
    ssim = f"0.250values 0.250 to 0.250; {none} median 0.25010-90 %: 0.250 to 0.250its null 0.250"
    assert f"{ssim}global 0.750values 0.750 to 0.750; {none}" in text
    assert f"0.125values 0.125 to 0.125; {none} median 0.12510-90 %: 0.125 to 0.125its null 0.125net vgg" in text
    assert "No LPIPS" not in text


def test_categories_are_shown_as_one_variable_with_an_explanation(make_run: Any, report: Any) -> None:
    colour = [Column(name="colour", kind="categorical", category=category) for category in ("red", "blue", "green")]
    run = make_run(columns=[Column(name="age", low=20, high=60), *colour])
    run.attack()

    def scored(row: Row) -> Row:
        found = {0: [0.52, 0.2, 3.0, 0.1], 1: [0.6, 0.2, 0.1, 0.3], 2: [0.5, 0.0, 0.0, 0.0], 3: [0.5, 0.9, 0, 0]}[row["index"]]
        original = [0.5, 0, 0, 0] if row["index"] == 3 else [0.5, 0, 1, 0]
        pair = {"columns": ["age", *["colour"] * 3], "original": original, "reconstruction": found}
        (run.path / row["pair"]).write_text(json.dumps(pair))
        return {**row, "continuous_error": 0.1, "categorical_right": 0.5}

    run.rewrite(scored)
    text = report(run).text
    assert "age4040.8 ✓40.8colourblueblue ✓blue" in text
    assert "age4044 ✗44colourbluegreen ✗green" in text
    assert "age4040 ✓40colourbluered or blue or green ✗red or blue or green" in text
    assert "age4040 ✓40colourone that training never sawred" in text
    assert "0.100values 0.100 to 0.100; no interval of 4 groups" in text
    assert "0.500values 0.500 to 0.500; no interval of 4 groups" in text
    assert "the share of categorical columns that are right" in text
    assert "every continuous value differs from the original by at most 5 % of the column" in text.replace("\xa0", " ")
    assert "No LPIPS" not in text
