"""Tests of scores against the truth of another run, whose clients have the same names."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run_attacker
from federations import federate, make_replay

from attacker.attacks import AttackSpec
from attacker.audit.audit import audit
from attacker.report.gather import gather_run
from attacker.scoring import Scorer, ScoreRow
from attacker.scoring.truth.originals import CaseObservation
from attacker.scoring.truth.recorded_updates import explain_unmatched
from fedsim.recording import Recording

STEP = {"learning_rate": 0.1, "batch_size": 2, "steps": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "one step": {"training": STEP},
    "epochs with momentum": {"training": {"learning_rate": 0.05, "batch_size": 4, "epochs": 2, "momentum": 0.5}, "clients": 100},
    "adam": {"training": {**STEP, "optimiser": "adam", "learning_rate": 0.01}},
    "clipped gradients": {"training": {**STEP, "clip_norm": 0.1}},
    "top-k": {"training": STEP, "defense": "top_k(0.1)"},
    "noise": {"training": STEP, "defense": "clip(1) | gaussian(0.001)"},
}


def explain(run: Path, truth: Path) -> set[str]:
    """Return why the updates of the run's first clients cannot be those of the truth's examples, "" where they can be."""
    scorer = Scorer(run, [truth / "truth"])
    return {
        scorer.check.explain_mismatch([CaseObservation(1, 1, (row.client,))])
        for row in Recording(run / "recording").read_rows()[:3]
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_truth_of_another_run_is_told_from_the_right_one(name: str, tmp_path: Path) -> None:
    settings = {"clients": 2, **SETTINGS[name]}
    one, other = (federate(tmp_path / str(seed), seed=seed, **settings) for seed in (1, 2))
    clients = [{row.client for row in Recording(run / "recording").read_rows()} for run in (one, other)]
    assert clients[0] == clients[1]
    assert explain(one, one) == {""}
    assert all("is not that of its true examples" in words for words in explain(one, other))


def test_strong_noise_and_unknown_defenses_hide_whose_truth_it_is(tmp_path: Path) -> None:
    for defense in ("gaussian(10)", "sign()"):
        one, other = (federate(tmp_path / f"{defense}-{seed}", seed=seed, defense=defense) for seed in (1, 2))
        assert explain(one, other) == {""}


def test_scores_report_and_audit_warn_of_the_truth_of_another_run(tmp_path: Path) -> None:
    one, other = (federate(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    make_replay(one, spec).run()
    wrong = run_attacker("score", one, "--truth", other / "truth", "--json")
    assert "these scores may be worthless" in wrong.stderr
    assert "is not that of its true examples" in json.loads(wrong.stdout)[0]["mismatch"]
    assert any("worthless" in hint.what for hint in gather_run(one).hints)
    found = audit(one, seconds=1, truth=[other / "truth"])
    assert [check.kind for check in found.not_checked if check.rule == "truth"] == ["no guarantee"]
    right = run_attacker("score", one, "--json")
    assert "worthless" not in right.stderr
    assert json.loads(right.stdout)[0]["mismatch"] == ""


def test_certain_answers_that_are_all_wrong_speak_against_the_truth() -> None:
    rows = [ScoreRow(case="c", index=i, confidence=0.99, success=False) for i in range(3)]
    assert "none of the 3 answers" in explain_unmatched(rows)
    assert explain_unmatched(rows[:2]) == ""
    assert explain_unmatched([*rows, ScoreRow(case="c", index=3, confidence=0.99, success=True)]) == ""
    assert explain_unmatched([ScoreRow(case="c", index=i, confidence=0.9, success=False) for i in range(9)]) == ""
