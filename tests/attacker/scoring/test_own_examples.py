"""Tests of truth that the owner of a recorded app gives: it scores like that of clients, and what does not fit is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import federate

import fedleak
from attacker.scoring.truth.own_examples import _assign_to_steps
from attacker.scoring.truth.run_truth import RunTruth
from fedsim import data as datasets
from fedsim.commands.maintenance import verify
from fedsim.recording import Recording, Training

Used = dict[tuple[int, str], tuple[Any, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Used]:
    """Folder of a run of two rounds whose truth is removed, and the examples that its clients used."""
    run = federate(tmp_path_factory.mktemp("runs") / "theirs", rounds=2, clients=3, batch_size=2)
    truth, used = RunTruth([run / "truth"]), Used()
    for row in Recording(run / "recording").read_rows():
        (step,) = truth.read_used(row.round, row.attempt, row.client).steps
        used[row.round, row.client] = truth.data.train[list(step)]
    shutil.move(run / "truth", run.with_name("original"))
    return run, used


@pytest.fixture
def run(made: tuple[Path, Used], tmp_path: Path) -> Path:
    shutil.copytree(made[0], tmp_path / "theirs")
    return tmp_path / "theirs"


def score(run: Path, truth: Path | None = None) -> list[tuple[Any, ...]]:
    recording = fedleak.load(run)
    fedleak.attack(recording, "exact", fallback="none")
    scores = fedleak.score(recording, truth=None if truth is None else [truth])
    return sorted((row.case, row.batch, row.position, row.mse, row.success, row.label_true) for row in scores.rows)


def test_given_examples_score_like_those_that_clients_wrote(run: Path, made: tuple[Path, Used]) -> None:
    fedleak.write_truth(fedleak.load(run), made[1])
    given = score(run)
    assert given == score(run, made[0].with_name("original"))
    assert any(success for *_, success, _ in given)
    assert not verify(run).damaged


def test_examples_of_other_clients_are_reported_as_a_mismatch(run: Path, made: tuple[Path, Used]) -> None:
    keys = list(made[1])
    fedleak.write_truth(fedleak.load(run), dict(zip(keys, [made[1][key] for key in keys[1:] + keys[:1]], strict=True)))
    assert not any(success for *_, success, _ in score(run))


def test_bytes_and_arrays_are_the_same_examples_and_equal_ones_count_once(run: Path, made: tuple[Path, Used]) -> None:
    key, (x, y) = next(iter(made[1].items()))
    pixels = (255 * x).round().to(torch.uint8)
    later = (2, key[1])
    fedleak.write_truth(fedleak.load(run), {key: (pixels.numpy(), y.numpy()), later: (pixels / 255, y)})
    truth = RunTruth([run / "truth"])
    assert truth.read_used(1, 1, key[1]) == truth.read_used(2, 1, key[1])
    assert len(truth.data.train) == len(x)
    torch.testing.assert_close(truth.data.train[[0, 1]][0], pixels / 255)


@pytest.mark.parametrize("count", [0, 400])
def test_other_examples_tell_one_recovered_example_from_chance(count: int, tmp_path: Path) -> None:
    run = federate(tmp_path / "theirs", clients=1)
    (row,), digits = Recording(run / "recording").read_rows(), datasets.load("digits").train
    truth = RunTruth([run / "truth"])
    example = truth.data.train[list(truth.read_used(1, 1, row.client).steps[0])]
    shutil.rmtree(run / "truth")
    recording = fedleak.load(run)
    fedleak.write_truth(recording, {(1, row.client): example}, others=digits[list(range(count))] if count else None)
    for null in (False, True):
        fedleak.attack(recording, "exact", null=null, fallback="none")
    (summary,) = fedleak.score(recording).summaries
    assert (summary.verdict.recovered, summary.verdict.null_recovered) == (1, 0)
    assert (summary.verdict.outcome == "recovered") == (count > 0)


def test_the_run_may_be_moved(run: Path, made: tuple[Path, Used]) -> None:
    fedleak.write_truth(fedleak.load(run), made[1])
    moved = run.rename(run.with_name("moved"))
    assert len(RunTruth([moved / "truth"]).data.train)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x[:, :, 1:], y), r"x must have shape \(N, 1, 8, 8\) and y shape \(N,\), with N > 0, got \(2, 1, 7, 8\)"),
        (lambda x, y: (x, y[:1]), r"got \(2, 1, 8, 8\) and \(1,\)"),
        (lambda x, y: (x[:0], y[:0]), "with N > 0"),
        (
            lambda x, y: (x * 2 - 1, y),
            r"values must lie in \[0, 1\], got \[-1, 1\]; give them as they are before",
        ),
        (lambda x, y: (x * float("nan"), y), r"values must lie in \[0, 1\], got \[nan, nan\]"),
        (lambda x, y: (x, y + 10), "labels must be integers from 0 to 9, got int64 from 1"),
        (lambda x, y: (x, y.float()), "labels must be integers from 0 to 9, got float32"),
        (lambda x, y: (torch.cat([x, x]), torch.cat([y, y])), r"4 are given, and a round of 1 \* 2 uses fewer"),
    ],
)
def test_examples_that_do_not_fit_are_refused(
    run: Path, made: tuple[Path, Used], change: Callable[[Any, Any], Any], words: str
) -> None:
    key, (x, y) = next(iter(made[1].items()))
    with pytest.raises(ValueError, match=words) as error:
        fedleak.write_truth(fedleak.load(run), {key: change(x, y)})
    assert key[1] in str(error.value)
    assert not (run / "truth").exists()


def test_unknown_clients_no_examples_and_present_truth_are_refused(run: Path, made: tuple[Path, Used]) -> None:
    recording, example = fedleak.load(run), next(iter(made[1].values()))
    with pytest.raises(ValueError, match=r"\(7, 'nobody'\): the recording has no update of this round and client; it has \(1, '"):
        fedleak.write_truth(recording, {(7, "nobody"): example})
    with pytest.raises(ValueError, match="no examples are given"):
        fedleak.write_truth(recording, {})
    fedleak.write_truth(recording, made[1])
    with pytest.raises(ValueError, match="truth exists already; delete this folder"):
        fedleak.write_truth(recording, made[1])


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"steps": 1, "batch_size": 5}, [[0, 1, 2, 3, 4]]),
        ({"steps": 3, "batch_size": 2}, [[0, 1], [2, 3], [4, 0]]),
        ({"epochs": 2, "batch_size": 2}, [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]),
        ({"epochs": 2, "batch_size": 2, "drop_last": True}, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ({"epochs": 1, "batch_size": 2, "accumulation": 2}, [[0, 1, 2, 3], [4]]),
    ],
)
def test_examples_are_assigned_to_the_stated_steps(settings: dict[str, Any], steps: list[list[int]]) -> None:
    assert _assign_to_steps(range(5), Training(learning_rate=0.1, **settings)) == steps
