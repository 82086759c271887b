"""Tests of the state that a client keeps between rounds: a round that is repeated starts from the same state."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fedsim.client.memory import load_state, store_state
from fedsim.flower import records


def state(number: int) -> RecordDict:
    tensor = torch.full((2, 2), float(number))
    configs = ConfigRecord({"epoch": number, "secret": "x", "share": 0.1 * number})
    return RecordDict({"defense": records.to_arrays({"0/w": tensor, "1/b": tensor[0, 0]}), "cursor": configs})


def number_of(found: RecordDict) -> Any:
    return found["cursor"]["epoch"] if "cursor" in found else None


def test_a_stored_state_is_loaded_unchanged(tmp_path: Path) -> None:
    store_state(tmp_path, 4, state(4))
    found = load_state(tmp_path, before=5)
    assert dict(found["cursor"]) == {"epoch": 4, "secret": "x", "share": 0.4}
    tensors = records.to_tensors(found["defense"])
    assert list(tensors) == ["0/w", "1/b"]
    assert torch.equal(tensors["0/w"], torch.full((2, 2), 4.0))
    assert tensors["1/b"].shape == ()


def test_a_round_starts_from_the_rounds_before_it(tmp_path: Path) -> None:
    assert len(load_state(tmp_path, before=1)) == 0
    assert len(load_state(tmp_path / "nowhere", before=1)) == 0
    for number in (1, 3, 4):
        store_state(tmp_path, number, state(number))
    assert number_of(load_state(tmp_path, before=5)) == 4
    assert number_of(load_state(tmp_path, before=4)) == 3  # asked for round 4 once more


def test_a_repeated_round_replaces_its_own_state_and_not_the_one_before(tmp_path: Path) -> None:
    for number in (1, 2, 2, 2):
        store_state(tmp_path, number, state(number))
        assert number_of(load_state(tmp_path, before=2)) == 1
    assert number_of(load_state(tmp_path, before=3)) == 2


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    for number in range(1, 30):
        store_state(tmp_path, number, state(number))
    assert sorted(os.listdir(tmp_path)) == ["state-00028.safetensors", "state-00029.safetensors"]


def test_states_of_later_rounds_are_removed_when_a_round_is_repeated(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        store_state(tmp_path, number, state(number))
    store_state(tmp_path, 2, state(20))
    assert number_of(load_state(tmp_path, before=9)) == 20


def test_a_half_written_file_is_never_read(tmp_path: Path) -> None:
    store_state(tmp_path, 1, state(1))
    (tmp_path / ".state-00002.safetensors.77.partial").write_bytes(b"half")
    assert number_of(load_state(tmp_path, before=3)) == 1


@pytest.mark.parametrize("empty", [RecordDict(), RecordDict({"defense": records.to_arrays({})})])
def test_an_empty_state_is_loaded_as_empty(empty: RecordDict, tmp_path: Path) -> None:
    store_state(tmp_path, 1, empty)
    assert list(load_state(tmp_path, before=2)) == list(empty)
