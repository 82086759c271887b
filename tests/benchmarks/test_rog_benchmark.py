"""Tests of the ROG benchmark: stored answers, and the comparison of attacks in figure 9 with its picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.contract import Options
from support.rog import outcomes
from support.rog.attacks import REPEATED, load_tools
from support.rog.columns import COLUMNS, BatchSetting, DefendedColumn, observe
from support.rog.comparison import BatchScores, ColumnResult, estimate_mean, measure_columns, measure_in_processes, subtract_lpips
from support.rog.outcomes import AnswerFolder, Similarity, average_similarities, sort_like
from support.rog.tradeoff import ATTACKS, compare_attacks, draw_regions, make_narrow_lenet

from attacker.attacks import cpl
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec

OPTIONS = Options(quick=True, json=False, data=None, device="cpu", seed=0, table=None)
SETTING = BatchSetting(model="lenet_dlg", side=8, epochs=1)
FED_CDP = "Fed-CDP: fed_cdp(4, snr_db=-5)"
ROWS: list[dict[str, Any]] = [
    {
        "defense": defense,
        "accuracy": accuracy,
        "attack": attack,
        "lpips": lpips,
        "other_lpips": 0.75,
        "null_lpips": 0.8,
        "psnr": 10 - lpips,
    }
    for defense, accuracy, own, other in (("none", 0.5, 0.2, 0.6), ("sign: sign()", 0.4, 0.7, 0.6), (FED_CDP, 0.45, 0.3, 0.5))
    for attack, lpips in zip(ATTACKS, (own, other), strict=True)
]


def test_answers_are_stored_by_settings_images_and_code_and_not_by_the_name_of_a_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, images, y = AnswerFolder(tmp_path, fresh=False), torch.rand(2, 1, 1, 8, 8), torch.tensor([3])
    plain, attack = DefendedColumn("any"), cpl(steps=1)
    trials = [
        (plain, SETTING, images[0], attack),
        (replace(plain, name="other"), SETTING, images[0], cpl(steps=1)),  # the same work
        (replace(plain, defense="sign()"), SETTING, images[0], attack),
        (plain, replace(SETTING, learning_rate=1e-3), images[0], attack),
        (plain, SETTING, images[1], attack),
        (plain, SETTING, images[0], cpl(steps=1, patience=7)),
        (plain, SETTING, images[0], attack.null()),
    ]
    counts = []
    for column, setting, x, chosen in trials:
        folder.attack(chosen, observe(column, setting, x, y, key="client", seed=0), x, OPTIONS)
        counts.append(len(list(tmp_path.glob("*.safetensors"))))
    assert counts == [1, 1, 2, 3, 4, 5, 6]
    monkeypatch.setattr(outcomes, "identify_version", lambda: "another version")
    folder.attack(attack, observe(plain, SETTING, images[0], y, key="client", seed=0), images[0], OPTIONS)
    assert len(list(tmp_path.glob("*.safetensors"))) == 7


def test_rows_do_not_depend_on_the_number_of_worker_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [column for column in COLUMNS if column.table in ("raw", "sign")]
    found = []
    for workers in (1, 2):
        rows, summary = measure_columns(replace(OPTIONS, workers=workers), chosen)
        found.append([{key: value for key, value in row.items() if key != "cpu_seconds"} for row in rows])
        assert summary["columns"] == 2
        assert 0 < summary["peak_mb"] < 4000
        assert "iterations_ratio" in summary
    assert found[0] == found[1]
    assert [row["column"] for row in found[0]] == [column.name for column in chosen for _ in range(5)]
    assert capsys.readouterr().err.splitlines()[0].startswith("sign: column 1 of 2 after ")  # the most expensive one


def test_failed_column_is_named_after_the_others_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = DefendedColumn("wrong", defense="rog_top_k(2.0)", cost=1000)
    with pytest.raises(RuntimeError, match=r"columns that failed: wrong\. Run it again without --fresh"):
        measure_in_processes(replace(OPTIONS, workers=1), [COLUMNS[0], wrong])
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("wrong: column 1 of 2 after ")
    assert "failed: " in first
    assert second.startswith("raw: column 2 of 2 after ")


def make_scores(plain: list[float], enhanced: list[float]) -> BatchScores:
    """Return scores with these LPIPS, one value for each batch."""
    found = [[Similarity(psnr=20 - lpips, ssim=0.5, ssim_global=0.5, lpips=lpips) for lpips in one] for one in (plain, enhanced)]
    return BatchScores(found[0], found[1], [], [1.0] * len(plain))


def test_rog_is_compared_with_the_better_rows_of_inverting_gradients_over_all_batches() -> None:
    scores = {"ROG": make_scores([0.5, 0.5], [0.125, 0.375]), "Inverting Gradients": make_scores([0.25, 0.25], [0.1, 0.9])}
    assert subtract_lpips(scores["ROG"], scores) == [-0.125, 0.125]
    assert subtract_lpips(scores["ROG"], {"ROG": scores["ROG"]}) == []
    equal = ColumnResult([], scores, "report")
    assert equal.is_not_worse_than_ig is True
    assert equal.is_better_than_pixels is None
    other = scores | {"pixels": make_scores([0.25, 0.25], [0.3, 0.3]), "Inverting Gradients": make_scores([0.2, 0.3], [0.2, 0.2])}
    worse = ColumnResult([], other, "report")
    assert worse.is_not_worse_than_ig is False
    assert worse.is_long_not_worse_than_ig is None
    for plain, is_long_enough in (([0.2, 0.2], True), ([0.3, 0.3], False)):
        longer = ColumnResult([], other | {"ROG, long": make_scores(plain, [0.9, 0.9])}, "report")
        assert longer.is_long_not_worse_than_ig is is_long_enough
    assert worse.is_better_than_pixels is False  # equal is not better


def test_means_have_intervals_for_as_many_batches_as_are_repeated() -> None:
    values = [0.1, 0.2, 0.3, 0.2, 0.2]
    found = estimate_mean("lpips", values)
    assert found["lpips"] == pytest.approx(0.2)
    assert 0.1 < found["lpips_low"] < 0.2 < found["lpips_high"] < 0.3
    assert len(values) == REPEATED
    assert estimate_mean("lpips", values[:-1])["lpips_low"] is None
    assert estimate_mean("lpips", []) == {"lpips": None, "lpips_low": None, "lpips_high": None}
    similarities = make_scores([0.2, 0.4], []).plain
    assert average_similarities(similarities) == Similarity(
        psnr=pytest.approx(19.7), ssim=0.5, ssim_global=0.5, lpips=pytest.approx(0.3)
    )
    assert average_similarities([*similarities, replace(similarities[0], lpips=None)]).lpips is None


def test_batches_differ_in_their_images_and_in_their_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (load_tools(replace(OPTIONS, flags=frozenset({"repeated"})), batch) for batch in (0, 1))
    assert not any(torch.equal(a, b) for a in first.x for b in second.x)
    assert (first.scale.batches, first.options.seed, second.options.seed) == (REPEATED, 0, 1)


def test_rog_is_better_where_its_distance_is_lower_or_its_psnr_higher() -> None:
    found = compare_attacks(ROWS, "lpips")
    assert (found["defenses"], found["rog_better"]) == (3, 2)
    assert round(found["mean_difference"], 6) == round((-0.4 + 0.1 - 0.2) / 3, 6)
    assert compare_attacks(ROWS, "psnr")["rog_better"] == 2


def test_images_are_sorted_like_the_originals_that_they_resemble_most() -> None:
    originals = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = (originals + 0.05)[[2, 0, 3, 1]]
    assert torch.equal(sort_like(found, originals), originals + 0.05)


def test_picture_has_a_region_for_each_attack_unless_its_points_are_on_a_line(tmp_path: Path) -> None:
    def draw(rows: list[dict[str, Any]]) -> str:
        draw_regions(rows, "lpips", tmp_path / "drawn.svg")
        return (tmp_path / "drawn.svg").read_text()

    drawn, flat = draw(ROWS), draw([{**row, "accuracy": 0.5} for row in ROWS])
    names = ("no defense", "sign", "Fed-CDP, -5 dB", *ATTACKS, "null of ROG", "ROG, other update")
    assert all(name in drawn for name in names)
    assert drawn.count("opacity: 0.15") == 2
    assert flat.count("opacity: 0.15") == 0
    assert drawn == draw(ROWS)


def test_narrow_network_is_rogs_with_fewer_hidden_units() -> None:
    own, published = make_narrow_lenet(), models.build(ModelSpec(name="lenet_rog"), DataSpec(shape=(3, 32, 32), num_classes=10))
    shapes = [{name: tuple(p.shape) for name, p in network.named_parameters()} for network in (own, published)]
    assert {name: tuple(64 if n == 512 else n for n in shape) for name, shape in shapes[1].items()} == shapes[0]
    assert [type(module) for module in own] == [type(module) for module in published]
