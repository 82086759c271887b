"""Tests of recorded masked vectors: they are read as written, and invalid rows and files are reported as damage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from changed_recordings import change_index
from tiny_experiments import Federate

from fedsim.engine.run import FederationRun
from fedsim.recording import DamagedFile, Recorder, Recording, Reply
from fedsim.recording.files import write_tensors
from fedsim.recording.masked_vectors import MaskedMessage, check_fit
from fedsim.recording.writer import is_plain

WEIGHTS = {"w": torch.zeros(2, 3), "b": torch.zeros(())}


def make_message(**changes: Any) -> MaskedMessage:
    words = torch.arange(3 + 7, dtype=torch.int64).to(torch.uint32)
    settings: dict[str, Any] = {"words": words, "mask_key": b"m" * 32, "share_key": b"s" * 32, "sealed": (160, 161)}
    return MaskedMessage(**{**settings, "up": {"setup": 3, "collect": 9}, "down": {"setup": 4}, **changes})


def read(tensors: dict[str, torch.Tensor]) -> MaskedMessage:
    check_fit(tensors, WEIGHTS)
    return MaskedMessage.from_tensors(tensors)


@pytest.mark.parametrize("changes", [{}, {"words": None, "up": {}, "sealed": ()}])
def test_a_masked_vector_is_read_as_it_was_written(changes: dict[str, Any]) -> None:
    masked = make_message(**changes)
    tensors = masked.to_tensors()
    found = read(tensors)
    assert {**vars(found), "words": None} == {**vars(masked), "words": None}
    assert (found.words is None) == (masked.words is None)
    assert found.words is None or torch.equal(found.words, masked.words)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("words", torch.zeros(9).to(torch.uint32)),
        ("words", torch.zeros(10, dtype=torch.int32)),
        ("mask_key", torch.zeros(31, dtype=torch.uint8)),
        ("up", torch.zeros(5, dtype=torch.int64)),
        ("sealed", torch.zeros(2, 2, dtype=torch.int64)),
        ("more", torch.zeros(1)),
        ("share_key", None),
        ("up", torch.tensor([1, -1, 0, 0])),
    ],
)
def test_tensors_that_are_no_masked_vector_are_refused(name: str, tensor: torch.Tensor | None) -> None:
    tensors = make_message().to_tensors()
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(ValueError, match=r"must have type torch|has the tensors|must be a vector of int64|holds the size -1 "):
        read(tensors)


@pytest.fixture
def run(federate: Federate) -> FederationRun:
    return federate(rounds=1)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE observations SET status = 'masked' WHERE client = 'sum'",
        "UPDATE observations SET status = 'failed' WHERE client = 'sum'",
        "UPDATE observations SET codec = 'masked' WHERE client = 'sum'",
        "UPDATE observations SET status = 'complete' WHERE status = 'masked'",
    ],
)
def test_rows_that_no_recorder_writes_are_damage(statement: str, run: FederationRun) -> None:
    change_index(run.out / "recording", statement)
    with pytest.raises(DamagedFile, match=r"is not a valid value of (status|codec)"):
        list(Recording(run.out / "recording").read_observations())


def test_a_file_that_is_no_masked_vector_is_damage(run: FederationRun) -> None:
    recording = Recording(run.out / "recording")
    row = next(row for row in recording.read_rows() if row.status == "masked")
    assert row.file is not None
    digest = write_tensors(run.out / "recording" / row.file, {"words": torch.zeros(3)})
    change_index(run.out / "recording", "UPDATE observations SET sha256 = ? WHERE client = ?", digest, row.client)
    row = next(row for row in recording.read_rows() if row.status == "masked")
    with pytest.raises(DamagedFile, match="but a file with a masked vector has"):
        recording.read_masked(row)


def test_no_client_can_be_named_sum(run: FederationRun, tmp_path: Path) -> None:
    assert not is_plain("sum")
    recorder = Recorder(tmp_path / "recording", Recording(run.out / "recording").manifest)
    with pytest.raises(ValueError, match="not the names 'global' and 'sum'"):
        recorder.record_reply(1, Reply(client="sum/", node="1"))
