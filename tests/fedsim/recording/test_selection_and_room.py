"""Tests of the choice of recorded rounds and clients, of full disks, and of sets of rounds."""

import errno
import itertools
import os
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_experiments import Federate

from fedsim.engine import engines as engine
from fedsim.engine.engines import EngineError
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.disk_space import SPARE_BYTES, DiskFull, check_room, explain_full_disk
from fedsim.recording.selection import RecordSelection, Rounds, complete_names, parse_clients, parse_rounds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", None),
        ("5", 5),
        ("123456", 123456),
        ("1234567", frozenset({"1234567"})),  # a node id
        ("3f2a,77b0", frozenset({"3f2a", "77b0"})),
        ("3f2a, 77b0", frozenset({"3f2a", "77b0"})),
    ],
)
def test_clients_are_a_number_or_names(text: str, expected: Any) -> None:
    assert parse_clients(text) == expected


@pytest.mark.parametrize("text", ["0", "-4", "", "../x", "a,,b", "global", "a b"])
def test_invalid_choices_of_clients_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="clients"):
        parse_clients(text)


def test_the_first_clients_up_to_a_number_are_recorded_in_all_rounds(federate: Federate) -> None:
    run = federate(rounds=6, clients={"count": 5, "fraction": 0.6}, record={"clients": 2})
    recording = Recording(run.out / "recording")
    assert len(recording.list_clients()) == 2
    assert len({row.round for row in recording.read_rows()}) > 2
    assert all(len(o.cohort) == 3 for o in recording.read_observations())  # other participants are known by name


def test_named_clients_are_recorded(federate: Federate) -> None:
    everyone = Recording(federate("all").out / "recording").list_clients()
    run = federate("some", record={"clients": f"{everyone[0]},{everyone[2]}"})
    assert Recording(run.out / "recording").list_clients() == [everyone[0], everyone[2]]
    assert RecordSelection.parse("1-2", "3") == RecordSelection(rounds=frozenset({1, 2}), at_most=3)


def test_a_run_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SPARE_BYTES + 1_500_000))
    check_room(tmp_path / "not" / "there", 1_500_000, "it takes", "do less")
    with pytest.raises(
        DiskFull,
        match=r"it takes about 1\.6 MB, but only 21\.5 MB are free, of which 20 MB are reserved for other programs; free disk "
        "space, or do less",
    ):
        check_room(tmp_path, 1_600_000, "it takes", "do less")


def test_a_disk_that_fills_up_stops_the_run_after_complete_rounds(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """After resuming, the recording equals that of an uninterrupted run."""
    plain = Recording(federate("plain", rounds=4).out / "recording")
    real, writes = os.fsync, []

    def full(descriptor: int) -> None:
        writes.append(descriptor)
        if len(writes) > 45:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(
            EngineError, match=r"disk .*is full; complete rounds are kept: free disk space.*, and continue with --resume"
        ):
            federate("run", rounds=4)
    out = plain.folder.parent.parent / "run"
    so_far = len(list(Recording(out / "recording").read_observations()))
    assert 0 < so_far < 12
    assert so_far % 3 == 0
    assert not list(out.rglob("*.partial"))
    run = FederationRun(experiment=_experiment(out), out=out, device="cpu", resume=True)
    engine.run(run, engine="local")
    seen = {o.key: o.update["1.weight"].numpy().tobytes() for o in Recording(out / "recording").read_observations()}
    assert seen == {o.key: o.update["1.weight"].numpy().tobytes() for o in plain.read_observations()}


def _experiment(out: Path) -> Any:
    from fedsim.config.experiment import read

    return read(out / "experiment.toml")


def test_only_errors_of_a_full_disk_are_explained(tmp_path: Path) -> None:
    for error in (OSError(errno.ENOSPC, "x"), OSError(errno.EDQUOT, "x"), sqlite3.OperationalError("database or disk is full")):
        with pytest.raises(DiskFull), explain_full_disk(tmp_path):
            raise error
    with pytest.raises(PermissionError), explain_full_disk(tmp_path):
        raise PermissionError(errno.EACCES, "x")


def test_a_unique_prefix_of_a_clients_name_is_completed() -> None:
    known = {"3f2a77", "3f2b00", "77b0", "77"}
    assert complete_names(["3f2a", "77"], known) == {"3f2a77", "77"}
    assert complete_names(["nobody"], known) == {"nobody"}
    with pytest.raises(ValueError, match="'3f2' is the beginning of 2 names; give more letters: 3f2a77, 3f2b00"):
        complete_names(["3f2"], known)
    with pytest.raises(ValueError, match=r"the beginning of 20 names.* and 15 more"):
        complete_names(["a"], {f"a{i:02}" for i in range(20)})


# --- ranges ---


numbers = st.sets(st.integers(1, 60))


@settings(deadline=None, max_examples=100)
@given(numbers, numbers)
def test_rounds_behave_like_a_set(some: set[int], others: set[int]) -> None:
    rounds = Rounds.of(some)
    assert (rounds == some, list(rounds), len(rounds)) == (True, sorted(some), len(some))
    assert (rounds & others, others & rounds, rounds - others, others - rounds) == (
        *(some & others, some & others, some - others, others - some),
    )
    assert rounds.isdisjoint(others) == some.isdisjoint(others)
    assert not some or parse_rounds(str(rounds)) == rounds
    assert all(one.stop < other.start for one, other in itertools.pairwise(rounds.ranges))


def test_operations_on_ranges_of_any_length_are_fast(recorded: Path) -> None:
    rounds = parse_rounds("1-10000000000,20000000000-30000000000")
    assert (len(rounds), 10**10 in rounds, 10**10 + 1 in rounds) == (2 * 10**10 + 1, True, False)
    assert rounds & {1, 2, 10**11} == {1, 2}
    assert str(rounds - {2, 10**10}) == "1,3-9999999999,20000000000-30000000000"
    assert rounds == parse_rounds(str(rounds))
    assert Recording(recorded).read_rows(rounds=rounds) == Recording(recorded).read_rows()
    assert Recording(recorded).read_rows(rounds=parse_rounds("4000-9000000000")) == []
    with pytest.raises(ValueError, match="at most 15 digits"):
        parse_rounds("1-" + "9" * 5000)
