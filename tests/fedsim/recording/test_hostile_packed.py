"""Tests of malicious recordings of packed updates: a payload that cannot be unpacked is reported as a damaged file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from changed_recordings import change_index, check_damage, forge
from torch import Tensor

from fedsim.recording import DamagedFile, Manifest, Recorder, Recording, Reply, files
from fedsim.recording import tensor_files as tensors_module
from fedsim.recording.codec import encode

ANNA = "rounds/00001/anna.safetensors"
N = 4096
UPDATE = {"w": torch.where(torch.arange(N) % 20 == 0, 1.0, 0.0).reshape(64, 64), "b": torch.tensor(0.5), "codes": torch.ones(9)}
BUFFERS = {"w": torch.tensor(3.0), "codes": torch.tensor([1, 2])}
"""Buffers with the names of a weight and of a part of a packed weight."""


@pytest.fixture(params=["sparse", "bits", "levels"])
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def packed(tmp_path: Path, manifest: Manifest, codec: str) -> Path:
    """A recording of one round of two clients."""
    recorder = Recorder(tmp_path / "recording", manifest)
    recorder.record_sent(1, {name: torch.zeros_like(t) for name, t in UPDATE.items()}, BUFFERS)
    for number, client in enumerate(("anna", "bert")):
        payload = encode({name: t * (1 + number) for name, t in UPDATE.items()}, codec)
        recorder.record_reply(1, Reply(client=client, node=str(number), payload=payload, buffers=BUFFERS, num_examples=7))
    recorder.commit(1, ("anna", "bert"))
    return tmp_path / "recording"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load

    return load((folder / ANNA).read_bytes())


def forged(folder: Path, tensors: dict[str, Tensor]) -> None:
    files.write_tensors(folder / "made", tensors)
    forge(folder, ANNA, (folder / "made").read_bytes())
    (folder / "made").unlink()


def test_a_packed_update_and_its_buffers_are_read_unchanged(packed: Path, codec: str) -> None:
    seen = list(Recording(packed).read_observations())
    assert [o.payload.codec for o in seen] == [codec, codec]
    for number, o in enumerate(seen):
        assert {name: t.numpy().tobytes() for name, t in o.update.items()} == {
            name: (t * (1 + number)).numpy().tobytes() for name, t in UPDATE.items()
        }
        assert {name: t.tolist() for name, t in o.buffers_after.items()} == {"w": 3.0, "codes": [1, 2]}
        assert set(o.sent) == (set(UPDATE) if codec == "sparse" else set())
    assert (packed / ANNA).stat().st_size < N


CHANGES: dict[str, dict[str, Any]] = {
    "a part is missing": {"w/codes": None, "w/high": None, "w/mask": None, "w/index": None},
    "a part too many": {"w/dense": torch.zeros(64, 64)},
    "a weight is missing": {"b/dense": None},
    "a weight too many": {"x/dense": torch.zeros(3)},
    "a name that is no part": {"w": torch.zeros(64, 64)},
    "another shape": {"codes/dense": torch.zeros(3, 3)},
    "a buffer of another shape": {"buffer:w": torch.zeros(2)},
    "a buffer of another kind": {"buffer:w": torch.tensor(3)},
    "a palette of a million": {"w/palette": torch.zeros(10**6)},
    "codes for a million": {"w/codes": torch.zeros(10**6, dtype=torch.uint8)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_payload_that_does_not_fit_is_refused_before_it_is_read(
    packed: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {**tensors_of(packed), **CHANGES[name]}
    forged(packed, {key: t for key, t in tensors.items() if t is not None})
    recording = Recording(packed)
    recording.read_sent(1)
    monkeypatch.setattr(tensors_module, "_allocate", lambda size: pytest.fail(f"takes {size} bytes"))
    with pytest.raises(DamagedFile) as error:
        recording.read_observation(recording.read_rows()[0])
    assert error.value.path == packed / ANNA
    assert len(str(error.value)) < 1000


def test_parts_of_the_right_shapes_that_cannot_be_unpacked_are_damage(packed: Path, codec: str) -> None:
    tensors = tensors_of(packed)
    if codec == "sparse":
        tensors["w/high"] = torch.zeros_like(tensors["w/high"])
        words = "'w' is packed with .* bytes in 'high', .*, but 0 positions"
    else:
        tensors["w/palette"] = torch.zeros(3)
        tensors["w/codes"] = torch.full((1024,), 255, dtype=torch.uint8)
        words = "'w' is packed with (index 3 into a table of 3|'palette' of shape)"
    forged(packed, tensors)
    check_damage(packed, ANNA, words)
    errors: list[DamagedFile] = []
    assert [o.client for o in Recording(packed).read_observations(on_damage=errors.append)] == ["bert"]
    assert [error.path for error in errors] == [packed / ANNA]


@pytest.mark.parametrize("claimed", ["dense", "weights", "sparse", "bits", "levels"])
def test_an_index_that_names_another_codec_than_the_files_is_damage(packed: Path, codec: str, claimed: str) -> None:
    change_index(packed, "UPDATE observations SET codec = ? WHERE client = 'anna'", claimed)
    if claimed == codec or {claimed, codec} == {"bits", "levels"}:
        assert len(list(Recording(packed).read_observations())) == 2
    else:
        with pytest.raises(DamagedFile) as error:
            list(Recording(packed).read_observations())
        assert error.value.path == packed / ANNA
