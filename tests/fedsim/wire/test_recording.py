"""A recording gives back what was written, survives a crash, and names what is damaged."""

import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedsim.wire import DamagedFile, Manifest, Recorder, Recording, Reply
from fedsim.wire import recorder as recorders
from fedsim.wire.codec import encode

Tensors = dict[str, Tensor]


def change_index(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / "index.sqlite")) as index, index:
        assert index.execute(statement, values).rowcount > 0


def test_what_was_written_reads_back_bit_for_bit(
    tmp_path: Path, manifest: Manifest, awkward: Tensors, same_bits: Callable[[Tensors, Tensors], bool]
) -> None:
    weights = {name: t.flip(0) if t.dim() else t for name, t in awkward.items()}
    recorder = Recorder(tmp_path / "r", manifest)
    recorder.sent(4, weights)
    reply = Reply(
        client="c-1_X", node=str(2**64 - 1), attempt=2, payload=encode(awkward), num_examples=9, bytes=123, metrics={"l": 0.1}
    )
    recorder.received(4, reply, ["other", "c-1_X"])
    recorder.close()
    (row,) = Recording(tmp_path / "r").rows()
    assert (row.round, row.client, row.node, row.attempt, row.status) == (4, "c-1_X", str(2**64 - 1), 2, "complete")
    assert (row.cohort, row.bytes, row.metrics, row.num_examples) == (("other", "c-1_X"), 123, {"l": 0.1}, 9)
    (seen,) = Recording(tmp_path / "r").observations()
    assert same_bits(dict(seen.update), awkward)
    assert same_bits(dict(seen.weights), weights)
    assert (seen.round, seen.client, seen.cohort, seen.num_examples) == (4, "c-1_X", ("other", "c-1_X"), 9)
    assert (seen.model, seen.data, seen.training) == (manifest.model, manifest.data, manifest.training)
    assert (seen.defenses, seen.metrics, seen.key) == (manifest.defense, {"l": 0.1}, row.key)


def test_each_observation_has_the_weights_of_its_own_round(recorded: Path) -> None:
    seen = list(Recording(recorded).observations())
    assert [(o.round, o.client) for o in seen] == [(1, "anna"), (1, "bert"), (2, "anna"), (2, "bert")]
    assert [o.weights["w"][0].item() for o in seen] == [1, 1, 2, 2]
    assert [round(o.update["w"][0].item(), 3) for o in seen] == [1, 1.1, 2, 2.1]


def test_rounds_and_clients_are_chosen(recorded: Path) -> None:
    recording = Recording(recorded)
    assert [(r.round, r.client) for r in recording.rows(rounds={2, 3}, clients={"bert"})] == [(2, "bert"), (3, "bert")]
    assert [o.key for o in recording.observations(rounds={2, 3})] == ["00002-anna", "00002-bert"]
    assert recording.rows(rounds={9}) == []
    assert len(recording.rows()) == 6


def test_who_sent_nothing_is_a_row_with_its_reason_and_no_observation(recorded: Path) -> None:
    recording = Recording(recorded)
    failed, late = recording.rows(rounds={3})
    assert (failed.status, failed.reason, failed.file) == ("failed", "out of memory", None)
    assert (late.status, late.reason, late.file) == ("late", "no answer in time", None)
    with pytest.raises(ValueError, match=r"round 3, client anna: nothing was received \(failed: out of memory\)"):
        recording.observation(failed)


def test_a_fingerprint_tells_recordings_apart(recorded: Path, manifest: Manifest, tmp_path: Path) -> None:
    def other(name: str, weight: float, created: str = manifest.created) -> str:
        recorder = Recorder(tmp_path / name, replace(manifest, created=created))
        recorder.sent(1, {"w": torch.full((3,), weight)})
        recorder.close()
        return Recording(tmp_path / name).fingerprint()

    assert other("same", 1.0) == Recording(recorded).fingerprint()  # whatever came later
    assert len({Recording(recorded).fingerprint(), other("weights", 2.0), other("time", 1.0, "2026-01-02T03:04:06Z")}) == 3


def test_everything_belongs_to_its_owner_only(recorded: Path) -> None:
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o700
    found = list(recorded.rglob("*"))
    assert len(found) == 13  # manifest, index, rounds and three of them, three weights, four replies
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_in_it_is_a_pickle(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load"))
    assert len(list(Recording(recorded).observations())) == 4
    assert {path.suffix for path in recorded.rglob("*") if path.is_file()} == {".json", ".sqlite", ".safetensors"}


# --- crashes: the index row comes last ---


class PowerCut(Exception):
    pass


@pytest.mark.parametrize("instant", ["before the file", "file half written", "file whole, no row"])
def test_a_reply_that_was_not_written_to_its_end_is_not_there(
    recorded: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    written = recorders.write_bytes

    def dying(path: Path, content: bytes) -> None:
        if instant == "file half written":
            path.with_name(f".{path.name}.1.partial").write_bytes(content[: len(content) // 2])
        if instant == "file whole, no row":
            written(path, content)
        raise PowerCut

    recorder = Recorder(recorded, manifest)
    before = [(r.key, r.status) for r in Recording(recorded).rows()]
    recorder.sent(4, {"w": torch.zeros(3)})
    monkeypatch.setattr(recorders, "write_bytes", dying)
    reply = Reply(client="anna", node="1", payload=encode({"w": torch.ones(3)}))
    with pytest.raises(PowerCut):
        recorder.received(4, reply, ("anna",))
    assert [(r.key, r.status) for r in Recording(recorded).rows()] == before
    assert len(list(Recording(recorded).observations())) == 4
    monkeypatch.undo()
    recorder.received(4, reply, ("anna",))  # and nothing of it stands in the way of the next attempt
    recorder.close()
    assert [o.key for o in Recording(recorded).observations(rounds={4})] == ["00004-anna"]


def test_when_the_row_is_there_the_file_is_there(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched from outside at the moment of the file's writing: no row names it yet."""
    seen = []
    written = recorders.write_bytes

    def watching(path: Path, content: bytes) -> None:
        seen.append(len(Recording(tmp_path / "r").rows()))
        written(path, content)

    recorder = Recorder(tmp_path / "r", manifest)
    monkeypatch.setattr(recorders, "write_bytes", watching)
    for number in range(3):
        recorder.received(1, Reply(client=f"c{number}", node="1", payload=encode({"w": torch.ones(1)})), ())
    recorder.close()
    assert seen == [0, 1, 2]


# --- damage ---


@pytest.mark.parametrize("damage", ["flipped", "shortened", "emptied", "removed", "a folder"])
def test_a_damaged_file_is_named_and_the_others_stay_readable(recorded: Path, damage: str) -> None:
    path = recorded / "rounds" / "00001" / "bert.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage in ("shortened", "emptied"):
        path.write_bytes(content[: -4 if damage == "shortened" else 0])
    else:
        path.unlink()
        if damage == "a folder":
            path.mkdir()
    recording = Recording(recorded)
    good = []
    for row in recording.rows(rounds={1, 2}):
        if row.key == "00001-bert":
            with pytest.raises(DamagedFile, match=str(path)):
                recording.observation(row)
        else:
            good.append(recording.observation(row).key)
    assert good == ["00001-anna", "00002-anna", "00002-bert"]


def test_damaged_weights_take_only_their_own_round_along(recorded: Path) -> None:
    path = recorded / "rounds" / "00002" / "global.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    recording = Recording(recorded)
    assert len(list(recording.observations(rounds={1}))) == 2
    with pytest.raises(DamagedFile, match=str(path)):
        list(recording.observations(rounds={2}))


def test_a_file_with_the_right_checksum_that_is_no_tensor_file_is_named(recorded: Path) -> None:
    import hashlib

    path = recorded / "rounds" / "00001" / "anna.safetensors"
    path.write_bytes(b"\x80\x04junk that is no tensor file")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    change_index(recorded, "UPDATE observations SET sha256 = ? WHERE round = 1 AND client = 'anna'", digest)
    recording = Recording(recorded)
    with pytest.raises(DamagedFile, match=str(path)):
        recording.observation(recording.rows()[0])


@pytest.mark.parametrize(
    "outside", ["../secret.safetensors", "rounds/../../secret.safetensors", "{absolute}", "link.safetensors"]
)
def test_a_path_out_of_the_recording_is_refused(recorded: Path, outside: str) -> None:
    """Someone else's index must not make the attacker read any file it likes."""
    import hashlib

    secret = recorded.parent / "secret.safetensors"
    secret.write_bytes((recorded / "rounds" / "00001" / "anna.safetensors").read_bytes())
    (recorded / "link.safetensors").symlink_to(secret)
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    file = outside.format(absolute=secret)
    change_index(recorded, "UPDATE observations SET file = ?, sha256 = ? WHERE client = 'anna'", file, digest)
    recording = Recording(recorded)
    with pytest.raises(DamagedFile, match="lies outside the recording"):
        recording.observation(recording.rows()[0])
    assert [o.client for o in recording.observations(clients={"bert"})] == ["bert", "bert"]


@pytest.mark.parametrize("content", [None, b"", b"no database, but long enough to be looked at as one" * 100])
def test_a_damaged_index_is_named(recorded: Path, content: bytes | None) -> None:
    (recorded / "index.sqlite").unlink()
    if content is not None:
        (recorded / "index.sqlite").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"index\.sqlite"):
        Recording(recorded).rows()


def test_missing_weights_of_a_round_are_named(recorded: Path) -> None:
    change_index(recorded, "DELETE FROM rounds WHERE round = 1")
    with pytest.raises(DamagedFile, match="global weights of round 1"):
        list(Recording(recorded).observations(rounds={1}))


def test_reading_changes_nothing(recorded: Path) -> None:
    before = {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()}
    list(Recording(recorded).observations())
    assert {path: path.read_bytes() for path in recorded.rglob("*") if path.is_file()} == before


# --- what a client calls itself ---


@pytest.mark.parametrize("name", ["../outside", "a/b", "/absolute", "global", "", ".", "..", "a" * 65, "a\n", "ä", "a.b", "a b"])
def test_a_name_that_could_write_elsewhere_is_refused(tmp_path: Path, manifest: Manifest, name: str) -> None:
    """The pseudonym comes from the client: it must not choose the server's files."""
    recorder = Recorder(tmp_path / "r", manifest)
    recorder.sent(1, {"w": torch.zeros(1)})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="a name is letters"):
        recorder.received(1, Reply(client=name, node="1", payload=encode({"w": torch.ones(1)})), (name,))
    recorder.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_one_round_holds_one_reply_of_a_client(recorded: Path, manifest: Manifest) -> None:
    recorder = Recorder(recorded, manifest)
    with pytest.raises(sqlite3.IntegrityError):
        recorder.received(1, Reply(client="anna", node="1", status="late"), ("anna",))
    recorder.close()
    assert len(Recording(recorded).rows(rounds={1})) == 2
