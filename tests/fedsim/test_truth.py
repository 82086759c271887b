"""Tests of truth, the record of the examples that clients trained on, which only they and the scorer may read."""

import stat
from pathlib import Path

import numpy as np
import pytest

from fedsim.truth import RoundUsage, TruthReader, TruthWriter, describe_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    describe_dataset(tmp_path / "truth", lambda: {"name": "digits", "content_hash": "abc"})
    return tmp_path / "truth"


def test_used_examples_are_read_in_order_of_use(folder: Path) -> None:
    writer = TruthWriter(folder, "anna")
    writer.write(1, 1, [[5, 3], [9]])
    writer.write(2, 1, [np.array([7, 1]), np.array([2])])
    TruthWriter(folder, "bert").write(1, 1, [[8]])
    reader = TruthReader(folder)
    assert reader.read_used(1, 1, "anna") == RoundUsage(((5, 3), (9,)))
    assert reader.read_used(2, 1, "anna") == RoundUsage(((7, 1), (2,)))
    assert reader.read_used(1, 1, "bert") == RoundUsage(((8,),))
    assert reader.dataset == {"name": "digits", "content_hash": "abc"}


def test_examples_count_batches_from_one_and_positions_from_zero() -> None:
    assert RoundUsage(((5, 3), (9,))).examples == ((1, 0, 5), (1, 1, 3), (2, 0, 9))


def test_attempts_at_one_round_are_kept_apart(folder: Path) -> None:
    writer = TruthWriter(folder, "anna")
    writer.write(1, 1, [[1], [2]])
    writer.write(1, 2, [[3], [4]])
    reader = TruthReader(folder)
    assert reader.read_used(1, 1, "anna").steps == ((1,), (2,))
    assert reader.read_used(1, 2, "anna").steps == ((3,), (4,))


def test_more_than_nine_steps_stay_in_order(folder: Path) -> None:
    TruthWriter(folder, "anna").write(1, 1, [[n] for n in range(25)])
    assert TruthReader(folder).read_used(1, 1, "anna").steps == tuple((n,) for n in range(25))


@pytest.mark.parametrize(("round", "attempt", "client"), [(2, 1, "anna"), (1, 2, "anna"), (1, 1, "bert"), (1, 1, "../dataset")])
def test_truth_that_was_never_written_raises_key_error(folder: Path, round: int, attempt: int, client: str) -> None:
    TruthWriter(folder, "anna").write(1, 1, [[1]])
    with pytest.raises(KeyError, match=f"no truth of client {client} in round {round}, attempt {attempt}"):
        TruthReader(folder).read_used(round, attempt, client)


def test_an_incomplete_last_line_is_ignored_and_the_next_one_is_read(folder: Path) -> None:
    writer = TruthWriter(folder, "anna")
    writer.write(1, 1, [[1]])
    with (folder / "anna.jsonl").open("a") as file:
        file.write('{"round": 1, "attempt": 1, "step": 2, "ind')
    assert TruthReader(folder).read_used(1, 1, "anna").steps == ((1,),)
    writer.write(2, 1, [[7]])
    assert TruthReader(folder).read_used(1, 1, "anna").steps == ((1,),)
    assert TruthReader(folder).read_used(2, 1, "anna").steps == ((7,),)


def test_a_folder_without_a_data_set_holds_no_truth(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no truth"):
        TruthReader(tmp_path)


def test_the_data_set_is_described_once(folder: Path) -> None:
    describe_dataset(folder, lambda: pytest.fail("described again"))
    assert TruthReader(folder).dataset["name"] == "digits"


def test_truth_is_closed_to_other_users(folder: Path) -> None:
    TruthWriter(folder, "anna").write(1, 1, [[1]])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {
        "anna.jsonl": 0o600,
        "dataset.json": 0o600,
    }
