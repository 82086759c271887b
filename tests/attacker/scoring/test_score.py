"""Tests of scoring on federations of the local engine: tables, LPIPS, and damaged files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import federate, make_replay
from PIL import Image

from attacker.attacks import AttackSpec
from attacker.attacks.learned.perceptual import load
from attacker.reconstruction import Reconstruction
from attacker.replay.replay import ReplayResult
from attacker.replay.results import write_failure
from attacker.scoring import Scorer, ScoreRow, summarise
from attacker.scoring.comparison import match_labels
from attacker.scoring.rows import replace_rows
from fedsim import data as datasets

Federate = Callable[..., Path]


@pytest.fixture
def federate_here(tmp_path: Path) -> Federate:
    """Function that runs a federation of two clients, with some top-level keys of the experiment replaced."""
    return partial(federate, tmp_path / "run", model="lenet_dlg", batch_size=2)


def attack(run: Path, **arguments: Any) -> ReplayResult:
    spec = AttackSpec(name="cpl", arguments=arguments or {"steps": 2})
    return make_replay(run, spec).run()


def test_rows_have_the_lpips_of_their_pairs_and_the_summary_the_mean(shared_data: Path, federate_here: Federate) -> None:
    weights = shared_data / "lpips" / "alexnet_features.safetensors"
    if not weights.exists():
        pytest.skip(f"{weights} is absent")
    run = federate_here(model={"name": "mlp", "hidden": [16]}, data="photos")
    rows = Scorer(run, [run / "truth"], lpips_weights=weights).score(attack(run, steps=5).folder)
    assert len(rows) == 4
    pairs = [torch.from_numpy(np.asarray(Image.open(run / row.pair)).transpose(2, 0, 1).copy())[None] / 255 for row in rows]
    for row, pair in zip(rows, pairs, strict=True):
        others = [pairs[i] for i, one in enumerate(rows) if one.rounds == row.rounds and one.client != row.client]
        controls = [load("alex", weights)(pair[..., :32], other[..., 32:]).item() for other in others]
        assert row.lpips == pytest.approx(load("alex", weights)(pair[..., :32], pair[..., 32:]).item(), abs=5e-3)
        assert row.other_lpips is not None
        assert min(abs(row.other_lpips - control) for control in controls) < 5e-3
        assert (row.lpips_net, row.lpips_reason) == ("alex", None)
    assert len({row.lpips for row in rows}) == 4
    (summary,) = summarise(rows)
    assert summary.lpips.value == pytest.approx(np.mean([row.lpips for row in rows]))
    assert summary.lpips_net == "alex"


def test_category_is_the_largest_of_its_columns(federate_here: Federate, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["age,work,sex,income"]
    lines += [f"{a},{'abc'[b]},{'fm'[c]},{(a + b) % 2}" for a, b, c in rng.integers(0, (50, 3, 2), size=(40, 3))]
    (tmp_path / "people.csv").write_text("\n".join(lines) + "\n")
    training = {"learning_rate": 0.1, "batch_size": 1, "steps": 1}
    data = {"name": "csv", "path": str(tmp_path / "people.csv"), "drop": ["sex"]}
    run = federate_here(model="mlp", data=data, training=training)
    done = attack(run, restarts=2)
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    assert [row.categorical_right for row in rows] == [1] * 2
    originals = [np.argmax(json.loads((run / row.pair).read_text())["original"][1:]) for row in rows]
    assert [row.other_categorical_right for row in rows] == [float(originals[0] == originals[1])] * 2
    assert all(row.success and row.continuous_error < 0.05 for row in rows)
    pair = json.loads((run / rows[0].pair).read_text())
    assert pair["columns"] == ["age", "work", "work", "work"]
    assert np.argmax(pair["original"][1:]) == np.argmax(pair["reconstruction"][1:])
    shutil.move(tmp_path / "people.csv", tmp_path / "moved.csv")
    datasets._load.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"does not exist; .*, as in --data csv:PATH"):
        Scorer(run, [run / "truth"])
    moved = Scorer(run, [run / "truth"], (f"csv:{tmp_path / 'moved.csv'}", {}))
    assert [row.mse for row in moved.score(done.folder)] == [row.mse for row in rows]


def test_exact_matches_are_a_share_of_all_rows_and_images_have_none(federate_here: Federate, tmp_path: Path) -> None:
    """A row without a reconstruction is no match, whether its case failed or lacks an example."""
    training = {"learning_rate": 0.1, "batch_size": 1, "steps": 1}
    tables = federate_here(model="mlp", data="breast_cancer", training=training)
    done = make_replay(tables, AttackSpec(name="exact")).run()
    first, second = sorted(done.folder.glob("*.safetensors"))
    second.unlink()
    write_failure(done.folder, second.stem, "out of memory")
    (summary,) = summarise(Scorer(tables, [tables / "truth"]).score(done.folder))
    assert (summary.exact_match.value, summary.exact_match.count) == (0.5, 2)
    found = Reconstruction.read(first)
    none = replace(found, x=found.x[:0], y=found.y[:0], confidence=found.confidence[:0], explained=None, evidence={})
    none.write(first)
    (summary,) = summarise(Scorer(tables, [tables / "truth"]).score(done.folder))
    assert summary.exact_match.value == 0
    images = federate(tmp_path / "images", model="lenet_dlg")
    (summary,) = summarise(Scorer(images, [images / "truth"]).score(attack(images).folder))
    assert summary.exact_match is None


@pytest.mark.parametrize("source", ["held_out", "clients"])
def test_rows_of_a_table_state_where_its_ranges_come_from(federate_here: Federate, source: str) -> None:
    run = federate_here(model="mlp", data={"name": "breast_cancer", "ranges_from": source})
    rows = Scorer(run, [run / "truth"]).score(attack(run).folder)
    assert {row.ranges_from for row in rows} == {source}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(2, 3, 9, 9)}, "(3, 9, 9)"),
        ({"y": torch.zeros(3, dtype=torch.int64)}, "tensor y must have one value for each of 2 examples, got 3"),
        ({"explained": torch.zeros(1)}, "tensor explained must have one value for each of 2 examples, got 1"),
        ({"loss": torch.zeros(1, 1)}, "tensor loss must be floats with one axis, got F32 of shape (1, 1)"),
        ({"y": torch.zeros(2)}, "tensor y must be int64 with one axis, got F32 of shape (2,)"),
    ],
)
def test_reconstructions_of_another_shape_are_a_failure(
    federate_here: Federate, changes: dict[str, torch.Tensor], words: str
) -> None:
    run = federate_here()
    done = attack(run)
    path = next(done.folder.glob("*.safetensors"))
    found = Reconstruction.read(path)
    replace(found, **changes).write(path)
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    failures = [row.failure for row in rows if row.failure is not None]
    assert len(failures) == 2
    assert all(words in failure for failure in failures)


def test_damaged_attack_json_is_refused(federate_here: Federate) -> None:
    run = federate_here()
    done, scorer = attack(run), Scorer(run, [run / "truth"])
    facts = json.loads((done.folder / "attack.json").read_text())
    facts["cases"][0]["key"] = "../elsewhere"
    (done.folder / "attack.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"attack\.json has a case named '\.\./elsewhere', which cannot be the name of a file"):
        scorer.score(done.folder)
    (done.folder / "attack.json").write_text("{")
    with pytest.raises(ValueError, match=r"attack\.json: .*replay the attack again"):
        scorer.score(done.folder)
    attack(run)
    assert {row.state for row in scorer.score(done.folder)} == {"done"}


def test_labels_are_compared_as_multisets() -> None:
    assert match_labels([1, 1, 2, 3], [3, 1, 2, 1]) == [True] * 4
    assert match_labels([1, 1, 2], [1, 2, 2]) == [True, False, True]
    assert match_labels([4], []) == [False]


OTHERS = [
    {"source": "b", "case": "1", "note": "not of this attack"},
    {"source": "a", "case": "2", "note": "another case"},
    {"case": "1", "source": "b", "note": '"source": "a", "case": "1"'},
]


@pytest.mark.parametrize("only", [None, {"1"}])
@pytest.mark.parametrize("scored_before", [True, False])
def test_scores_replace_rows_of_the_same_attack_and_case_only(tmp_path: Path, only: set[str] | None, scored_before: bool) -> None:
    path, old, new = (
        tmp_path / "scores.jsonl",
        {"source": "a", "case": "1", "psnr": 1.0},
        ScoreRow(source="a", case="1", index=0, psnr=2.0),
    )
    before = [OTHERS[0], *([old] if scored_before else []), *OTHERS[1:]]
    path.write_text("".join(json.dumps(row) + "\n" for row in before) + '{"source": "a", "cut off')
    replace_rows(path, [new, new], "a", only)
    kept = [row for row in OTHERS if only is not None or row["source"] != "a"]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*kept, new.to_dict(), new.to_dict()]
    replace_rows(path, [], "a", only)
    assert [json.loads(line) for line in path.read_text().splitlines()] == kept
