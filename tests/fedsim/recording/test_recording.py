"""Tests that a recording is read as it was written, that damaged files are named, and that clients cannot choose paths."""

import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from awkward_tensors import are_identical
from changed_recordings import change_index
from torch import Tensor

from fedsim.recording import DamagedFile, Manifest, Payload, Recorder, Recording, Reply, files
from fedsim.recording.codec import encode
from fedsim.recording.observation import convert_to_float32
from fedsim.recording.reader import ReplyCounts

Tensors = dict[str, Tensor]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_observation_is_read_as_it_was_written_in_float32_and_its_payload_bit_for_bit(
    tmp_path: Path, manifest: Manifest, awkward: Tensors
) -> None:
    weights = {name: t.flip(0) if t.dim() else t for name, t in awkward.items()}
    buffers = {"mean": torch.tensor([1.5, -2.0]), "seen": torch.tensor(3)}
    after = {"mean": torch.tensor([1.25, -2.5]), "seen": torch.tensor(4)}
    recorder = Recorder(tmp_path / "r", manifest)
    recorder.record_sent(4, weights, buffers)
    reply = Reply(
        client="c-1_X",
        node=str(2**64 - 1),
        payload=encode(awkward),
        buffers=after,
        num_examples=9,
        bytes=123,
        metrics={"l": 0.1, "bad": float("inf")},
    )
    recorder.record_reply(4, reply)
    recorder.commit(4, ["other", "c-1_X"], attempt=2)
    (row,) = Recording(tmp_path / "r").read_rows()
    assert (row.round, row.client, row.node, row.attempt, row.status) == (4, "c-1_X", str(2**64 - 1), 2, "complete")
    assert (row.bytes, row.metrics, row.reported, row.codec) == (123, {"l": 0.1, "bad": float("inf")}, 9, "dense")
    (seen,) = Recording(tmp_path / "r").read_observations()
    assert are_identical(dict(seen.payload.tensors), awkward)
    assert are_identical(dict(seen.update), convert_to_float32(awkward))
    assert are_identical(dict(seen.weights), convert_to_float32(weights))
    assert are_identical(dict(seen.buffers), buffers)
    assert are_identical(dict(seen.buffers_after), after)
    assert (seen.round, seen.client, seen.cohort, seen.num_examples) == (4, "c-1_X", ("other", "c-1_X"), 6)
    assert (seen.model, seen.data, seen.training) == (manifest.model, manifest.data, manifest.training)
    assert (seen.defenses, seen.metrics, seen.key) == (manifest.defense, {"l": 0.1, "bad": float("inf")}, row.key)


def test_each_observation_has_the_weights_of_its_own_round(recorded: Path) -> None:
    seen = list(Recording(recorded).read_observations())
    assert [(o.round, o.client) for o in seen] == [(1, "anna"), (1, "bert"), (2, "anna"), (2, "bert")]
    assert [o.weights["w"][0].item() for o in seen] == [1, 1, 2, 2]
    assert [round(o.update["w"][0].item(), 3) for o in seen] == [1, 1.1, 2, 2.1]


def test_updates_of_returned_weights_are_differences_in_float32(tmp_path: Path, manifest: Manifest) -> None:
    """Some strategies send float64 weights, which clients round to float32 before training."""
    recorder = Recorder(tmp_path / "r", manifest)
    start = torch.tensor([1.0 + 1e-12, 3.0], dtype=torch.float64)
    recorder.record_sent(1, {"w": start})
    recorder.record_reply(
        1, Reply(client="app", node="1", payload=Payload(tensors={"w": torch.tensor([1.5, 2.0])}, codec="weights"))
    )
    recorder.commit(1, ["app"])
    (seen,) = Recording(tmp_path / "r").read_observations()
    assert seen.update["w"].tolist() == [0.5, -1.0]
    assert seen.update["w"].dtype == seen.weights["w"].dtype == torch.float32


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_update_of_weights_in_half_precision_is_their_difference_in_float32(
    tmp_path: Path, manifest: Manifest, kind: torch.dtype
) -> None:
    """A client trains in float32 and sends its weights in half precision, so that only they are rounded."""
    recorder = Recorder(tmp_path / "r", manifest)
    recorder.record_sent(1, {"w": torch.tensor([1.0001, 3.0])})
    payload = Payload(tensors={"w": torch.tensor([1.5, 2.0]).to(kind)}, codec="weights")
    recorder.record_reply(1, Reply(client="app", node="1", payload=payload))
    recorder.commit(1, ["app"])
    (seen,) = Recording(tmp_path / "r").read_observations()
    torch.testing.assert_close(seen.update["w"], torch.tensor([0.4999, -1.0]), rtol=1e-6, atol=0)
    assert seen.update["w"].dtype == seen.weights["w"].dtype == torch.float32
    assert (seen.rounding["w"] >= torch.finfo(kind).eps / 2).all()  # of the numbers that were sent, not of float32


def test_tensors_can_be_changed_without_effect_on_others(recorded: Path) -> None:
    """The tensors of a file are parts of one buffer that do not overlap, and each read has a buffer of its own."""
    recording = Recording(recorded)
    first, again = (recording.read_observation(recording.read_rows()[0]) for _ in range(2))
    first.payload.tensors["w"].fill_(7)
    assert first.payload.tensors["b"].item() == 0
    assert again.payload.tensors["w"].tolist() == [1, 1, 1]
    assert all(t.data_ptr() % t.element_size() == 0 for t in first.payload.tensors.values())


def test_rounds_and_clients_can_be_chosen(recorded: Path) -> None:
    recording = Recording(recorded)
    assert [(r.round, r.client) for r in recording.read_rows(rounds={2, 3}, clients={"bert"})] == [(2, "bert"), (3, "bert")]
    assert [o.key for o in recording.read_observations(rounds={2, 3})] == ["00002-anna", "00002-bert"]
    assert recording.read_rows(rounds={9}) == []
    assert recording.read_rows(clients={"' OR 1"}) == []
    assert len(recording.read_rows()) == 6


def test_rounds_clients_and_replies_are_counted_without_reading_tensors(recorded: Path) -> None:
    recording = Recording(recorded)
    shutil.rmtree(recorded / "rounds")
    assert recording.list_clients() == ["anna", "bert"]
    assert recording.list_rounds() == [1, 2, 3]
    assert recording.count_replies() == [
        ReplyCounts(round=1, complete=2, failed=0, late=0, bytes=0),
        ReplyCounts(round=2, complete=2, failed=0, late=0, bytes=0),
        ReplyCounts(round=3, complete=0, failed=1, late=1, bytes=0),
    ]


def test_a_missing_reply_is_a_row_with_its_reason_and_no_observation(recorded: Path) -> None:
    recording = Recording(recorded)
    failed, late = recording.read_rows(rounds={3})
    assert (failed.status, failed.reason, failed.file) == ("failed", "out of memory", None)
    assert (late.status, late.reason, late.file) == ("late", "no answer in time", None)
    with pytest.raises(ValueError, match=r"round 3, client anna: nothing was received \(failed: out of memory\)") as refused:
        recording.read_observation(failed)
    assert not isinstance(refused.value, DamagedFile)


def test_a_fingerprint_depends_on_manifest_and_first_weights(recorded: Path, manifest: Manifest, tmp_path: Path) -> None:
    def other(name: str, weight: float, created: str = manifest.created) -> str:
        recorder = Recorder(tmp_path / name, replace(manifest, created=created))
        recorder.record_sent(1, {"w": torch.full((3,), weight), "b": torch.tensor(0.0)})
        recorder.commit(1, ())
        return Recording(tmp_path / name).compute_fingerprint()

    assert other("same", 1.0) == Recording(recorded).compute_fingerprint()  # later rounds do not count
    assert (
        len({Recording(recorded).compute_fingerprint(), other("weights", 2.0), other("time", 1.0, "2026-01-02T03:04:06Z")}) == 3
    )


def test_files_and_folders_are_closed_to_other_users(recorded: Path) -> None:
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o700
    found = list(recorded.rglob("*"))
    assert len(found) == 13  # manifest, index, rounds and three of them, three weights, four replies
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_no_file_is_a_pickle(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load"))
    assert len(list(Recording(recorded).read_observations())) == 4
    assert {path.suffix for path in recorded.rglob("*") if path.is_file()} == {".json", ".sqlite", ".safetensors"}


def test_reading_changes_nothing(recorded: Path) -> None:
    before = contents(recorded)
    list(Recording(recorded).read_observations())
    assert contents(recorded) == before


# --- damage ---


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    elif kind in ("shortened", "emptied", "lengthened"):
        path.write_bytes({"shortened": content[:-4], "emptied": b"", "lengthened": content + b"\0"}[kind])
    else:
        path.unlink()
        if kind == "a folder":
            path.mkdir()


@pytest.mark.parametrize("kind", ["flipped", "shortened", "emptied", "lengthened", "removed", "a folder"])
def test_a_damaged_file_is_named_and_the_others_stay_readable(recorded: Path, kind: str) -> None:
    path = recorded / "rounds" / "00001" / "bert.safetensors"
    damage(path, kind)
    errors: list[DamagedFile] = []
    good = [o.key for o in Recording(recorded).read_observations(on_damage=errors.append)]
    assert good == ["00001-anna", "00002-anna", "00002-bert"]
    assert [error.path for error in errors] == [path]
    assert str(errors[0]) == f"{path}: {errors[0].reason}"
    seen = Recording(recorded).read_observations()
    assert next(seen).key == "00001-anna"
    with pytest.raises(DamagedFile, match=str(path)):
        next(seen)


def test_damaged_weights_affect_only_their_own_round_and_are_read_once(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.recording import reader as module

    path = recorded / "rounds" / "00002" / "global.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    reads: list[str] = []
    read = module.read_tensors
    monkeypatch.setattr(module, "read_tensors", lambda folder, name, *rest: (reads.append(name), read(folder, name, *rest))[1])
    errors: list[DamagedFile] = []
    good = [o.key for o in Recording(recorded).read_observations(on_damage=errors.append)]
    assert good == ["00001-anna", "00001-bert"]
    assert [error.path for error in errors] == [path, path]  # once for each lost observation
    assert reads.count("rounds/00002/global.safetensors") == 1
    with pytest.raises(DamagedFile, match=str(path)):
        Recording(recorded).read_sent(2)
    assert Recording(recorded).read_sent(1).cohort == ("anna", "bert")


def test_an_error_can_be_pickled() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(DamagedFile(Path("a/b"), "is gone")))
    assert (str(error), error.path, error.reason) == ("a/b: is gone", Path("a/b"), "is gone")


@pytest.mark.parametrize("content", [None, b"", b"no database, but long enough to be looked at as one" * 100])
def test_a_damaged_index_is_named(recorded: Path, content: bytes | None) -> None:
    (recorded / "index.sqlite").unlink()
    if content is not None:
        (recorded / "index.sqlite").write_bytes(content)
    for ask in (
        Recording.read_rows,
        Recording.count_replies,
        Recording.list_clients,
        Recording.list_rounds,
        Recording.compute_fingerprint,
    ):
        with pytest.raises(DamagedFile, match=r"index\.sqlite"):
            ask(Recording(recorded))


def test_missing_weights_of_a_round_are_named(recorded: Path) -> None:
    change_index(recorded, "DELETE FROM rounds WHERE round = 1")
    with pytest.raises(DamagedFile, match="global weights of round 1"):
        list(Recording(recorded).read_observations(rounds={1}))


# --- names of clients ---


@pytest.mark.parametrize("name", ["../outside", "a/b", "/absolute", "global", "", ".", "..", "a" * 65, "a\n", "ä", "a.b", "a b"])
def test_a_name_that_could_write_elsewhere_is_refused(tmp_path: Path, manifest: Manifest, name: str) -> None:
    """Clients choose their pseudonyms, which must not decide where the server writes."""
    recorder = Recorder(tmp_path / "r", manifest)
    recorder.record_sent(1, {"w": torch.zeros(1)})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="use only letters"):
        recorder.record_reply(1, Reply(client=name, node="1", payload=encode({"w": torch.ones(1)})))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_second_reply_of_a_client_in_a_round_is_refused(recorded: Path, manifest: Manifest) -> None:
    recorder = Recorder(recorded, manifest)
    recorder.record_reply(1, Reply(client="anna", node="1", status="late"))
    with pytest.raises(sqlite3.IntegrityError):
        recorder.commit(1, ("anna",))
    assert len(Recording(recorded).read_rows(rounds={1})) == 2


def test_a_file_of_the_safetensors_package_reads_the_same(recorded: Path, awkward: Tensors) -> None:
    """Both implementations read each other's files; that of the package sorts tensors, ours keeps their order."""
    import hashlib

    from safetensors.torch import load_file, save_file

    from fedsim.recording.tensor_files import read_tensors

    theirs = {name: t.clone(memory_format=torch.contiguous_format) for name, t in awkward.items()}
    save_file(theirs, recorded / "theirs", metadata={"format": "pt"})
    digest = hashlib.sha256((recorded / "theirs").read_bytes()).hexdigest()
    assert are_identical(read_tensors(recorded, "theirs", digest), awkward)
    digest = files.write_tensors(recorded / "ours", awkward, {"facts": "{}"})
    assert are_identical(load_file(recorded / "ours"), awkward)
    assert list(read_tensors(recorded, "ours", digest)) == list(awkward)
