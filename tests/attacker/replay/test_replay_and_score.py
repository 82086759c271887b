"""Tests of replay and scoring on federations of the local engine: from a recording to rows of scores."""

import dataclasses
import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import federate, make_replay
from PIL import Image

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.replay.metadata_reader import read_metadata
from attacker.replay.replay import Replay
from attacker.report.hints import make_replay_command
from attacker.scoring import Scorer, read_rows, summarise
from attacker.scoring.oracle import compute_true_logits, read_true_labels
from attacker.scoring.truth.originals import CaseObservation
from fedsim.recording import Recording

SETTINGS: dict[str, Any] = {"rounds": 2, "model": "lenet_dlg", "clients": 3, "batch_size": 2}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", **SETTINGS)


def replay(run: Path, name: str = "cpl", *, null: bool = False, arguments: dict | None = None, **settings) -> Replay:
    spec = AttackSpec(name=name, arguments={"steps": 2} if arguments is None else arguments, null=null)
    return make_replay(run, spec, **settings)


def test_every_example_has_a_score_row_with_its_original(run: Path) -> None:
    done = replay(run, arguments={"restarts": 2}).run()
    assert (done.done, done.skipped, done.failed) == (6, 0, {})
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    assert len(rows) == 12 == len(read_rows(run / "scores.jsonl"))
    assert len({(row.case, row.batch, row.position) for row in rows}) == 12
    from fedsim import data as datasets

    data = datasets.load("digits")
    for row in rows:
        x, y = data.train[[row.index]]
        assert row.label_true == int(y)
        pair = np.asarray(Image.open(run / row.pair)) / 255
        np.testing.assert_allclose(pair[:, :8], x[0, 0], atol=0.51 / 255)
        assert np.square(pair[:, 8:] - pair[:, :8]).mean() == pytest.approx(row.mse, abs=5e-3)
        assert row.success == (row.mse <= 0.009)
    assert sum(row.success for row in rows) > 4
    assert {row.ssim for row in rows} == {None}
    assert all(row.ssim_global > 0.5 for row in rows if row.success)
    assert {(row.codec, row.rounded) for row in rows} == {("dense", False)}
    assert {row.environment["torch"] for row in rows} == {version("torch")}
    assert all("commit" in row.environment and row.lpips is None for row in rows)
    assert {row.lpips_reason for row in rows} == {"AlexNet needs images of at least 31x31 pixels, got 8x8"}


def test_finished_cases_are_skipped_and_missing_ones_attacked(run: Path) -> None:
    first = replay(run)
    first.run(), (first.make_path("00001-" + Recording(run / "recording").read_rows()[0].client)).unlink()
    again = replay(run).run()
    assert (again.done, again.skipped) == (1, 5)


def test_chunks_do_not_change_results(run: Path) -> None:
    one = {"steps": 5, "tv": 0.0}  # with signed steps of Adam, rounding errors hardly grow
    whole, parts = (replay(run, "inverting_gradients", arguments=one, seed=1, chunk=chunk) for chunk in (6, 2))
    whole.run()
    before = {path.name: Reconstruction.read(path) for path in whole.folder.glob("*.safetensors")}
    for path in whole.folder.glob("*.safetensors"):
        path.unlink()
    parts.run()
    for name, reconstruction in before.items():
        torch.testing.assert_close(Reconstruction.read(parts.folder / name).x, reconstruction.x, rtol=1e-2, atol=1e-2)


def test_case_with_a_truncated_file_is_attacked_again(run: Path) -> None:
    first = replay(run)
    first.run()
    path = next(first.folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:100])
    assert replay(run).run().done == 1


def test_interrupt_keeps_the_best_so_far_and_the_next_replay_finishes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attacker.attacks.optimisers.lbfgs import LBFGSStepper

    step, calls = LBFGSStepper.step, []

    def interrupted(self, *arguments):
        calls.append(1)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(LBFGSStepper, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replay(run, chunk=3).run()
    kept = [Reconstruction.read(path) for path in replay(run).folder.glob("*.safetensors")]
    assert len(kept) == 3
    assert all(reconstruction.interrupted for reconstruction in kept)
    loss = {reconstruction.case: float(reconstruction.loss[-1]) for reconstruction in kept}
    calls[:] = [1] * 28
    with pytest.raises(KeyboardInterrupt):
        replay(run, chunk=3).run()
    for path in replay(run).folder.glob("*.safetensors"):
        assert float(Reconstruction.read(path).loss[-1]) <= loss[Reconstruction.read(path).case]
    again = replay(run, chunk=3).run()
    assert (again.done, again.skipped) == (6, 0)


def test_unusable_attack_is_a_failure_in_every_row(run: Path) -> None:
    done = replay(run, "idlg", arguments={}).run()
    assert len(done.failed) == 6
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    assert len(rows) == 12
    assert {row.failure for row in rows} == {"the attack idlg cannot be used: it works for one example only"}
    assert not any(row.success for row in rows)


def test_damaged_observation_fails_alone(run: Path) -> None:
    row = Recording(run / "recording").read_rows()[2]
    path = run / "recording" / str(row.file)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    done = replay(run).run()
    assert done.done == 5
    assert str(path) in done.failed[row.key]
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    assert len(rows) == 12
    assert sum(row.failure is not None for row in rows) == 2


def test_reconstructions_do_not_depend_on_true_examples(run: Path) -> None:
    first = replay(run)
    first.run()
    before = {path.name: Reconstruction.read(path).x for path in first.folder.glob("*.safetensors")}
    shutil.rmtree(first.folder)
    for private in ("truth", "clients", "experiment.toml"):
        path = run / private
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    replay(run).run()
    assert len(before) == 6
    for name, x in before.items():
        assert torch.equal(Reconstruction.read(first.folder / name).x, x)


def test_label_oracle_is_in_every_row_and_has_its_own_folder(run: Path) -> None:
    scorer = Scorer(run, [run / "truth"])
    with_oracle = replay(run, oracle_labels=lambda row: read_true_labels(scorer, row))
    plain = replay(run)
    assert with_oracle.folder != plain.folder
    with_oracle.run(), plain.run()
    rows, without = scorer.score(with_oracle.folder), scorer.score(plain.folder)
    assert {row.oracles for row in rows} == {("labels",)}
    assert {row.oracles for row in without} == {()}
    by_case = {row.case: [] for row in rows}
    for row in rows:
        by_case[row.case].append((row.label_true, row.label_recovered))
    for pairs in by_case.values():
        assert sorted(true for true, _ in pairs) == sorted(found for _, found in pairs)


def test_null_of_an_attack_with_an_oracle_is_repeated_with_it_and_told_nothing(run: Path) -> None:
    scorer = Scorer(run, [run / "truth"])
    null = replay(run, null=True, oracle_labels=lambda row: read_true_labels(scorer, row))
    facts = read_metadata(null.run().folder / "attack.json")
    assert (facts["oracles"], facts["asked_oracles"]) == ([], ["labels"])
    assert {row.oracles for row in scorer.score(null.folder)} == {()}
    assert make_replay_command(run, facts).endswith(" --oracle labels")
    path = null.folder / "attack.json"
    path.write_text(json.dumps({**facts, "asked_oracles": "labels"}))
    with pytest.raises(ValueError, match=r"asked_oracles of attack\.json must be a list"):
        read_metadata(path)


def test_logit_oracle_gives_logits_of_the_true_examples(run: Path) -> None:
    scorer, recording = Scorer(run, [run / "truth"]), Recording(run / "recording")
    row = next(row for row in recording.read_rows() if row.status == "complete")
    logits = compute_true_logits(scorer, recording, row)
    labels = read_true_labels(scorer, row)
    assert logits.shape == (len(labels), recording.manifest.data.num_classes)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[1])
    seen = recording.read_observation(row)
    (bias,) = [name for name, w in seen.weights.items() if w.shape == (logits.shape[1],)]
    slope = (logits.softmax(dim=1) - one_hot).mean(dim=0)  # gradient of the head's bias, which follows from logits and labels
    assert torch.allclose(-seen.update[bias] / seen.training.learning_rate, slope, atol=1e-5)
    with_oracle = replay(run, oracle_logits=lambda row: compute_true_logits(scorer, recording, row), arguments={"agreement": 0.1})
    with_oracle.run()
    assert {one.oracles for one in scorer.score(with_oracle.folder)} == {("logits",)}


def test_summary_includes_the_null_and_the_verdict(run: Path) -> None:
    scorer = Scorer(run, [run / "truth"])
    for null in (False, True):
        scorer.score(replay(run, null=null, arguments={"restarts": 2}).run().folder)
    (summary,) = summarise(read_rows(run / "scores.jsonl"))
    assert summary.success.value > 0.4 > summary.null.success.value
    assert summary.verdict.outcome == "recovered"
    assert summary.examples == summary.null.examples == 12
    json.dumps(summary.to_json(), allow_nan=False)


def test_true_examples_of_other_data_are_refused(run: Path) -> None:
    description = json.loads((run / "truth" / "dataset.json").read_text())
    (run / "truth" / "dataset.json").write_text(json.dumps({**description, "content_hash": "0"}))
    with pytest.raises(ValueError, match=r"the content of data set .* differs from the data that the truth"):
        Scorer(run, [run / "truth"])


def test_table_rows_are_attacked_and_scored_by_column(tmp_path: Path) -> None:
    training = {"learning_rate": 0.1, "batch_size": 1, "steps": 1}
    run = federate(tmp_path / "table", rounds=2, clients=3, model="mlp", data="breast_cancer", training=training)
    done = replay(run, arguments={"restarts": 3}).run()
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    assert sum(row.success for row in rows) >= 4
    assert {(row.psnr, row.ssim, row.categorical_right) for row in rows} == {(None, None, None)}
    assert all(row.success == (row.continuous_error <= 0.05) for row in rows)
    pair = json.loads((run / rows[0].pair).read_text())
    assert len(pair["columns"]) == len(pair["original"]) == len(pair["reconstruction"]) == 30


@pytest.mark.parametrize(
    ("error", "reason"), [(RuntimeError("this one is bad"), "RuntimeError: this one is bad"), (MemoryError(), "MemoryError")]
)
def test_case_that_raises_fails_alone(run: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    from attacker.attacks.matching.case_batch import CaseBatch

    rows = Recording(run / "recording").read_rows()
    labels = CaseBatch.find_labels

    def fails_for_one(self, i, rng, **settings):
        if self.cases[i].key == rows[1].key:
            raise error
        return labels(self, i, rng, **settings)

    monkeypatch.setattr(CaseBatch, "find_labels", fails_for_one)
    done = replay(run).run()
    assert done.done == 5
    assert done.failed == {rows[1].key: reason}


def test_case_interrupted_before_its_first_loss_stays_unfinished(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attacker.attacks.matching.case_batch import CaseBatch

    monkeypatch.setattr(CaseBatch, "evaluate", raise_interrupt)
    replaying = replay(run, "inverting_gradients", arguments={"steps": 2})
    with pytest.raises(KeyboardInterrupt):
        replaying.run()
    assert list(replaying.folder.glob("*.failed.json")) == []
    assert replaying.count_unfinished() == (6, 6)


def raise_interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_diverged_search_is_a_failure_and_can_be_scored(run: Path) -> None:
    done = replay(run, "inverting_gradients", arguments={"steps": 2, "tv": 1e300}).run()
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    assert len(rows) == 12
    assert set(done.failed.values()) <= {"the search diverged: its loss or its result is NaN or infinite"}
    assert not any(row.success for row in rows)


def test_recordings_with_a_common_output_folder_do_not_mix(run: Path, tmp_path: Path) -> None:
    other = federate(tmp_path / "other", seed=5, **SETTINGS)
    first = replay(run)
    second = make_replay(other, first.spec, out=first.out)
    assert first.folder != second.folder
    first.run()
    assert second.run().done == 6


def test_oracle_labels_repeat_with_repeated_examples(tmp_path: Path) -> None:
    training = {"learning_rate": 0.1, "batch_size": 100, "steps": 7}
    run = federate(tmp_path / "again", training=training, clients=3, model="lenet_dlg")
    scorer, (row, *_) = Scorer(run, [run / "truth"]), Recording(run / "recording").read_rows()
    assert len(scorer.truth.read_originals([CaseObservation(1, 1, (row.client,))])[0]) < row.num_examples
    assert len(read_true_labels(scorer, row)) == row.num_examples


def test_interval_counts_an_example_of_several_rounds_once(run: Path) -> None:
    rows = Scorer(run, [run / "truth"]).score(replay(run).run().folder)
    again = [dataclasses.replace(row, case=f"again-{row.case}") for row in rows]
    (once,), (twice,) = summarise(rows), summarise([*rows, *again])
    assert twice.examples == 2 * once.examples
    assert (twice.success.low, twice.success.high, twice.mse) == (once.success.low, once.success.high, once.mse)


def test_a_null_is_compared_on_the_same_cases(run: Path) -> None:
    scorer = Scorer(run, [run / "truth"])
    rows = scorer.score(replay(run, rounds=frozenset({1})).run().folder) + scorer.score(replay(run, null=True).run().folder)
    (summary,) = summarise(rows)
    assert summary.examples == summary.null.examples == 6
    assert (summary.verdict.examples, summary.verdict.outcome) != (0, "no verdict")
    whole = scorer.score(replay(run, arguments={"steps": 3}).run().folder)
    part = scorer.score(replay(run, null=True, arguments={"steps": 3}, rounds=frozenset({2})).run().folder)
    (other,) = (one for one in summarise([*whole, *part]) if one.spec != summary.spec)
    assert other.verdict.leaks or other.verdict.reason == "the null was run on 6 of 12 examples alone"
