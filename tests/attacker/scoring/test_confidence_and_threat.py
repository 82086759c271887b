"""Tests of score rows: AUROC and calibration of confidence, identification, exact matches, threat classes, and bounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from changed_recordings import change_index
from federations import federate, make_replay

from attacker.attacks import AttackSpec, feature_reconstruction, robbing_the_fed
from attacker.attacks.needs import list_oracles
from attacker.scoring import Scorer, ScoreRow, summarise
from attacker.scoring.measures import EXACT_TOLERANCE, measure
from attacker.scoring.rows import MAX_CHANCE
from attacker.scoring.statistics import judge_confidence
from attacker.scoring.threat import classify_threat, list_concessions
from fedsim.recording import Column, DataSpec, ModelSpec


@pytest.mark.parametrize(
    ("pairs", "auroc", "error"),
    [
        ([(0.9, True), (0.1, False)], 1.0, 0.1),
        ([(0.9, False), (0.1, True)], 0.0, 0.9),
        ([(0.5, True), (0.5, False)], 0.5, 0.0),
        ([(0.2, False), (0.4, True), (0.4, False), (0.8, True)], 0.875, (0.2 + 0.2 + 0.2) / 4),
        ([(1.0, True)], None, 0.0),
    ],
)
def test_auroc_and_calibration_error_of_confidence(pairs: list[tuple[float, bool]], auroc: float | None, error: float) -> None:
    found = judge_confidence(pairs)
    assert (found.decided, found.auroc) == (len(pairs), auroc)
    assert found.error == pytest.approx(error)


def test_no_confidences_give_no_judgement() -> None:
    assert judge_confidence([]) is None


def test_a_row_is_matched_exactly_if_all_categories_and_numbers_are() -> None:
    columns = (Column(name="age"), *(Column(name="sex", kind="categorical", category=one) for one in "fm"))
    truth = torch.tensor([[0.5, 1.0, 0.0]]).repeat(4, 1)
    x = truth.clone()
    x[1, 0] += 0.9 * EXACT_TOLERANCE
    x[2, 0] += 1.1 * EXACT_TOLERANCE
    x[3, 1:] = torch.tensor([0.0, 1.0])
    rows = measure(x, truth, DataSpec(shape=(3,), num_classes=2, columns=columns), "none")
    assert [row["exact_match"] for row in rows] == [True, True, False, False]


@pytest.mark.parametrize(
    ("training", "spec", "oracles", "threat"),
    [
        ({"mode": "eval", "buffers": "local"}, "cpl()", (), "C"),
        ({}, "cpl(decoder='smooth')", (), "C"),
        ({}, "cpl(decoder='generator:build') without gradient", (), "D"),
        ({}, "rog(enhancer='small', denoiser='none')", (), "C"),
        ({}, "rog(enhancer='own.safetensors')", (), "D"),
        ({}, "inverting_gradients(denoiser='own.safetensors')", (), "D"),
        ({}, "cpl(init='insider')", ("images of the same class",), "D"),
        ({"buffers": "shared"}, "agic(bn=1.0)", (), "E"),
        ({}, "not a call (", (), "C"),
        ({"buffers": "shared"}, "robbing_the_fed()", list_oracles(robbing_the_fed().needs), "F"),
        ({}, "feature_reconstruction()", list_oracles(feature_reconstruction().needs), "F"),
        ({}, "feature_reconstruction(matched='head')", list_oracles(feature_reconstruction(matched="head").needs), "C"),
    ],
)
def test_threat_class_follows_from_what_an_attack_knows(
    training: dict[str, Any], spec: str, oracles: tuple[str, ...], threat: str
) -> None:
    assert classify_threat({"training": training}, spec, oracles) == threat


def test_added_layer_implies_a_malicious_server() -> None:
    for model in (ModelSpec(name="imprint", arguments={"bins": 64}), ModelSpec(name="wide_head")):
        assert classify_threat({"model": str(model)}, "exact()", ()) == "F"
    assert classify_threat({"model": str(ModelSpec(name="mlp"))}, "exact()", ()) == "C"


def test_modes_and_buffers_are_concessions() -> None:
    assert list_concessions({"training": {"mode": "train", "buffers": "local"}}) == ()
    both = list_concessions({"training": {"mode": "eval", "buffers": "shared"}})
    assert [one.split(":")[0] for one in both] == ["mode eval", "buffers shared"]


MODEL = {"name": "mlp", "hidden": [32]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "noisy", model=MODEL, clients=8, defense="gaussian(0.003)")


def score(run: Path, *, bound_seconds: float) -> list[ScoreRow]:
    scorer = Scorer(run, [run / "truth"], bound_seconds=bound_seconds)
    rows: list[ScoreRow] = []
    for null in (False, True):
        spec = AttackSpec(name="exact", arguments={"fallback": "none"}, null=null)
        rows += scorer.score(make_replay(run, spec).run().folder)
    return rows


def test_rows_hold_bounds_threat_and_calibrated_success(run: Path) -> None:
    rows = score(run, bound_seconds=60)
    mine = [row for row in rows if not row.null]
    assert {row.threat for row in rows} == {"C"}
    assert all(row.bound_mse is not None and 0 < row.bound_mse < 0.1 for row in mine)
    assert all(row.bound_mse is None for row in rows if row.null)
    assert all(row.identified == (row.chance is not None and row.chance <= MAX_CHANCE) for row in rows if row.failure is None)
    (summary,) = summarise(rows)
    assert summary.bound is not None
    assert 0 < summary.efficiency < 1.2
    assert summary.identified.value > summary.null.identified.value


def test_without_time_there_are_no_bounds_and_a_reason(run: Path) -> None:
    assert all(row.bound_mse is None for row in score(run, bound_seconds=0))
    scorer = Scorer(run, [run / "truth"], bound_seconds=1e-9)
    folder = next(path for path in (run / "reconstructions").iterdir() if "null" not in path.name and path.is_dir())
    assert all(row.bound_mse is None for row in scorer.score(folder))
    assert len(scorer.bounds.reasons) == 8


def score_with_reasons(run: Path) -> tuple[list[ScoreRow], dict[str, str]]:
    """Replay an attack, and return its score rows and the reasons for missing bounds."""
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    folder = make_replay(run, spec).run().folder
    scorer = Scorer(run, [run / "truth"], bound_seconds=60)
    rows = scorer.score(folder)
    return rows, scorer.bounds.reasons


def test_secure_sums_are_scored_without_bounds(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", model=MODEL, secure_aggregation={"threshold": 2})
    rows, reasons = score_with_reasons(run)
    assert len(rows) == 2
    assert all(row.bound_mse is None for row in rows)
    assert list(reasons.values()) == ["no lower bound on the reconstruction error is known for sums under secure aggregation"]


def test_case_with_a_damaged_index_row_has_no_bound(tmp_path: Path) -> None:
    run = federate(tmp_path / "run", model=MODEL, defense="gaussian(0.003)")
    score_with_reasons(run)
    change_index(run / "recording", "UPDATE observations SET bytes = -1 WHERE client = (SELECT min(client) FROM observations)")
    folder = next(path for path in (run / "reconstructions").iterdir() if path.is_dir())
    scorer = Scorer(run, [run / "truth"], bound_seconds=60)
    assert sorted(row.bound_mse is None for row in scorer.score(folder)) == [False, True]
    (reason,) = scorer.bounds.reasons.values()
    assert "index.sqlite" in reason
    assert "no valid row" in reason
