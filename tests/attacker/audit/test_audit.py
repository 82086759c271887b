"""Tests of audits by the command line: verdict, formats, exit status, budget, resumption, and runs without true examples."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from federations import federate
from typer.testing import CliRunner, Result

from attacker.audit.findings import NotChecked
from attacker.audit.plan import plan_attacks
from attacker.cli import app
from attacker.commands.audit import EXIT_ABOVE_GRADE
from attacker.commands.options import parse_duration
from fedsim.recording import Recording

FOUR = {"model": {"name": "mlp", "hidden": [32]}, "clients": 4}


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, words)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "open", **FOUR)


def test_undefended_federation_is_graded_severe_in_every_format(run: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("audit.sarif", "audit.xml", "audit.html")]
    result = call(
        run, "--budget", "90s", "--fail-above", "moderate", *(word for file in files for word in ("--out", file)), "--json"
    )
    assert result.exit_code == EXIT_ABOVE_GRADE, result.output
    found = json.loads(result.stdout)
    assert found["grade"] == "severe"
    (leak, *_) = found["findings"]
    assert (leak["rule"], leak["grade"]) == ("examples-recovered", "severe")
    assert "recovered: 4 of 4 examples" in leak["evidence"]
    sarif = json.loads(files[0].read_text())
    assert {one["ruleId"] for one in sarif["runs"][0]["results"]} == {one["rule"] for one in found["findings"]}
    suite = ElementTree.fromstring(files[1].read_text())
    assert int(suite.get("failures", "")) == len(found["findings"]) == len(suite.findall("testcase/failure"))
    assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
    page = (run / "audit.html").read_text()
    assert page == files[2].read_text()
    assert "Verdict: severe" in page
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<code>attacker audit --what-if</code>" in page
    assert "`" not in page


def test_a_recovered_table_row_is_shown_with_its_columns(tmp_path: Path) -> None:
    run = federate(tmp_path / "table", model={"name": "mlp", "hidden": [32]}, data="breast_cancer")
    assert json.loads(call(run, "--budget", "60s", "--json").stdout)["grade"] == "severe"
    page = (run / "audit.html").read_text()
    assert "data:image" not in page
    assert '<th scope="row">mean radius</th>' in page
    assert page.count('<th scope="row">') == 30  # the columns of the table
    assert "class=wrong" not in page


def test_a_second_audit_attacks_nothing_again(run: Path) -> None:
    assert call(run, "--budget", "90s").exit_code == 0
    folder = next((run / "reconstructions").glob("exact-[!n]*"))
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert call(run, "--budget", "90s").exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")} == before


def test_without_truth_the_confidence_of_closed_forms_decides(run: Path, tmp_path: Path) -> None:
    without_truth = tmp_path / "without_truth"
    shutil.copytree(run / "recording", without_truth / "recording")
    found = json.loads(call(without_truth, "--budget", "3s", "--json").stdout)
    assert (found["scored"], found["grade"]) == (False, "severe")
    assert "The true examples to compare them with were not given" in found["findings"][0]["evidence"]


def test_small_budget_leaves_out_attacks_with_a_reason(run: Path) -> None:
    result = call(run, "--budget", "0.001s", "--plan")
    assert result.exit_code == 0
    assert "more than its share" in result.stderr


def test_a_budget_is_seconds_minutes_or_hours() -> None:
    assert [parse_duration("--budget", text) for text in ("90s", "1.5m", "2h")] == [90, 90, 7200]


def test_rounds_that_share_examples_are_attacked_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other attacks are left out, since they would take the time that a loaded machine needs for this one."""
    monkeypatch.setattr("attacker.audit.plan.CANDIDATE_ATTACKS", (("spans", {}), ("cohort_spans", {})))
    out = federate(
        tmp_path / "rounds",
        rounds=8,
        model={"name": "mlp", "hidden": [64]},
        clients=40,
        training={"learning_rate": 0.1, "batch_size": 4, "steps": 3},
        record={"clients": "2"},
    )
    found = json.loads(call(out, "--budget", "10m", "--json").stdout)
    (spans,) = [one for one in found["attacks"] if one["spec"].startswith("spans")]
    assert spans["recovered"] >= 8 > spans["null_recovered"] == 0
    assert spans["updates"] == 16
    reasons = [one["reason"] for one in found["not_checked"]]
    assert any("it splits secure sums" in reason for reason in reasons)


def test_attacks_on_several_rounds_are_not_planned_for_one(run: Path) -> None:
    plan = plan_attacks(Recording(run / "recording"), run / "reconstructions", seconds=90)
    (reason,) = [one.reason for one in plan if isinstance(one, NotChecked) and one.reason.startswith("spans")]
    assert reason == "spans: it needs several rounds, and only one is recorded"


def test_attacks_that_fit_the_recording_are_planned_with_their_time(run: Path, tmp_path: Path) -> None:
    """`rog` is planned for compressed updates, `accumulate` for several rounds, and `agic` for local epochs."""
    training = {"learning_rate": 0.1, "batch_size": 200, "epochs": 2}
    out = federate(tmp_path / "epochs", rounds=2, model=FOUR["model"], training=training, defense="top_k(0.5)")
    planned = {
        folder: {
            one.spec.name: one
            for one in plan_attacks(Recording(folder / "recording"), tmp_path / "none", seconds=1e9)
            if not isinstance(one, NotChecked)
        }
        for folder in (run, out)
    }
    assert set(planned[run]) == {"exact", "inverting_gradients", "cpl"}
    assert {"rog", "accumulate", "agic"} <= set(planned[out])
    assert "robbing_the_fed" not in planned[out]
    assert planned[out]["agic"].spec.arguments["local_steps"] == "simulated"
    assert all(planned[out][name].core_seconds > 0 for name in ("rog", "accumulate", "agic"))
