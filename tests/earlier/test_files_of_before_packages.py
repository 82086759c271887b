"""Tests that files written before the modules moved into packages can still be read, and unfinished work continued.

`before_packages.tar.xz` was written by the commit before "Move modules into packages" (db2aa42), on the digits, with the network
`mlp(hidden=[8])` and two clients: `plain`, `sparse` (`top_k(0.1)`, packed), `summed` (a secure sum), `cutoff` (a federation of
three rounds that was killed after the second), `served` (a service that was killed while a job waited). `expected` holds the
results of the same program without interruption.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attacker.scoring import Scorer, read_rows
from attacker.service.http.app import make_components
from attacker.service.jobs.job import JobSpec
from attacker.service.settings import ServiceSettings
from fedsim.config.experiment import read
from fedsim.engine.engines import run as run_federation
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording

ARCHIVE = Path(__file__).with_name("before_packages.tar.xz")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def before(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="tar")
    return tmp_path


@pytest.mark.parametrize("name", ["plain", "sparse", "summed"])
def test_a_recording_opens_with_the_updates_that_the_old_program_read(unpacked: Path, name: str) -> None:
    recording = Recording(unpacked / name / "recording")
    complete = [row for row in recording.read_rows() if row.status == "complete"]
    updates = {f"{row.key}/{key}": t for row in complete for key, t in recording.read_observation(row).update.items()}
    expected = load_file(unpacked / "expected" / f"{name}.safetensors")
    assert updates.keys() == expected.keys()
    assert all(torch.equal(updates[key], tensor) for key, tensor in expected.items())


def test_a_killed_federation_continues_to_the_weights_of_an_uninterrupted_one(before: Path) -> None:
    experiment = read(before / "cutoff" / "experiment.toml")
    run_federation(FederationRun(experiment=experiment, out=before / "cutoff", resume=True), engine="local")
    ours = sorted((before / "cutoff" / "recording" / "rounds" / "00003").glob("*.safetensors"))
    assert len(ours) == 3
    for path in ours:
        for name, tensor in load_file(before / "expected" / "00003" / path.name).items():
            torch.testing.assert_close(load_file(path)[name], tensor)


def test_reconstructions_are_scored_again_to_the_same_numbers(before: Path) -> None:
    run = before / "served" / "plain"
    rows = [row for row in read_rows(run / "scores.jsonl") if not row.null]
    (source,) = (run / "reconstructions").iterdir()
    Scorer(run, [run / "truth"]).score(source)
    again = [row for row in read_rows(run / "scores.jsonl") if not row.null]
    assert len(rows) == len(again) == 4
    assert [row.psnr for row in again] == pytest.approx([row.psnr for row in rows], rel=1e-4)


def test_a_job_queue_is_adopted_only_if_the_user_asks_for_it(before: Path) -> None:
    root = before / "served"
    with pytest.raises(ValueError, match="--adopt-state"):
        make_components(ServiceSettings(root=root))
    components = make_components(ServiceSettings(root=root, adopt_state=True))
    waiting, done = components.queue.list()
    assert (done.state, done.result is not None, done.attempts) == ("done", True, 1)
    assert waiting.state == "queued"
    assert waiting.spec == JobSpec(recording="plain", attack="cpl", arguments={"steps": 2}, rounds="2", priority=3)
    claim = components.queue.claim("me")
    assert claim.id == waiting.id
    components.queue.close()
    make_components(ServiceSettings(root=root)).queue.close()
