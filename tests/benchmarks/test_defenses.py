"""Tests of the benchmark of defenses: one federation per setting, and detection of wrong declarations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.defenses import measurements
from support.defenses.federation import DataFiles, federate, make_settings, measure_units
from support.defenses.grid import DECLARED_PAIRS, GRID, fill_template
from support.defenses.measurements import Measurement, MeasurementFile, attack_all
from support.defenses.outcomes import MIN_CASES, Change, Declared, ExampleScores, compare

from attacker.attacks import AttackSpec
from attacker.scoring.verdict import judge_attack

CASES = 16


def make_scores(level: float, spread: float = 0.5, *, null: float = 8.0, seed: int = 0, cases: int = CASES) -> ExampleScores:
    """Return scores of an attack with PSNR values around one level, and of its null around another."""
    rng = np.random.default_rng(seed)
    names = [str(i) for i in range(cases)]
    psnr = dict(zip(names, (level + spread * rng.standard_normal(cases)).tolist(), strict=True))
    its = dict(zip(names, (null + 0.3 * rng.standard_normal(cases)).tolist(), strict=True))
    return ExampleScores({name: f"case-{name}" for name in names}, psnr, its)


def change(level: float, spread: float = 0.5, **others: Any) -> Change:
    return compare(make_scores(30.0, seed=1, **others), make_scores(level, spread, seed=2, **others))


@pytest.mark.parametrize(
    ("level", "outcome"), [(30.0, "flat"), (30.5, "flat"), (22.0, "falls"), (8.2, "gone"), (36.0, "rises"), (28.5, "undecided")]
)
def test_outcome_follows_from_the_interval(level: float, outcome: str) -> None:
    assert change(level).outcome == outcome


@pytest.mark.parametrize(
    ("level", "wrong"),
    [
        (30.0, "falls"),
        (22.0, "flat"),
        (22.0, "gone"),
        (36.0, "flat"),
        (36.0, "falls"),
        (29.0, "falls"),
        (28.5, "flat"),
        (30.0, "gone"),
    ],
)
def test_a_wrong_declaration_does_not_hold(level: float, wrong: Declared) -> None:
    assert not change(level).is_as_declared(wrong)


def test_few_or_scattered_examples_are_undecided() -> None:
    """An interval that contains 0, but also a decrease of 10 dB, shows neither "flat" nor "falls"."""
    wide = change(28.0, 20.0)
    assert wide.from_none.low < 0 < wide.from_none.high
    few = change(30.0, cases=MIN_CASES - 1)
    for one in (wide, few):
        assert one.outcome == "undecided"
        assert not any(one.is_as_declared(declared) for declared in ("flat", "falls", "gone"))


def test_a_small_mean_change_within_a_wide_interval_is_not_flat() -> None:
    """A small mean is not enough for "flat": the whole interval must be small."""
    wide = change(30.3, 12.0)
    assert abs(wide.from_none.value) < 4
    assert wide.outcome == "undecided"


def test_examples_of_one_case_count_once() -> None:
    none, defended = make_scores(30.0, seed=1), make_scores(28.0, 6.0, seed=2)
    tied = {name: "one" if int(name) < CASES // 2 else f"case-{name}" for name in defended.case}
    found = compare(none, replace(defended, case=tied))
    differences = [defended.psnr[name] - none.psnr[name] for name in tied]
    each = [sum(differences[: CASES // 2]) / (CASES // 2), *differences[CASES // 2 :]]
    assert found.cases == len(each) == 9
    assert found.from_none.value == pytest.approx(sum(each) / len(each))


def test_examples_attacked_on_one_side_only_are_refused() -> None:
    other = make_scores(30.0)
    with pytest.raises(ValueError, match="15 were attacked"):
        compare(other, make_scores(30.0, cases=CASES - 1))


def test_entries_declare_every_pair_and_have_their_settings() -> None:
    for entry in GRID:
        assert len(entry.declared) == len(DECLARED_PAIRS)
        assert len(entry.settings) == (1 if entry.cohorts else 3)
        assert not hasattr(entry, "trained")
    assert fill_template("gaussian({10 rms})", norm=2.0, rms=0.5) == "gaussian(5)"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataFiles:
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    names = [str(i) for i in range(3)]
    for name, count in (("private", 16), ("held_out", 12), ("public", 12)):
        labels = np.arange(count) % 3
        images = (rng.integers(0, 60, (count, 8, 8)) + 90 * labels[:, None, None]).clip(0, 255).astype(np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=labels, class_names=np.array(names))
    return DataFiles(folder / "private.npz", folder / "held_out.npz", folder / "public.npz", part="made up", name="made up")


def test_epsilon_is_that_of_the_attacked_federation(data: DataFiles, tmp_path: Path) -> None:
    """Epsilon must depend on this federation's rounds and noise, not on those of another one."""
    experiment = {**make_settings(data, attacked=3, quick=True), "gradient": "dp_sgd(max_norm=1, noise=0.01)"}
    experiment |= {"clients": {"count": 8}, "rounds": 3}
    found = federate(experiment, tmp_path / "run", "cpu")
    (round,) = {one.round for one in found.recording.read_observations()}
    assert (round, found.recording.manifest.training.batch_size) == (1, 1)
    assert "noise=0.01" in str(next(iter(found.recording.read_observations())).gradient)
    assert isinstance(found.epsilon, float)
    fewer = federate({**experiment, "rounds": 2}, tmp_path / "fewer", "cpu")
    quieter = federate({**experiment, "gradient": "dp_sgd(max_norm=1, noise=0.1)"}, tmp_path / "quieter", "cpu")
    assert isinstance(fewer.epsilon, float)
    assert isinstance(quieter.epsilon, float)
    assert quieter.epsilon < fewer.epsilon < found.epsilon


def test_secure_sum_has_its_cohort_and_number_of_examples(data: DataFiles, tmp_path: Path) -> None:
    experiment = {**make_settings(data, attacked=2, cohort=4, quick=True), "secure_aggregation": True}
    found = federate(experiment, tmp_path / "run", "cpu")
    sums = [one for one in found.recording.read_observations() if one.client == "sum"]
    assert [(one.round, one.num_examples, len(one.cohort)) for one in sums] == [(1, 4, 4), (2, 4, 4)]
    assert {row.num_examples for row in found.recording.read_rows() if row.status == "masked"} == {None}


def test_measured_setting_is_read_from_the_file(data: DataFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = make_settings(data, attacked=2, quick=True) | {"rounds": 1}
    found = federate(experiment, tmp_path / "run", "cpu")
    specs = {"exact": {"fallback": "none"}, "inverting_gradients": {"steps": 30, "tv": 0.1}}
    attacked = attack_all(found, {name: AttackSpec(name=name, arguments=one) for name, one in specs.items()}, "cpu")
    measured = Measurement({"accuracy": found.accuracy}, measure_units(found), attacked)
    path, folder = tmp_path / "kept" / "defenses.jsonl", data.private.parent
    MeasurementFile(path, fresh=False).add({"experiment": experiment}, folder, measured)
    again = MeasurementFile(path, fresh=False)
    read = again.find({"experiment": experiment}, folder)
    assert (read.own, read.units, read.strongest) == (measured.own, measured.units, "exact")
    assert read.attacked["exact"].scored == measured.attacked["exact"].scored
    assert set(read.attacked["exact"].scored.null) == set(read.attacked["exact"].scored.psnr)
    assert read.best_null == max(attacked, key=lambda name: sum(attacked[name].scored.null.values()))
    assert read.verdict == judge_attack(attacked["exact"].own, attacked[read.best_null].null)
    moved = json.loads(json.dumps(experiment).replace(str(folder), "/elsewhere"))
    assert again.find({"experiment": moved}, Path("/elsewhere")) is not None
    assert again.find({"experiment": {**experiment, "defense": "clip(1)"}}, folder) is None
    with monkeypatch.context() as patch:
        patch.setattr(measurements, "identify_version", lambda: "another version")
        assert again.find({"experiment": experiment}, folder) is None
    assert MeasurementFile(path, fresh=True).find({"experiment": experiment}, folder) is None
