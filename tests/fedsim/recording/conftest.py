"""Fixture: a recording."""

import shutil
from pathlib import Path

import pytest
import torch

from fedsim.recording import Manifest, Recorder, Reply
from fedsim.recording.codec import encode


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the recording that `recorded` copies; copying is faster, since writing flushes the disk a dozen times."""
    return tmp_path_factory.mktemp("original") / "recording"


@pytest.fixture
def recorded(tmp_path: Path, manifest: Manifest, original: Path) -> Path:
    """A recording of two rounds of two clients, and of a third round with a failed and a late client."""
    if not original.exists():
        write(original, manifest)
    shutil.copytree(original, tmp_path / "recording")
    return tmp_path / "recording"


def write(folder: Path, manifest: Manifest) -> None:
    recorder = Recorder(folder, manifest)
    cohort = ("anna", "bert")
    for round in (1, 2):
        recorder.record_sent(round, {"w": torch.full((3,), float(round)), "b": torch.tensor(0.0)})
        for number, client in enumerate(cohort):
            update = {"w": torch.full((3,), round + number / 10), "b": torch.tensor(float(number))}
            recorder.record_reply(round, Reply(client=client, node=str(2**63 + number), payload=encode(update), num_examples=7))
        recorder.commit(round, cohort)
    recorder.record_sent(3, {"w": torch.zeros(3)})
    recorder.record_reply(3, Reply(client="anna", node="1", status="failed", reason="out of memory"))
    recorder.record_reply(3, Reply(client="bert", node="2", status="late", reason="no answer in time"))
    recorder.commit(3, cohort)
