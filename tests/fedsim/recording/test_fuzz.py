"""Tests with random damage: a recording gives the tensors that were written or reports damage, but never other tensors."""

import itertools
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from awkward_tensors import are_identical
from damage import CUT_OFF, harm
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsim.recording import DamagedFile, Recording

FUZZ = settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100
)
FILES = ("manifest.json", "index.sqlite", "rounds/00001/global.safetensors", "rounds/00001/anna.safetensors")
Copy = Callable[[], Path]
Check = Callable[[Path], None]


@pytest.fixture
def copy(recorded: Path) -> Copy:
    """A function that makes a new copy of the recording and removes the copy before."""
    numbers = itertools.count()

    def fresh() -> Path:
        number = next(numbers)
        shutil.rmtree(recorded.parent / f"copy{number - 1}", ignore_errors=True)
        return Path(shutil.copytree(recorded, recorded.parent / f"copy{number}"))

    return fresh


def read_tensors(folder: Path, errors: list[DamagedFile]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return payload and weights of each observation that can be read, and collect errors, also of all other queries."""
    try:
        recording = Recording(folder)
    except ValueError as error:
        errors.append(DamagedFile(folder / "manifest.json", str(error)))
        return {}
    for ask in (recording.count_replies, recording.list_clients, recording.list_rounds, recording.compute_fingerprint):
        try:
            ask()
        except DamagedFile as error:
            errors.append(error)
    try:
        read = list(recording.read_observations(on_damage=errors.append))
    except DamagedFile as error:
        errors.append(error)
        return {}
    assert all(str(folder) in str(error) and len(str(error)) < 1000 for error in errors)
    return {o.key: (dict(o.payload.tensors), dict(o.weights)) for o in read}


@pytest.fixture
def check(recorded: Path) -> Callable[[Path], None]:
    """A function that checks that all tensors that can be read from a damaged copy are those that were written."""
    written = read_tensors(recorded, [])
    assert len(written) == 4

    def compare(folder: Path) -> None:
        for key, (payload, weights) in read_tensors(folder, []).items():
            assert are_identical(payload, written[key][0])
            assert are_identical(weights, written[key][1])

    return compare


@FUZZ
@given(named=st.sampled_from(FILES), harmed=harm())
def test_damaged_files_never_change_a_tensor(copy: Copy, check: Check, named: str, harmed: Callable[[bytes], bytes]) -> None:
    folder = copy()
    path = folder / named
    path.write_bytes(harmed(path.read_bytes()))
    check(folder)


@FUZZ
@given(harmed=harm(), at=st.floats(0, 1))
def test_a_damaged_header_never_changes_a_shape(copy: Copy, check: Check, harmed: Callable[[bytes], bytes], at: float) -> None:
    """The header of a tensor file is damaged and the checksum adjusted, so that only checks of the header can find it."""
    import hashlib

    folder = copy()
    path = folder / "rounds/00001/anna.safetensors"
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    path.write_bytes(harmed(before[: 8 + length]) + before[8 + length :])
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with closing(sqlite3.connect(folder / "index.sqlite")) as index, index:
        index.execute("PRAGMA synchronous = OFF")
        index.execute("UPDATE observations SET sha256 = ? WHERE file = 'rounds/00001/anna.safetensors'", (digest,))
    errors: list[DamagedFile] = []
    read = read_tensors(folder, errors)
    assert ("00001-anna" in read) is not errors
    shapes = {
        name: tuple(t.shape) for name, t in read.get("00001-anna", ({"w": Tensor([0] * 3), "b": Tensor([0])[0]}, {}))[0].items()
    }
    assert shapes == {"w": (3,), "b": ()}


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from(["anna", "bert", "global", "../anna", "complete", "late", "weights", "[]", "{}", '["anna"]', "[" * 10_000]),
    st.sampled_from(["rounds/00002/anna.safetensors", "/dev/zero", "0" * 64, '{"loss": NaN}', '{"loss": 1e999}', "null"]),
)
COLUMNS = {
    "observations": [
        *("round", "client", "node", "attempt", "status", "reason", "num_examples"),
        *("file", "sha256", "codec", "bytes", "metrics", "received_at"),
    ],
    "rounds": ["round", "attempt", "file", "sha256", "cohort", "sent_at"],
}


@FUZZ
@given(
    where=st.sampled_from([(table, column) for table, columns in COLUMNS.items() for column in columns]),
    value=VALUES,
    number=st.integers(1, 3),
)
def test_changed_values_in_the_index_never_change_a_tensor(
    copy: Copy, check: Check, where: tuple[str, str], value: Any, number: int
) -> None:
    folder = copy()
    table, column = where
    with closing(sqlite3.connect(folder / "index.sqlite")) as index:
        index.execute("PRAGMA synchronous = OFF")
        index.execute("PRAGMA ignore_check_constraints = ON")
        try:
            index.execute(f"UPDATE OR REPLACE {table} SET {column} = ? WHERE round = ?", (value, number))
            index.commit()
        except (sqlite3.Error, UnicodeEncodeError):
            assume(False)
    check(folder)


@settings(FUZZ, max_examples=30)
@given(harmed=harm(), named=st.sampled_from(["index.sqlite", "index.sqlite-journal"]))
def test_a_damaged_index_with_a_journal_never_changes_a_tensor(
    recorded: Path, copy: Copy, check: Check, harmed: Callable[[bytes], bytes], named: str
) -> None:
    if not (recorded / "index.sqlite-journal").exists():
        subprocess.run([sys.executable, "-c", CUT_OFF, recorded / "index.sqlite"], check=False)
    folder = copy()
    path = folder / named
    path.write_bytes(harmed(path.read_bytes()))
    before = sorted(path.name for path in folder.iterdir())
    check(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
