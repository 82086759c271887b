"""Tests that encoding, messages and files keep every bit of an update, and that files are written completely or not at all."""

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from awkward_tensors import are_identical
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from fedsim.commands.maintenance import _remove
from fedsim.flower import records
from fedsim.recording import DamagedFile, Payload, files
from fedsim.recording.codec import decode, encode, find_sent
from fedsim.recording.safe_files import read_json

Tensors = dict[str, Tensor]


def test_whole_weights_are_decoded_against_the_ones_that_were_sent() -> None:
    """The update is the difference from the weights that the server sent, computed in float32."""
    start = {"w": torch.tensor([1.0, 2.0, -4.0]), "n": torch.tensor([5])}
    sent_back = {"w": torch.tensor([1.0 + 2**-23, 1.5, -4.0]), "n": torch.tensor([7])}
    payload = Payload(tensors=sent_back, codec="weights")
    update = decode(payload, start)
    assert update["w"].tolist() == [2**-23, -0.5, 0.0]
    assert update["n"].tolist() == [2]
    assert {name: t.dtype for name, t in update.items()} == {"w": torch.float32, "n": torch.int64}
    assert find_sent(payload, start) == {}
    with pytest.raises(ValueError, match="use codec 'dense'"):
        encode(update, "weights")


@pytest.mark.parametrize("use", [lambda: encode({}, "zip"), lambda: decode(Payload(tensors={}, codec="zip"), {})])
def test_an_unknown_codec_is_named(use: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"unknown codec 'zip'\. Known: bits, dense"):
        use()


def test_flower_records_keep_every_bit(awkward: Tensors) -> None:
    assert are_identical(records.to_tensors(records.to_arrays(awkward)), awkward)
    trained = {"w": torch.ones(2, requires_grad=True)}
    assert records.to_tensors(records.to_arrays(trained))["w"].tolist() == [1, 1]


def test_a_payload_can_be_put_into_a_reply_and_taken_out(awkward: Tensors) -> None:
    from flwr.app import MetricRecord, RecordDict

    content = RecordDict({records.METRICS_KEY: MetricRecord({"num-examples": 3, "list": [1, 2], "loss": 0.5})})
    records.put_payload(content, encode(awkward))
    assert set(content) == {"metrics", "payload", "codec"}
    assert records.count_bytes(content) > sum(t.numel() * t.element_size() for t in awkward.values())
    assert are_identical(decode(records.take_payload(content), {}), awkward)
    assert set(content) == {"metrics"}
    assert records.read_metrics(content) == {"num-examples": 3, "loss": 0.5}


def test_tensor_files_keep_every_bit_and_are_no_pickles(tmp_path: Path, awkward: Tensors) -> None:
    digest = files.write_tensors(tmp_path / "t", awkward, {"facts": "é"})
    content = (tmp_path / "t").read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()
    assert are_identical(load(content), awkward)
    with safe_open(tmp_path / "t", "pt") as file:
        assert file.metadata() == {"facts": "é"}
    header = int.from_bytes(content[:8], "little")
    assert set(json.loads(content[8 : 8 + header])) - {"__metadata__"} == set(awkward)
    assert not content.startswith((b"\x80", b"PK"))


def written(folder: Path, tensors: Mapping[str, Tensor]) -> Tensors:
    files.write_tensors(folder / "t", tensors)
    return load((folder / "t").read_bytes())


def test_views_of_one_tensor_are_written_separately(tmp_path: Path) -> None:
    flat = torch.arange(6.0, requires_grad=True)
    parts = {"a": flat[:4], "b": flat[2:], "every other": flat[::2], "spread": flat[:1].expand(3)}
    assert are_identical(written(tmp_path, parts), {name: t.detach() for name, t in parts.items()})
    assert written(tmp_path, {}) == {}


def test_a_type_that_the_format_does_not_know_is_refused_and_nothing_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor 'c' has type torch\.complex64"):
        files.write_tensors(tmp_path / "t", {"w": torch.ones(1), "c": torch.ones(1, dtype=torch.complex64)})
    assert list(tmp_path.iterdir()) == []


# --- files ---


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_closed_to_other_users_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = files.make_private(tmp_path / "a" / "b")
        files.write_bytes(folder / "bytes", b"x")
        files.write_json(folder / "json", {})
        files.append_json_lines(folder / "lines", {})
        files.append_json_lines(folder / "lines", {})
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert [mode(path) for path in sorted(folder.iterdir())] == [0o600] * 3


def test_an_existing_folder_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    assert files.make_private(tmp_path / "shared") == tmp_path / "shared"
    assert mode(tmp_path / "shared") == 0o750


def test_a_path_without_a_name_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^\. is a folder"):
        files.write_bytes(Path(), b"page")


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_bytes(path, b"old")
    with pytest.raises(RuntimeError, match="power"), files.open_replacement(path) as file:  # noqa: PT012 - the state within counts
        file.write(b"half of the n")
        assert path.read_bytes() == b"old"
        raise RuntimeError("power cut")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_a_pipe_a_folder_or_a_link_is_not_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """As for a report written to /dev/null by an administrator, who would replace the device by a file."""
    make(tmp_path / "special")
    before = os.lstat(tmp_path / "special")
    with pytest.raises(ValueError, match=r"special is a folder, a link or a device, .*; name another file"):
        files.write_bytes(tmp_path / "special", b"page")
    assert os.lstat(tmp_path / "special") == before
    assert [path.name for path in tmp_path.iterdir()] == ["special"]


def test_many_lines_are_added_at_once_and_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    files.append_json_lines(path, {"n": 1}, {"n": 2})
    files.append_json_lines(path)
    assert [row["n"] for row in files.read_json_lines(path)] == [1, 2]
    files.replace_json_lines(path, {"n": 3})
    assert path.read_text() == '{"n": 3}\n'


def test_nan_is_not_written_as_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.write_json(tmp_path / "x.json", {"loss": math.nan})
    assert list(tmp_path.iterdir()) == []


def test_lines_are_read_in_order_and_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert files.read_json_lines(path) == []
    for number in range(3):
        files.append_json_lines(path, {"n": number})
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert files.read_json_lines(path) == [{"n": n} for n in range(whole[:length].count(b"\n"))]


@pytest.mark.parametrize("rest", [b"", b'{"n": 1}\n'])
def test_a_line_after_an_incomplete_one_is_appended_separately(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(rest + b'{"n": 2, "ind')
    files.append_json_lines(path, {"n": 3})
    files.append_json_lines(path, {"n": 4})
    assert [row["n"] for row in files.read_json_lines(path)] == [1, 3, 4][-2 - bool(rest) :]


def test_an_error_of_the_system_names_the_file_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for write in (files.write_json, files.append_json_lines):
        with pytest.raises(NotADirectoryError) as error:
            write(tmp_path / "file" / "x", {})
        assert str(tmp_path / "file") in str(error.value)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    for write in (files.write_json, files.append_json_lines):
        with pytest.raises(OSError, match="No space left") as full:
            write(tmp_path / "x", {})
        assert full.value.filename == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda run: files.make_private(run / "a" / "b", below=run), "a"),
        (lambda run: files.write_json(run / "inner" / "x.json", 1, below=run), "inner/x.json"),
        (lambda run: files.append_json_lines(run / "inner" / "x.jsonl", 1, below=run), "inner/x.jsonl"),
        (lambda run: files.remove(run / "inner" / "there", below=run), "inner/there"),
        (lambda run: files.hold_lock(run / "inner" / "lock", below=run).__enter__(), "inner/lock"),
        (lambda run: _remove(run / "inner"), "inner"),
    ],
)
def test_errors_of_functions_that_use_descriptors_name_the_whole_path(
    call: Callable[[Path], object], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System calls fail as on a read-only file system."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "there").touch()
    opened = os.open

    def refused(name: str, *given: object, **named: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), name)

    def open_to_read(name: str, flags: int, *given: int, **named: int) -> int:
        return refused(name) if flags & (os.O_CREAT | os.O_RDWR) else opened(name, flags, *given, **named)

    monkeypatch.setattr(os, "open", open_to_read)
    monkeypatch.setattr(os, "mkdir", refused)
    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(OSError, match="Read-only") as error:
        call(tmp_path)
    assert error.value.filename == str(tmp_path / named)


def test_json_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(DamagedFile, match=r"x\.jsonl: row 1 cannot be read: its JSON is nested too deeply"):
        files.read_json_lines(tmp_path / "x.jsonl")
    with pytest.raises(DamagedFile, match=r"x\.jsonl: its JSON is nested too deeply"):
        read_json(tmp_path / "x.jsonl")
