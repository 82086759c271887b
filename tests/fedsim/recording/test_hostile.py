"""Tests of malicious recordings: they are refused with the file's name; no code is run, no link followed, no size trusted."""

import hashlib
import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_recordings import change_index, change_manifest, check_damage, forge

from fedsim import models
from fedsim.recording import DamagedFile, Manifest, ModelSpec, Recording, files
from fedsim.recording import safe_files as safe
from fedsim.recording import tensor_files as tensors_module
from fedsim.recording.manifest import make_name

ANNA = "rounds/00001/anna.safetensors"
WEIGHTS = "rounds/00001/global.safetensors"


def forbid_memory(monkeypatch: pytest.MonkeyPatch, most: int = 0) -> None:
    """Make the test fail if more than `most` bytes are allocated for tensors."""
    room = tensors_module._allocate
    monkeypatch.setattr(
        tensors_module, "_allocate", lambda size: room(size) if size <= most else pytest.fail(f"takes {size} bytes")
    )


# --- paths ---


@pytest.mark.parametrize(
    "file",
    [
        *("../secret.safetensors", "rounds/../../secret.safetensors", "/etc/passwd", "link.safetensors", "", "rounds", "a\0b"),
        *("rounds/00001/bert.safetensors", "rounds/00002/anna.safetensors", "rounds/1/anna.safetensors", "./" + ANNA, WEIGHTS),
    ],
)
def test_an_index_cannot_choose_what_is_read(recorded: Path, file: str) -> None:
    secret = recorded.parent / "secret.safetensors"
    secret.write_bytes((recorded / ANNA).read_bytes())
    (recorded / "link.safetensors").symlink_to(secret)
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    change_index(recorded, "UPDATE observations SET file = ?, sha256 = ? WHERE client = 'anna' AND round < 3", file, digest)
    check_damage(recorded, "index.sqlite", "row 1, 'anna': .* is not a valid value of file")
    errors: list[DamagedFile] = []
    assert [o.client for o in Recording(recorded).read_observations(on_damage=errors.append)] == ["bert", "bert"]
    assert len(errors) == 2


def test_global_weights_cannot_be_chosen_either(recorded: Path) -> None:
    change_index(recorded, "UPDATE rounds SET file = 'rounds/00002/global.safetensors' WHERE round = 1")
    check_damage(recorded, "index.sqlite", "row 1, 1: .* is not a valid value of file")


@pytest.mark.parametrize("named", ["manifest.json", "index.sqlite", ANNA, WEIGHTS, "rounds", "rounds/00001"])
def test_no_link_is_followed_inside(recorded: Path, named: str) -> None:
    path, outside = recorded / named, recorded.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(ValueError, match=r"symbolic link.* not followed") as error:
        list(Recording(recorded).read_observations())
    assert str(recorded) in str(error.value)


@pytest.mark.parametrize(
    "name", ["../secret", "rounds/../../secret", "..", "", "/etc/hostname", "rounds//00001", "./manifest.json"]
)
def test_no_path_leads_out_of_its_folder(recorded: Path, name: str) -> None:
    (recorded.parent / "secret").write_text("told")
    with pytest.raises(DamagedFile, match="not a plain path below its folder"), safe.open_file(recorded, name, limit=100):
        pass


def test_a_recording_may_be_reached_through_a_link(recorded: Path) -> None:
    (recorded.parent / "link").symlink_to(recorded)
    assert len(list(Recording(recorded.parent / "link").read_observations())) == 4


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket"])
@pytest.mark.parametrize("named", ["manifest.json", "index.sqlite", "index.sqlite-journal", ANNA, WEIGHTS])
def test_pipes_folders_and_sockets_are_refused_without_waiting(
    recorded: Path, named: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded / named
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        import socket

        monkeypatch.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    with pytest.raises(ValueError, match=str(path)):
        list(Recording(recorded).read_observations())


# --- sizes ---


@pytest.mark.parametrize("named", ["manifest.json", "index.sqlite", ANNA, WEIGHTS])
def test_a_sparse_file_of_a_terabyte_is_not_read(recorded: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_memory(monkeypatch, 16)
    os.truncate(recorded / named, 2**40)
    with pytest.raises(ValueError, match=r"1099511627776 bytes, more than the limit") as error:
        list(Recording(recorded).read_observations())
    assert str(recorded / named) in str(error.value)


def tensor_file(described: Any, data: bytes = b"", length: int | None = None) -> bytes:
    header = described if isinstance(described, bytes) else json.dumps(described).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def make_entry(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("named", [WEIGHTS, ANNA])
def test_a_sparse_file_with_a_matching_header_is_not_read(recorded: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_memory(monkeypatch, 16)
    content = tensor_file({"w": make_entry([10**9], 0, 4 * 10**9)})
    (recorded / named).write_bytes(content)
    os.truncate(recorded / named, len(content) + 4 * 10**9)
    check_damage(recorded, named, r"has holes: of its 40000000\d\d bytes, only \d+ are on disk")


HEADERS = {
    "no header": b"",
    "half a length": b"\1\0\0",
    "a header longer than the file": tensor_file(b"{}", length=100),
    "a header of an exabyte": tensor_file(b"{}", length=2**60),
    "a header of all ones": b"\xff" * 16,
    "not JSON": tensor_file(b"{]"),
    "not UTF-8": tensor_file(b'{"\xff": 1}'),
    "a list": tensor_file([]),
    "deep": tensor_file(b"[" * 200_000),
    "one name twice": tensor_file(b'{"w": %s, "w": %s}' % ((json.dumps(make_entry([1], 0, 4)).encode(),) * 2), bytes(4)),
    "metadata that are none": tensor_file({"__metadata__": []}),
    "an entry that is none": tensor_file({"w": 1}),
    "an entry without a type": tensor_file({"w": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    "an unknown type": tensor_file({"w": make_entry([1], 0, 4, "PICKLE")}, bytes(4)),
    "a type that is no text": tensor_file({"w": make_entry([1], 0, 4, ["F32"])}, bytes(4)),
    "an unnamed tensor": tensor_file({"": make_entry([1], 0, 4)}, bytes(4)),
    "a name that steers the terminal": tensor_file({"\x1b[2J": make_entry([1], 0, 4)}, bytes(4)),
    "a name that is no text": tensor_file(b'{"\\ud800": %s}' % json.dumps(make_entry([1], 0, 4)).encode(), bytes(4)),
    "a petabyte": tensor_file({"w": make_entry([2**48], 0, 2**50)}),
    "more than there is": tensor_file({"w": make_entry([100], 0, 400)}, bytes(4)),
    "less than there is": tensor_file({"w": make_entry([1], 0, 4)}, bytes(400)),
    "a negative size": tensor_file({"w": make_entry([-1], 0, -4)}),
    "two negative sizes": tensor_file({"w": make_entry([-1, -1], 0, 4)}, bytes(4)),
    "sizes that overflow": tensor_file({"w": make_entry([2**32, 2**32], 0, 0)}),
    "sizes that overflow beside a zero": tensor_file({"w": make_entry([0, 2**34, 2**34], 0, 0)}),
    "a size that is no whole number": tensor_file({"w": make_entry([1.0], 0, 4)}, bytes(4)),
    "a size that is a truth value": tensor_file({"w": make_entry([True], 0, 4)}, bytes(4)),
    "a million dimensions": tensor_file({"w": make_entry([1] * 10**6, 0, 4)}, bytes(4)),
    "a shape that is none": tensor_file({"w": make_entry(4, 0, 4)}, bytes(4)),
    "offsets that are turned": tensor_file({"w": make_entry([1], 4, 0)}, bytes(4)),
    "a third offset": tensor_file({"w": {**make_entry([1], 0, 4), "data_offsets": [0, 4, 8]}}, bytes(8)),
    "two tensors that share bytes": tensor_file({"a": make_entry([2], 0, 8), "b": make_entry([2], 4, 12)}, bytes(12)),
    "two tensors in one place": tensor_file({"a": make_entry([1], 0, 4), "b": make_entry([1], 0, 4)}, bytes(4)),
    "a gap": tensor_file({"a": make_entry([1], 0, 4), "b": make_entry([1], 8, 12)}, bytes(12)),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("named", [ANNA, WEIGHTS])
def test_a_false_header_is_refused_before_memory_is_allocated(
    recorded: Path, named: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(recorded, named, HEADERS[name])
    recording = Recording(recorded)
    if named == ANNA:
        recording.read_sent(1)
    forbid_memory(monkeypatch)
    with pytest.raises(DamagedFile, match=str(recorded / named)) as error:
        recording.read_observation(recording.read_rows()[0])
    assert len(str(error.value)) < 1000
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"w": torch.ones(3)}, "the update lacks tensor 'b'"),
        ({"w": torch.ones(3), "b": torch.tensor(0.0), "x": torch.ones(1)}, "the update has tensor 'x', which"),
        ({"w": torch.ones(4), "b": torch.tensor(0.0)}, r"'w' has shape \(4,\), but the weight that was sent has \(3,\)"),
        ({"w": torch.ones(3, 1), "b": torch.tensor(0.0)}, r"'w' has shape \(3, 1\)"),
        ({"w": torch.ones(10**6), "b": torch.tensor(0.0)}, r"'w' has shape \(1000000,\)"),
        (
            {"w": torch.ones(3), "b": torch.tensor(0.0), "buffer:m": torch.ones(9)},
            "the reply has buffer 'm', which the server did not send",
        ),
    ],
)
def test_a_reply_that_does_not_fit_the_weights_is_refused_before_it_is_read(
    recorded: Path, tensors: dict[str, torch.Tensor], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write_tensors(recorded / "made", tensors)
    forge(recorded, ANNA, (recorded / "made").read_bytes())
    recording = Recording(recorded)
    recording.read_sent(1)
    forbid_memory(monkeypatch)
    with pytest.raises(DamagedFile, match=words):
        recording.read_observation(recording.read_rows()[0])


def test_returned_weights_of_another_type_are_refused(recorded: Path) -> None:
    files.write_tensors(recorded / "made", {"w": torch.ones(3, dtype=torch.bool), "b": torch.tensor(0.0)})
    forge(recorded, ANNA, (recorded / "made").read_bytes())
    change_index(recorded, "UPDATE observations SET codec = 'weights' WHERE round < 3")
    check_damage(recorded, ANNA, r"'w' has type torch\.bool, but the weight that was sent has torch\.float32")


def test_booleans_that_are_neither_0_nor_1_are_refused(recorded: Path) -> None:
    described = {"w": make_entry([3], 0, 3, "BOOL"), "b": make_entry([], 3, 7)}
    wrong, right = (tensor_file(described, bytes([0, 1, value, 0, 0, 0, 0])) for value in (2, 1))
    (recorded / "t").write_bytes(wrong)
    with pytest.raises(DamagedFile, match="'w' holds a byte of value 2"):
        tensors_module.read_tensors(recorded, "t", hashlib.sha256(wrong).hexdigest())
    (recorded / "t").write_bytes(right)
    read = tensors_module.read_tensors(recorded, "t", hashlib.sha256(right).hexdigest())
    assert read["w"].tolist() == [False, True, True]
    assert read["b"].item() == 0  # although it begins at an odd byte


def test_nan_in_an_update_is_no_damage(recorded: Path) -> None:
    """An update with NaN is not damage: the client sent it."""
    files.write_tensors(recorded / "made", {"w": torch.tensor([float("nan"), float("inf"), 0]), "b": torch.tensor(0.0)})
    forge(recorded, ANNA, (recorded / "made").read_bytes())
    assert next(iter(Recording(recorded).read_observations())).update["w"].isnan().tolist() == [True, False, False]


# --- code and commands ---


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("named", [ANNA, WEIGHTS, "manifest.json", "index.sqlite"])
def test_a_pickle_under_another_name_is_not_opened(
    recorded: Path, named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "went off"))
    content = pickle.dumps(Bomb())
    if named.startswith("rounds"):
        forge(recorded, named, content)
    else:
        (recorded / named).write_bytes(content)
    with pytest.raises(ValueError, match=str(recorded / named)):
        list(Recording(recorded).read_observations())
    torch.save({"w": Bomb()}, tmp_path / "saved")
    if named.startswith("rounds"):
        forge(recorded, named, (tmp_path / "saved").read_bytes())
        check_damage(recorded, named)
    assert not (tmp_path / "went off").exists()


@pytest.mark.parametrize("name", ["os:system", "evil", "evil:model", "__import__('evil')", "../evil.py"])
def test_an_unknown_model_is_refused_and_nothing_imported(
    recorded: Path, manifest: Manifest, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    change_manifest(recorded, model={"name": name, "arguments": {}})
    with pytest.raises(ValueError, match=r"unknown name|not part of fedleak|is not a valid name of a model"):
        models.build(Recording(recorded).manifest.model, manifest.data)
    with pytest.raises(ValueError, match=r"unknown name|not part of fedleak"):  # also without a manifest
        models.build(ModelSpec(name=name), manifest.data)
    assert "evil" not in sys.modules


def test_an_integer_tensor_in_place_of_an_update_is_refused(recorded: Path) -> None:
    from safetensors.torch import save

    sent = dict(next(Recording(recorded).read_observations()).payload.tensors)
    forge(recorded, ANNA, save({**sent, "w": torch.ones(sent["w"].shape, dtype=torch.int32)}))
    check_damage(recorded, ANNA, r"tensor 'w' has type torch\.int32, .* send it back as torch\.float32")


@pytest.mark.parametrize("key", ["batch_size", "steps"])
def test_excessive_training_settings_are_refused(recorded: Path, key: str) -> None:
    change_manifest(recorded, training=json.loads((recorded / "manifest.json").read_text())["training"] | {key: 10**15})
    with pytest.raises(ValueError, match=f"training.{key} must be 1 to 10000000, got 1000000000000000"):
        Recording(recorded)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "x$(touch y)"),
        ("name", 'a"b'),
        ("name", ""),
        ("name", "a" * 201),
        ("created", "now; id"),
        ("software", {"torch": "$(id)"}),
        ("software", {"a b": "1"}),
    ],
)
def test_texts_with_shell_syntax_are_refused(recorded: Path, key: str, value: Any) -> None:
    change_manifest(recorded, **{key: value})
    with pytest.raises(ValueError, match=r"manifest\.json: .* is (no|neither)"):
        Recording(recorded)


def test_a_name_made_from_any_folder_can_be_read_again(manifest: Manifest, tmp_path: Path) -> None:
    for text in ("bob's run", "a/b", "", "$(id)", "größe 3", "\n"):
        replace(manifest, name=make_name(text)).write(tmp_path / "manifest.json")
        assert Manifest.read(tmp_path / "manifest.json").name
