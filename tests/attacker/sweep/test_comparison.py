"""Tests of the comparison of settings in sweeps: strongest attacks, the Pareto front, winners, and paired tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from attacker.sweep import SettingResult, SweepGrid, compare_settings, read_grid
from attacker.sweep.federations import AttackScores, FederationResult
from attacker.sweep.tables import NOT_AUDITED, TABLE_COLUMNS, escape_latex, list_cells, to_csv, to_html, to_latex

EXPERIMENT = """
rounds = 1
model = "mlp"
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.1, batch_size = 2, steps = 1 }
"""
GRID = """
experiment = "base.toml"
seeds = [0, 1]
[defenses]
weak = ["clip(1)"]
strong = ["clip(0.5)"]
blind = [{ inputs = "mixup(0.4)" }]
[attacks]
cpl = {}
exact = { fallback = "none" }
"""
ERRORS: Mapping[str, Mapping[str, float]] = {
    "none": {"cpl": 0.05, "exact": 0.3},
    "weak": {"cpl": 0.3, "exact": 0.1},
    "strong": {"cpl": 0.4, "exact": 0.45},
    "blind": {"cpl": 0.9, "exact": 0.9},
}
ACCURACY = {"none": 0.9, "weak": 0.88, "strong": 0.89, "blind": 0.9}


@pytest.fixture
def grid(tmp_path: Path) -> SweepGrid:
    (tmp_path / "base.toml").write_text(EXPERIMENT)
    (tmp_path / "grid.toml").write_text(GRID)
    return read_grid(tmp_path / "grid.toml")


def results(grid: SweepGrid, accuracy: Mapping[str, float] = ACCURACY) -> list[SettingResult]:
    return compare_settings(grid, make_results(grid, accuracy))[0]


def make_results(grid: SweepGrid, accuracy: Mapping[str, float] = ACCURACY) -> Sequence:
    """Make results in which the error of example i is that of `ERRORS` plus i / 1000."""
    found = []
    for one in grid.federations:
        attacks = {}
        for attack in grid.attacks:
            error = ERRORS[one.defense][attack.name]
            examples = tuple(
                {"index": i, "case": f"case-{i // 2}", "rmse": error + i / 1000, "null_rmse": 0.5, "psnr": 20.0}
                | {"success": float(error < 0.2), "null_success": 0.0, "labels": 1.0}
                for i in range(12)
            )
            attacks[attack.name] = AttackScores(
                spec=str(attack.candidates[0]), knows=attack.knows(one.experiment), outcome="", examples=examples
            )
        found.append((one, FederationResult(accuracy=accuracy[one.defense], loss=1.0, bytes_up=10, attacks=attacks)))
    return found


def test_setting_is_measured_by_its_strongest_attack(grid: SweepGrid) -> None:
    by_name = {one.defense: one for one in results(grid)}
    assert {name: one.strongest for name, one in by_name.items()} == {
        name: min(errors, key=lambda attack: errors[attack]) if len(set(errors.values())) > 1 else "cpl"
        for name, errors in ERRORS.items()
    }
    leak = by_name["weak"].leak
    assert leak.rmse.value == pytest.approx(0.1 + 5.5 / 1000)
    assert leak.rmse.clusters == 12  # six batches of each of two seeds


def test_defense_that_no_attack_models_is_not_audited(grid: SweepGrid) -> None:
    settings, comparisons = compare_settings(grid, make_results(grid))
    (blind,) = (one for one in settings if one.defense == "blind")
    assert not blind.audited
    assert not blind.on_front
    assert {one.winner.defense for one in comparisons} == {"strong"}
    assert "blind" not in {one.other.defense for one in comparisons}
    assert NOT_AUDITED in to_html(grid, settings, comparisons)
    assert NOT_AUDITED in to_latex(settings)
    assert to_csv(settings).count("mixup") == len(grid.attacks)


def test_seed_in_which_an_attack_could_not_run_hides_no_setting(grid: SweepGrid) -> None:
    made, reason = list(make_results(grid)), "the update holds no label"
    at = next(i for i, (one, _) in enumerate(made) if one.defense == "strong" and one.experiment.seed == 1)
    one, result = made[at]
    refused = AttackScores(spec="", knows=False, refused=reason)
    made[at] = (one, replace(result, attacks=dict.fromkeys(result.attacks, refused)))
    (strong,) = (one for one in compare_settings(grid, made)[0] if one.defense == "strong")
    assert strong.audited
    assert strong.on_front
    assert strong.leak.refused == reason


def test_front_holds_the_settings_that_none_dominates(grid: SweepGrid) -> None:
    settings = [one for one in results(grid) if one.audited]
    for one in settings:
        beaten = any(other.leak.rmse.value > one.leak.rmse.value and other.accuracy > one.accuracy for other in settings)
        assert one.on_front == (not beaten)
    assert [one.defense for one in settings if one.on_front] == ["none", "strong"]


def test_defense_that_loses_too_much_accuracy_does_not_win(grid: SweepGrid) -> None:
    _, comparisons = compare_settings(grid, make_results(grid, {**ACCURACY, "strong": 0.9 - grid.max_accuracy_loss - 0.01}))
    assert {one.winner.defense for one in comparisons} == {"weak"}


def test_comparisons_are_paired_and_corrected(grid: SweepGrid) -> None:
    _, comparisons = compare_settings(grid, make_results(grid))
    differences = {one.other.defense: one.difference.value for one in comparisons}
    assert differences == {"none": pytest.approx(0.35), "weak": pytest.approx(0.3)}
    assert all(one.adjusted == pytest.approx(0.0) for one in comparisons)  # every example differs by the same amount
    assert all(one.difference.low == pytest.approx(one.difference.high) for one in comparisons)


def test_an_unfinished_grid_has_tables_too(grid: SweepGrid) -> None:
    settings, comparisons = compare_settings(grid, [(one, None) for one in grid.federations])
    assert not comparisons
    assert all(one.finished == 0 and one.seeds == 2 and not one.audited for one in settings)
    assert "not finished" in to_html(grid, settings, comparisons)
    assert to_csv(settings).count("\n") == 1 + len(settings)


def test_only_settings_with_results_have_an_epsilon(grid: SweepGrid) -> None:
    failed = FederationResult(failed="out of memory", attacks={})
    for result in (None, failed):
        settings, _ = compare_settings(grid, [(one, result) for one in grid.federations])
        assert {read_epsilon(one) for one in settings} == {""}
    assert {read_epsilon(one) for one in results(grid)} == {"infinite"}
    finite = [(one, replace(result, epsilon=2.5)) for one, result in make_results(grid)]
    assert {read_epsilon(one) for one in compare_settings(grid, finite)[0]} == {"2.5"}


def read_epsilon(one: SettingResult) -> str:
    return dict(zip(TABLE_COLUMNS, list_cells(one), strict=True))["epsilon"]


def test_latex_commands_are_escaped() -> None:
    assert escape_latex(r"a_b \input{x} 5%") == r"a\_b \textbackslash{}input\{x\} 5\%"
