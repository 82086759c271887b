"""Tests of the report of reconstructions without scores: without true examples, or not scored yet."""

import io
import json
import shutil
from base64 import b64decode
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from attacker.reconstruction import Reconstruction, list_slots
from attacker.report import build
from attacker.report.gather import gather_run
from fedsim.recording import Column


def read_first_value(source: str | None) -> int:
    """Return the first value of an embedded image."""
    image = Image.open(io.BytesIO(b64decode(str(source).partition(",")[2])))
    return int(image.getpixel((0, 0))[0])


def test_without_true_examples_reconstructions_are_shown_with_nulls_and_unjudged(attacked: Any, report: Any) -> None:
    attacked.forget_truth()
    page = report(attacked)
    headline = "4 examples were reconstructed, 4 with a confidence of at least 0.5, and nothing could be scored, because no truth"
    assert headline in page.text
    assert "These cannot be scored, because no truth was given" in page.text
    assert f"attacker score {attacked.path} --truth FOLDER" in page.text
    assert "label 0, confidence 1.00round 1" not in page.text
    assert page.text.count("label 0, confidence 1.00") == 4
    assert "round 2, bob" in page.text
    for never in ("recovered", "private original", "Scores", "not scored yet"):
        assert never not in page.text.split("How to read this")[0]
    (source,) = (path.name for path in attacked.path.glob("reconstructions/cpl-0*"))
    keys = [f"{number:05d}-{client}" for number in (1, 2) for client in ("ada", "bob")]
    assert {one for one in page.ids() if one.endswith("-1")} - {"run-1"} == {f"run-1-found-{source}-{key}-1" for key in keys}
    grey = [read_first_value(attributes["src"]) for tag, attributes in page.tags if tag == "img"]
    assert grey == 4 * [64] + 4 * [191] + 4 * [64, 191]


def test_own_loss_is_shown_if_it_is_finite(attacked: Any, report: Any) -> None:
    attacked.forget_truth()
    assert "own loss 0" not in report(attacked).text
    path = next(attacked.path.glob("reconstructions/cpl-0*/00001-ada.safetensors"))
    replace(Reconstruction.read(path), loss=torch.tensor([1.0, 0.0125])).write(path)
    assert "label 0, confidence 1.00, own loss 0.013" in report(attacked).text


def test_without_true_examples_failures_and_damaged_files_are_named(
    make_run: Any, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    run.attack()
    run.forget_truth()
    first, second, third, _ = sorted(next(run.path.glob("reconstructions/cpl-0*")).glob("*.safetensors"))
    first.unlink()
    first.with_suffix(".failed.json").write_text('{"reason": "its checksum <differs>"}')
    second.write_bytes(b"no tensors")
    replace(Reconstruction.read(third), x=torch.zeros(1, 3, 5000, 5)).write(third)
    page = report(run)
    assert "1 case without a reconstruction: its checksum <differs>" in page.text
    assert f"{second}: not a reconstruction" in page.text
    assert f"{third} must hold examples of shape (3, 12, 12)" in page.text
    assert page.text.count("label 0, confidence 1.00") == 1
    monkeypatch.setattr("attacker.report.gather.MAX_PAIRS", 2)
    other = make_run("second")
    other.attack()
    other.forget_truth()
    assert "2 of 4 reconstructed examples are not shown" in report(other).text


def test_unscored_reconstructions_are_shown_separately(attacked: Any, report: Any) -> None:
    attacked.rewrite(lambda row: row if row["index"] < 3 else None)
    text = report(attacked).text
    assert "CPL recovered 3 of 3 private images" in text
    assert "1 of 4 cases are not scored yet" in text
    assert "These are not scored yet." in text
    assert text.count("label 0, confidence 1.00") == 1
    assert "no truth was given" not in text


def test_without_true_examples_table_rows_are_shown_in_their_units(make_run: Any, report: Any) -> None:
    colour = [Column(name="colour", kind="categorical", category=category) for category in ("red", "blue")]
    run = make_run(columns=[Column(name="age", low=20, high=60), *colour])
    run.attack()
    run.forget_truth()
    assert "age3050colourred or bluered or blue" in report(run).text


def test_report_of_a_recording_includes_the_files_beside_it(attacked: Any, read_page: Any) -> None:
    attacked.forget_truth()
    (attacked.path / "recording").rename(attacked.path / "theirs")
    out = build([attacked.path / "theirs"])
    assert out == attacked.path / "report.html"
    text = read_page(out).text
    assert "4 examples were reconstructed" in text
    shutil.rmtree(attacked.path / "reconstructions")
    build([attacked.path / "theirs"])
    assert f"attacker replay {attacked.path / 'theirs'} --attack cpl" in read_page(out).text


def test_attacks_on_another_recording_in_the_same_folder_are_left_out(attacked: Any, report: Any) -> None:
    attacked.forget_truth()
    for path in attacked.path.glob("reconstructions/*/attack.json"):
        facts = json.loads(path.read_text())
        path.write_text(json.dumps({**facts, "run": {"name": "first", "created": "2020-01-01T00:00:00Z"}}))
    assert "No attack was replayed on this recording yet" in report(attacked).text


def test_a_null_that_models_the_defense_is_not_shown_beside_an_attack_that_does_not(attacked: Any) -> None:
    attacked.forget_truth()
    assert all(one.null is not None for attack in gather_run(attacked.path).attacks for one in attack.unscored.found)
    path = next(attacked.path.glob("reconstructions/cpl-0*/attack.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "knows_defense": False}))
    (attack,) = gather_run(attacked.path).attacks
    assert [one.null for one in attack.unscored.found] == [None] * 4


def test_notes_on_a_case_are_shown_at_its_first_example_only(attacked: Any) -> None:
    attacked.forget_truth()
    path = min(attacked.path.glob("reconstructions/cpl-0*/*.safetensors"))
    answer = Reconstruction.read(path)
    both = replace(
        answer,
        x=answer.x.repeat(2, *(1,) * (answer.x.ndim - 1)),
        y=answer.y.repeat(2),
        confidence=torch.tensor([0.9, 0.1]),
        explained=None,
        notes=("labels are a guess",),
        slots=list_slots(1, answer.slots[0].client, [2]),
    )
    path.unlink()
    both.write(path)
    (attack,) = gather_run(attacked.path).attacks
    assert [one.notes for one in attack.unscored.found][:3] == [("labels are a guess",), (), ()]
    assert (attack.unscored.total, attack.unscored.likely) == (5, 4)
