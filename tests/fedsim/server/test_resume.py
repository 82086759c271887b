"""Tests that a federation which is killed at any time and resumed gives the same results as an uninterrupted one."""

import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import crashing
import pytest
import torch

from defenses import DEFENSES
from fedsim.client import memory
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines
from fedsim.server.checkpoint import ServerCheckpoint
from fedsim.truth import TruthReader

WITH_CHANCE = {"model": "crashing:WithChance", "training": {**crashing.EXPERIMENT["training"], "mode": "train"}}
STRATEGIES = {
    "FedAvg": {"strategy": "FedAvg"},
    "FedAdam": {"strategy": {"name": "FedAdam", "eta": 0.01}, "clients": {"count": 4, "fraction": 0.5}},
}
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["fedsim.engine.engines", "torch._dynamo"])


@pytest.fixture(autouse=True, scope="module")
def _toy() -> Any:
    DEFENSES._builtin["total"] = crashing.TOTAL
    yield
    del DEFENSES._builtin["total"]


def start(out: Path, changes: dict[str, Any], *, crash_at: int | None = None) -> tuple[Any, Any]:
    ours, theirs = SERVER.Pipe()
    process = SERVER.Process(target=crashing.federate, args=(out, changes), kwargs={"crash_at": crash_at, "started": theirs})
    process.start()
    return process, ours


def finish(out: Path, changes: dict[str, Any], *, crash_at: int | None = None) -> int:
    process, _ = start(out, changes, crash_at=crash_at)
    process.join(60)
    assert process.exitcode is not None, "the federation hangs"
    return int(process.exitcode)


def everything(out: Path) -> dict[str, Any]:
    """Return all results of a run except times and the numbers of attempts."""
    found: dict[str, Any] = {}
    recording, truth = Recording(out / "recording"), TruthReader(out / "truth")
    for row in recording.read_rows():
        if row.status != "complete":
            found[row.key] = (row.status, row.reason)
            continue
        seen = recording.read_observation(row)
        found |= {f"{row.key}/buffers/{name}": t.numpy().tobytes() for name, t in seen.buffers_after.items()}
        for kind, tensors in (("weights", seen.weights), ("update", seen.update)):
            found |= {f"{row.key}/{kind}/{name}": t.numpy().tobytes() for name, t in tensors.items()}
        found[f"{row.key}/rest"] = (row.status, row.num_examples, row.bytes, row.metrics, seen.cohort)
        found[f"{row.key}/truth"] = truth.read_used(row.round, row.attempt, row.client)
    state = ServerCheckpoint.read(out / "state")
    found |= {f"state/{name}": t.numpy().tobytes() for name, t in state.arrays.items()}
    found |= {f"state/memory/{name}": t.numpy().tobytes() for name, t in state.memory.tensors.items()}
    found["state/rest"] = (state.round, state.generators, state.memory.values)
    rows = read_json_lines(out / "metrics.jsonl")
    found["metrics"] = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    for folder in sorted((out / "clients").glob("partition-*")):
        kept = memory.load_state(folder, before=10**9)
        found[f"{folder.name}/state"] = {key: repr(sorted(record.items())) for key, record in kept.items()}
    return found


@pytest.fixture(scope="module", params=STRATEGIES)
def uninterrupted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], float]:
    """An uninterrupted run: its folder, changes of the experiment, and duration in seconds."""
    out, changes = tmp_path_factory.mktemp(request.param) / "run", STRATEGIES[request.param]
    process, began = start(out, changes)
    began.recv()
    clock = time.monotonic()
    process.join(60)
    assert process.exitcode == 0
    return out, changes, time.monotonic() - clock


def assert_intact(out: Path) -> None:
    """Check that all observations in the index of a killed run can be read."""
    if (out / "recording" / "manifest.json").exists() and (out / "recording" / "index.sqlite").exists():
        list(Recording(out / "recording").read_observations())


def test_a_run_killed_at_ten_random_times_gives_the_same_results(uninterrupted: Any, tmp_path: Path) -> None:
    """Ten kills for each of two strategies; if a run ends before its next kill, a new one is started."""
    reference, changes, seconds = uninterrupted
    expected, draw = everything(reference), random.Random(0)
    kills = number = 0
    while kills < 10:
        out = tmp_path / f"run-{number}"
        process, began = start(out, changes)
        began.recv()
        time.sleep(draw.uniform(0, 0.6 * seconds))
        process.kill()
        process.join()
        kills += process.exitcode == -9
        number += process.exitcode == 0
        assert_intact(out)
    for done in range(number + 1):
        assert finish(tmp_path / f"run-{done}", changes) == 0
        assert everything(tmp_path / f"run-{done}") == expected


@pytest.mark.parametrize("uninterrupted", ["FedAdam"], indirect=True)
def test_a_run_killed_before_any_write_gives_the_same_results(uninterrupted: Any, tmp_path: Path) -> None:
    """The process exits before a given flush or renaming: each of the first round's, then some of later rounds."""
    reference, changes, _ = uninterrupted
    expected = everything(reference)
    first = 1
    for at in [*range(1, 22), *range(25, 120, 15)]:
        out = tmp_path / f"at-{at}"
        assert finish(out, changes, crash_at=at) == 9, at
        assert_intact(out)
        first = at
        assert finish(out, changes) == 0
        assert everything(out) == expected, at
    assert first > 100


@pytest.mark.parametrize("fate", ["shared", "local"])
def test_batch_norm_statistics_and_dropout_are_restored(fate: str, tmp_path: Path) -> None:
    """Batch-norm statistics, kept by the server or by the clients, and dropout are restored; only two clients are recorded."""
    changes = {**WITH_CHANCE, "training": {**WITH_CHANCE["training"], "buffers": fate}, "record": {"clients": 2}}
    for name in ("one", "two"):
        assert finish(tmp_path / name, changes) == 0
    expected = everything(tmp_path / "one")
    assert everything(tmp_path / "two") == expected
    for at in (30, 55):
        assert finish(tmp_path / f"at-{at}", changes, crash_at=at) == 9
        assert finish(tmp_path / f"at-{at}", changes) == 0
        assert everything(tmp_path / f"at-{at}") == expected


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_noise_and_clipping_norm_of_the_server_are_restored(kind: str, tmp_path: Path) -> None:
    central = {"kind": kind, "noise_multiplier": 0.1, "clipping_norm": 0.2}
    changes = {"strategy": {"name": "FedAvg", "central": central}, "clients": {"count": 4, "fraction": 0.5}}
    assert finish(tmp_path / "whole", changes) == 0
    expected = everything(tmp_path / "whole")
    assert (expected["state/rest"][2]["inner.clipping_norm"]["value"] != 0.2) == (kind == "adaptive")
    for at in (25, 40, 55):
        assert finish(tmp_path / f"at-{at}", changes, crash_at=at) == 9
        assert finish(tmp_path / f"at-{at}", changes) == 0
        assert everything(tmp_path / f"at-{at}") == expected, at


def test_a_client_that_failed_keeps_its_name(tmp_path: Path) -> None:
    assert finish(tmp_path / "run", STRATEGIES["FedAvg"]) == 0
    rows = Recording(tmp_path / "run" / "recording").read_rows()
    failed = [row for row in rows if row.status == "failed"]
    assert failed
    assert {row.client for row in failed} <= {row.client for row in rows if row.status == "complete"}


def test_a_run_killed_repeatedly_in_one_round_gives_the_same_results(tmp_path: Path) -> None:
    changes = STRATEGIES["FedAvg"]
    assert finish(tmp_path / "reference", changes) == 0
    for _ in range(4):
        assert finish(tmp_path / "run", changes, crash_at=25) == 9
    assert finish(tmp_path / "run", changes) == 0
    assert everything(tmp_path / "run") == everything(tmp_path / "reference")
    attempts = {row.attempt for row in Recording(tmp_path / "run" / "recording").read_rows()}
    assert max(attempts) > 1


def test_truth_of_a_discarded_attempt_is_kept_but_matches_no_recorded_row(tmp_path: Path) -> None:
    changes = STRATEGIES["FedAvg"]
    finish(tmp_path / "run", changes, crash_at=40)
    finish(tmp_path / "run", changes)
    recording = Recording(tmp_path / "run" / "recording")
    written = {
        (json.loads(line)["round"], json.loads(line)["attempt"], path.stem)
        for path in (tmp_path / "run" / "truth").glob("*.jsonl")
        for line in path.read_text().splitlines()
    }
    joined = {(row.round, row.attempt, row.client) for row in recording.read_rows() if row.status == "complete"}
    assert joined < written


def test_resuming_a_finished_run_changes_no_file(tmp_path: Path) -> None:
    finish(tmp_path / "run", STRATEGIES["FedAvg"])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert finish(tmp_path / "run", STRATEGIES["FedAvg"]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_toy_defense_has_a_state(tmp_path: Path) -> None:
    """Otherwise the tests above would not test the state of a defense."""
    finish(tmp_path / "run", {"defense": "total()"})
    finish(tmp_path / "plain", {"defense": ""})
    sent, plain = (Recording(tmp_path / name / "recording") for name in ("run", "plain"))
    second = next(iter(sent.read_observations(rounds={2})))
    alone = next(iter(plain.read_observations(rounds={2}, clients={second.client})))
    assert not torch.allclose(next(iter(second.update.values())), next(iter(alone.update.values())))
