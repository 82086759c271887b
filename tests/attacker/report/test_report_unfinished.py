"""Tests of the report of failed, interrupted and waiting cases, and of missing or damaged files."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attacker.reconstruction import Reconstruction

Row = dict[str, Any]


def test_failed_case_is_shown_as_a_failure(attacked: Any, report: Any) -> None:
    def failed(row: Row) -> Row:
        if row["null"] or row["index"] != 2:
            return row
        lost = dict.fromkeys(("mse", "psnr", "ssim", "lpips", "label_recovered", "label_recovered_name", "pair"))
        kept = {key: value for key, value in row.items() if key not in ("iterations", "seconds", "interrupted")}
        return {**kept, **lost, "success": False, "label_success": False, "failure": "out of <memory>"}

    attacked.rewrite(failed)
    page = report(attacked)
    assert page.classed("failure") == 1
    assert "1 example of cpl() without a reconstruction: out of <memory>" in page.text
    assert "- no reconstruction" in page.text
    assert "CPL recovered 3 of 4" in page.text


@pytest.mark.parametrize("scored", [True, False])
def test_failure_of_all_attacks_is_stated_first(run: Any, report: Any, scored: bool) -> None:
    for name in ("cpl", "dlg"):
        run.attack(name)
    for path in run.path.glob("reconstructions/*/*.safetensors"):
        path.unlink()
        path.with_suffix(".failed.json").write_text('{"reason": "RuntimeError: view size"}')

    def failed(row: Row) -> Row:
        lost = dict.fromkeys(("mse", "psnr", "ssim", "lpips", "label_recovered", "label_recovered_name", "pair"))
        return {**row, **lost, "state": "failed", "success": False, "label_success": False, "failure": "RuntimeError: view size"}

    if scored:
        run.rewrite(failed)
    else:
        run.forget_truth()
    first = report(run).text.partition("The federation")[0]
    assert "Each of the 2 attacks failed: 8 cases attacked, and none has a reconstruction" in first
    assert "Most often because: RuntimeError: view size." in first
    assert "recovered" not in first.partition("What leaked")[2].partition("What is missing")[0].lower()


def test_one_failed_attack_does_not_hide_the_others(run: Any, report: Any) -> None:
    run.attack("cpl")
    run.attack("dlg")
    for path in run.path.glob("reconstructions/dlg-0*/*.safetensors"):
        path.unlink()
        path.with_suffix(".failed.json").write_text('{"reason": "out of memory"}')
    run.rewrite(lambda row: row if row["attack"] == "cpl" else None)
    assert "CPL recovered 4 of 4" in report(run).text


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        (("scores.jsonl", "pairs"), "4 of 4 cases are not scored yet. attacker score {run}"),
        (("scores.jsonl", "pairs", "reconstructions"), "No attack was replayed on this recording yet. attacker replay {run}"),
        (("metrics.jsonl",), "metrics.jsonl holds no rounds"),
        (("recording/index.sqlite",), "index of the recording cannot be read"),
        (("pairs",), "is missing"),
        (("reconstructions",), "CPL recovered 4 of 4 private images"),
    ],
)
def test_missing_files_are_named_with_advice(attacked: Any, report: Any, removed: tuple[str, ...], words: str) -> None:
    for name in removed:
        path = attacked.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert words.format(run=attacked.path) in report(attacked).text


def mark_interrupted(run: Any, number: int) -> None:
    """Mark a case as interrupted, in its reconstruction and in its score."""
    path = sorted(run.path.glob("reconstructions/cpl-0*/*.safetensors"))[number]
    replace(Reconstruction.read(path), interrupted=True).write(path)
    run.rewrite(lambda row: row if row["null"] or row["index"] != number else {**row, "state": "interrupted"})


def mark_waiting(run: Any, number: int) -> None:
    """Remove the reconstruction of a case, and mark its score as waiting."""
    sorted(run.path.glob("reconstructions/cpl-0*/*.safetensors"))[number].unlink()
    unknown = dict.fromkeys(("mse", "psnr", "label_recovered_name", "pair", "success", "label_success", "failure"))
    state = {"state": "waiting", **unknown}
    run.rewrite(lambda row: row if row["null"] or row["index"] != number else {**row, **state})


def test_shares_are_of_finished_cases_and_others_are_counted(attacked: Any, report: Any) -> None:
    mark_waiting(attacked, 3)
    mark_interrupted(attacked, 2)
    page = report(attacked)
    assert "CPL recovered 2 of 2 private images" in page.text
    assert "Not finished: 2 of 4 cases of the attack (1 waiting, 1 interrupted)." in page.text
    assert "2 of 4 cases finished; 1 waiting, 1 interrupted" in page.text
    assert "1 of 4 cases are not attacked yet." in page.text
    assert "interrupted: the best so far, not counted" in page.text
    assert "not scored yet" not in page.text
    assert page.classed("failure") == 0


def test_no_share_is_stated_without_finished_cases(attacked: Any, report: Any) -> None:
    for number in (3, 2, 1, 0):
        mark_waiting(attacked, number)
    page = report(attacked)
    text = page.text
    assert "Attacks were replayed, and nothing is finished yet: what leaks is not known." in text
    assert "CPL cpl(): nothing finished yet." in text
    assert "of 4 private images" not in text
    scores = text.replace("\N{NO-BREAK SPACE}", " ").split("How to read this")[0].split("Scores")[1]
    assert "0 %" not in scores.split("Recovered by the null")[0]


def test_case_finished_after_scoring_is_to_be_scored_again(attacked: Any, report: Any) -> None:
    attacked.rewrite(lambda row: row if row["null"] or row["index"] else {**row, "state": "interrupted"})
    assert f"1 of 4 cases are not scored yet. attacker score {attacked.path}" in report(attacked).text


def test_interrupted_case_and_missing_null_are_reported(attacked: Any, report: Any) -> None:
    mark_interrupted(attacked, 0)
    command = f"attacker replay {attacked.path} --attack cpl"
    assert f"1 of 4 cases are interrupted: the best so far is shown. {command}" in report(attacked).text
    shutil.rmtree(next(attacked.path.glob("reconstructions/cpl-null-*")))
    attacked.rewrite(lambda row: None if row["null"] else row)
    assert "with no null to compare it with" in report(attacked).text
    assert "cpl() has no scored null." in report(attacked).text


def test_files_outside_the_run_and_damaged_ones_are_not_shown(attacked: Any, report: Any, tmp_path: Path) -> None:
    shutil.copy(next(attacked.path.glob("pairs/*/*.png")), tmp_path / "secret.png")
    next(attacked.path.glob("reconstructions/cpl-0*/*.safetensors")).write_bytes(b"no tensors")
    attacked.rewrite(lambda row: {**row, "pair": "../secret.png"})
    page = report(attacked)
    assert "lies outside the run" in page.text
    assert "is not a reconstruction" in page.text
    assert not [tag for tag, _ in page.tags if tag == "img"]
