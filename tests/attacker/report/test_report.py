"""Tests of the report: its sentences, its images, and that it loads nothing and runs no script."""

import re
import stat
from pathlib import Path
from typing import Any

import pytest

from attacker.report import build
from attacker.report.hints import make_replay_command
from fedsim.recording import Column
from fedsim.recording.files import append_json_lines, read_json_lines

Row = dict[str, Any]


def test_page_loads_nothing_from_other_files_or_hosts(make_run: Any, report: Any) -> None:
    run, other = make_run(), make_run("second", name="second", defense="clip(1)")
    run.attack()
    other.attack(success=False)
    page = report(run, other)
    assert "://" not in page.html
    assert "@import" not in page.html
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed"}
        assert (attributes.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
        assert (attributes.get("href") or "#").startswith("#")
    assert all(reference.startswith("#") for reference in re.findall(r"url\(([^)]*)\)", page.html))


def test_ids_are_unique_and_links_have_targets(make_run: Any, report: Any) -> None:
    run, other = make_run(), make_run("second", defense="clip(1)")
    run.attack()
    other.attack()
    page = report(run, other)
    assert len(page.ids()) == len(set(page.ids()))
    links = {(attributes.get("href") or "").removeprefix("#") for tag, attributes in page.tags if tag in {"a", "use"}}
    assert links <= set(page.ids())


def test_report_is_readable_by_its_owner_only(make_run: Any, tmp_path: Path) -> None:
    out = build([make_run().path], tmp_path / "new" / "report.html")
    assert stat.S_IMODE(out.stat().st_mode) == 0o600


def test_every_scored_example_is_shown_with_its_null(run: Any, report: Any) -> None:
    run.attack("cpl")
    run.attack("dlg", success=False)
    page = report(run)
    shown = {one for one in page.ids() if one.endswith("-1-0")}
    attacked = [row for row in run.rows if not row["null"]]
    assert shown == {f"run-1-{row['source']}-{row['case']}-1-0" for row in attacked}
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(pictures) == 3 * len(attacked) + 3 * 4
    assert sum(str(picture["alt"]).startswith("The null") for picture in pictures) == len(attacked) + 4
    assert all(picture["alt"] and int(picture["width"]) >= 96 for picture in pictures)


def test_omitted_pairs_are_counted(attacked: Any, report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attacker.report.render.MAX_PAIRS", 3)
    page = report(attacked)
    assert "1 of 4 scored examples are not shown" in page.text


def test_only_oracles_are_marked(attacked: Any, report: Any) -> None:
    page = report(attacked)
    assert page.classed("oracle") == 0
    assert "none beyond the threat model" in page.text
    attacked.attack("dlg", oracles=["labels"])
    page = report(attacked)
    assert page.classed("oracle") > 0
    assert "oracle: labels" in page.text


def test_the_verdict_prefers_attacks_within_the_threat_model(run: Any, report: Any) -> None:
    run.attack("cpl", success=False)
    run.attack("dlg", oracles=["labels"])
    text = report(run).text
    assert "CPL is not distinguishable from the null at this sample: it recovered 0 of 4 private images (95 % CI 0-53 %)" in text
    assert "of 4 labels. 4 examples in 4 independent groups were compared; a mean difference of less than 0.1 dB PSNR may" in text
    assert "DLG, given labels beyond the threat model, recovered 4 of 4." in text


def test_known_labels_do_not_count_as_inferred(run: Any, report: Any) -> None:
    run.attack("dlg", oracles=["labels"])
    assert "labels;" not in report(run).text
    run.attack("cpl")
    assert "CPL recovered 4 of 4 private images (95 % CI 47-100 %) and read 4 of 4 labels" in report(run).text


@pytest.mark.parametrize("left", [4, 3, 1])
def test_headline_counts_the_rows(attacked: Any, report: Any, left: int) -> None:

    def only_some(row: Row) -> Row:
        return {**row, "success": row["success"] and row["index"] < left}

    attacked.rewrite(only_some)
    text = report(attacked).text
    assert f" recovered {left} of 4 private images" in text
    assert ("CPL recovered" in text) == (left > 2), "without `chance`, fewer than half are only a partial leak"


def test_single_recovery_of_four_gives_no_verdict(attacked: Any, report: Any) -> None:
    attacked.rewrite(lambda row: {**row, "label_success": False})
    attacked.rewrite(lambda row: row if row["index"] < 1 else {**row, "success": False, "psnr": 10.0, "mse": 0.1})
    text = report(attacked).text
    assert "CPL recovered 1 of 4 private images (95 % CI 1-76 %)" in text
    assert "no verdict" in text


def test_an_attack_that_failed_in_every_case_is_not_the_strongest(run: Any, report: Any) -> None:
    """Its labels count as not read, but it comes after an attack whose answers are no better than the null's."""
    run.attack("cpl", success=False)
    run.attack("dlg", success=False)

    def fail(row: Row) -> Row:
        failed = {"state": "failed", "failure": "no memory", "psnr": None, "pair": None}
        return row if row["attack"] != "dlg" or row["null"] else {**row, **failed, "label_success": True}

    run.rewrite(fail)
    text = report(run).text
    assert "CPL is not distinguishable from the null at this sample" in text
    assert "1 attack failed in every case." in text
    assert "The other attack is not distinguishable" not in text


def test_effective_defense_is_stated(make_run: Any, report: Any) -> None:
    run = make_run(defense="clip(1) | gaussian(0.1)")
    run.attack("cpl", success=False)
    run.attack("cpl", success=False, knows=False)
    text = report(run).text
    assert "Under clip(1) | gaussian(0.1), CPL is not distinguishable from the null at this sample" in text
    assert "The other attack is not distinguishable from its null either." in text
    assert "0 of 4 private images (95 % CI 0-53 %)" in text
    assert "ignores it" in text
    assert "knows it" in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"gradient": "dp_sgd(noise=2)"}, "dp_sgd(noise=2)"),
        ({"network": "dropout(p=0.3)"}, "dropout(p=0.3)"),
        ({"inputs": "mixup(alpha=2)"}, "mixup(alpha=2)"),
        ({"defense": "clip(1)", "gradient": "dp_sgd(noise=2)"}, "clip(1), dp_sgd(noise=2)"),
        ({"secure_aggregation": {"threshold": 2}}, "secure aggregation"),
    ],
)
def test_every_kind_of_defense_is_stated(make_run: Any, report: Any, keys: dict[str, Any], words: str) -> None:
    plain, run = make_run(), make_run("second", name="second", **keys)
    assert "no defense" in report(plain).text
    run.attack("cpl", success=False, knows=False)
    text = report(run).text
    assert "no defense" not in text
    assert f"Under {words}" in text
    assert ("CPL, ignoring the defense," in text) == ("secure_aggregation" not in keys)
    assert "differ in more than the defense" not in report(plain, run).text


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        (
            {"epsilon": 8.895, "delta": 1e-5, "unit": "example", "prior": 0.01, "bound": 0.0782},
            "epsilon 8.89 at delta 1e-05 for one",
        ),
        (
            {"epsilon": 8.895, "delta": 1e-5, "unit": "client", "prior": 0.01, "bound": 0.0782},
            "right 1 % of the time becomes a reconstruction that is right at most 7.82 %",
        ),
        ({"epsilon": "infinity", "delta": 1e-5, "unit": "client", "why": "no <noise>"}, "none: no <noise>."),
        ({"epsilon": "infinity", "central": {"epsilon": 3.0, "delta": 1e-5, "unit": "client"}}, "model alone, epsilon 3 at"),
        ({}, "after round 3: none."),
    ],
)
def test_privacy_of_the_last_round_is_stated(run: Any, report: Any, privacy: dict[str, Any], words: str) -> None:
    assert "Differential privacy" not in report(run).text
    append_json_lines(run.path / "metrics.jsonl", {"round": 3, "accuracy": 0.5, "privacy": privacy})
    assert words in report(run).text.replace("\N{NO-BREAK SPACE}", " ")


def test_leaked_labels_without_images_are_stated(attacked: Any, report: Any) -> None:
    attacked.rewrite(lambda row: {**row, "success": False, "psnr": 10.0, "mse": 0.1})
    for row in read_json_lines(attacked.path / "scores.jsonl"):
        more = ({**row, "index": 4 * n + row["index"], "case": f"{n}-{row['case']}"} for n in (1, 2, 3))
        append_json_lines(attacked.path / "scores.jsonl", *more)
    text = report(attacked).text
    assert "CPL finds more than its null does: labels 100% against 0%. It recovered 0 of 16 private images" in text
    assert "and read 16 of 16 labels; without the gradient it recovers 0 of 16 and reads 0 of 16 labels." in text


def test_names_are_escaped(attacked: Any, report: Any) -> None:
    attacked.rewrite(lambda row: {**row, "label_true_name": '"><b onclick=x><script>alert(1)</script>'})
    page = report(attacked)
    assert "<script" not in page.html
    assert "<script>alert(1)</script>" in page.text
    assert not any("onclick" in attributes for _, attributes in page.tags)
    assert "went <away>" in page.text


def test_surplus_candidates_are_counted(attacked: Any, report: Any) -> None:
    attacked.rewrite(lambda row: row if row["null"] else {**row, "surplus": 2})
    assert "8 candidates too many, left out" in report(attacked).text.replace("candidatestoo", "candidates too")


def test_scores_include_the_verdict_on_each_attack(run: Any, report: Any) -> None:
    run.attack("cpl")
    run.attack("dlg", success=False)
    text = report(run).text
    assert "CPL cpl(): recovered: 4 of 4 examples; the null recovered 0; PSNR 40.0 dB against 10.0 dB" in text
    assert "DLG dlg(): not distinguishable from the null at this sample: 4 examples" in text


def test_headline_prefers_an_attack_with_a_null(run: Any, report: Any) -> None:
    run.attack("rgap")
    run.attack("hgap")
    run.rewrite(lambda row: None if row["null"] and row["attack"] == "hgap" else row)
    run.rewrite(lambda row: {**row, "psnr": 99.0} if row["attack"] == "hgap" else row)
    text = report(run).text
    assert "R-GAP recovered 4 of 4" in text
    assert "without the gradient it recovers 0 of 4" in text


def test_runs_are_compared_and_other_differences_stated(make_run: Any, report: Any) -> None:
    first, second = make_run(), make_run("second", name="second", defense="clip(1)")
    first.attack()
    assert "Comparison of the runs" not in report(first).text
    page = report(first, second)
    assert "Comparison of the runs" in page.text
    assert "differ in more than the defense" not in page.text
    table = make_run("third", columns=[Column(name="age"), Column(name="pay")])
    assert "These runs differ in more than the defense: data." in report(first, table).text


def test_table_rows_are_shown_in_their_units(make_run: Any, report: Any) -> None:
    run = make_run(columns=[Column(name="age", low=20, high=60), Column(name="pay", high=1000)])
    run.attack()
    text = report(run).text
    assert "4 of 4 private rows" in text
    assert "age4050 ✗50pay250500 ✗500" in text


def test_report_is_deterministic(attacked: Any, report: Any, charts: dict[bytes, str | None]) -> None:
    charts.clear()
    first = report(attacked).html
    charts.clear()  # so that all charts are drawn again
    assert report(attacked).html == first


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match="elsewhere is neither a run nor a recording"):
        build([tmp_path / "elsewhere"], tmp_path / "report.html")
    with pytest.raises(ValueError, match="at least one run"):
        build([], tmp_path / "report.html")


def test_suggested_command_repeats_the_attack() -> None:
    facts = {"attack": "cpl", "spec": "cpl(init='dark', knows_defense=False)", "seed": 3, "oracles": ["labels"]}
    expected = "attacker replay 'my run' --attack cpl --set init=dark --set knows_defense=false --seed 3 --oracle labels"
    assert make_replay_command(Path("my run"), facts) == expected
    several = {**facts, "oracles": ["images of the same class", "labels", "logits"]}  # the first is of the attack itself
    assert make_replay_command(Path("my run"), several) == f"{expected} --oracle logits"
    assert (
        make_replay_command(Path("run"), {**facts, "spec": "no ( python", "seed": 0, "oracles": []})
        == "attacker replay run --attack cpl"
    )
    assert make_replay_command(Path("run"), model="theirs:Net") == "attacker replay run --attack cpl --model theirs:Net"
