"""Tests that hostile data sets and state dicts, such as those with false sizes, are refused fast and with little memory."""

import io
import os
import signal
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedsim import data as datasets
from fedsim.commands.import_updates import _read_state_dict
from fedsim.recording.array_archives import read_arrays

SECONDS = 10
IMAGES = np.zeros((10, 2, 2), np.uint8)


@pytest.fixture(autouse=True, scope="module")
def _packed_bomb() -> None:
    """Pack the bomb before the limits of each test begin, since that takes seconds."""
    pack_bomb()


@pytest.fixture(autouse=True)
def _limited_time_and_memory() -> Iterator[None]:
    def late(*_: object) -> None:
        pytest.fail(f"took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    tracemalloc.start()
    yield
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    assert most < 1.5e8


def npy(array: np.ndarray[Any, Any], shape: tuple[int, ...] | None = None) -> bytes:
    """Return the bytes of a .npy file, with another shape in its header if one is given."""
    file = io.BytesIO()
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, {**header, "shape": shape or array.shape})
    return file.getvalue() + array.tobytes()


def archive(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(name, content)
    return path


def save_archive(path: Path, images: Any, labels: Any) -> Path:
    np.savez(path, images=images, labels=labels)
    return path


def write_claim(path: Path, shape: tuple[int, ...]) -> Path:
    return archive(path, {"images.npy": npy(IMAGES, shape), "labels.npy": npy(np.arange(10))})


@cache
def pack_bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archived:
        archived.writestr("labels.npy", npy(np.arange(10)))
        with archived.open("images.npy", "w") as images:
            images.write(npy(np.zeros(0, np.uint8), (3 * 10**8,)))
            for _ in range(300):
                images.write(bytes(10**6))
    return file.getvalue()


def bomb(path: Path) -> Path:
    path.write_bytes(pack_bomb())
    return path


def lying_directory(path: Path) -> Path:
    """Write an archive whose directory claims other sizes than its entries have."""
    archive(path, {"images.npy": npy(IMAGES), "labels.npy": npy(np.arange(10))})
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 2**31)
    path.write_bytes(content)
    return path


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


ARCHIVES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "labels of ten thousand million": (
        lambda path: save_archive(path, IMAGES, np.array([10**10] + [0] * 9)),
        "label 10000000000",
    ),
    "labels of 2^63": (
        lambda path: save_archive(path, IMAGES, np.array([2**63] + [0] * 9, np.uint64)),
        "label 9223372036854775808",
    ),
    "seven terabytes": (lambda path: write_claim(path, (7 * 2**40,)), "takes 7696581394432 bytes, but its entry .* has 40"),
    "a negative length": (lambda path: write_claim(path, (-5, -4, 2)), "but its entry in the archive has"),
    "more dimensions than lengths": (lambda path: write_claim(path, (1,) * 40 + (40,)), "."),
    "a bomb": (bomb, "claims 300000128 bytes, packed into"),
    "a directory that lies": (lying_directory, "."),
    "complex images": (lambda path: save_archive(path, IMAGES * 1j, np.arange(10)), "has type complex128; give"),
    "objects": (lambda path: save_archive(path, np.array([{}] * 10), np.arange(10)), "has type object; give"),
    "what is no array": (lambda path: archive(path, {"images.npy": npy(IMAGES), "x": b""}), "holds 'x', which is not an array"),
    "a pipe": (pipe, "is not a regular file; copy its content into one"),
    "no archive": (lambda path: (path.write_bytes(b"junk"), path)[1], "not a NumPy archive"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_refused(name: str, tmp_path: Path) -> None:
    make, words = ARCHIVES[name]
    path = make(tmp_path / "data.npz")
    with pytest.raises(ValueError, match=words) as error:
        datasets.load("npz", train=str(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["seven terabytes", "a bomb", "a directory that lies", "objects", "a pipe", "no archive"])
def test_a_hostile_state_dict_is_refused(name: str, tmp_path: Path) -> None:
    path = ARCHIVES[name][0](tmp_path / "before.npz")
    with pytest.raises(ValueError, match=str(path)):
        _read_state_dict(path, 2**40)


@pytest.mark.parametrize("suffix", [".npz", ".pt", ".safetensors"])
def test_a_pipe_is_refused_without_waiting_for_it(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a regular file"):
        _read_state_dict(pipe(tmp_path / f"before{suffix}"), 2**40)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        _read_state_dict(tmp_path / f"absent{suffix}", 2**40)


def test_a_bomb_in_the_format_of_pytorch_is_not_unpacked(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", {"x/data.pkl": b"\0" * 10**8}, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"x\.pt.*claims 100000000 bytes"):
        _read_state_dict(path, 2**40)


def test_a_state_dict_far_larger_than_the_model_is_not_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", w=np.zeros(100_000, np.float32))
    torch.save({"w": torch.zeros(100_000)}, tmp_path / "x.pt")
    for name in ("x.npz", "x.pt"):
        with pytest.raises(ValueError, match=rf"x{name[1:]}: its arrays claim 40\d{{4}} bytes, more than the limit of 300000;"):
            _read_state_dict(tmp_path / name, 300_000)


@pytest.mark.parametrize("odd", [torch.eye(2).to_sparse(), torch.zeros(2, 2, device="meta")], ids=["sparse", "without values"])
def test_sparse_and_meta_tensors_are_refused(tmp_path: Path, odd: torch.Tensor) -> None:
    torch.save({"w": odd}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt"):
        _read_state_dict(tmp_path / "x.pt", 2**40)


def test_a_damaged_archive_is_refused_by_name(tmp_path: Path) -> None:
    """One to three random bits of a compressed archive are flipped; about one in thirty copies is still valid."""
    file, rng = io.BytesIO(), np.random.default_rng(0)
    np.savez_compressed(file, images=rng.integers(0, 9, (10, 4, 4)).astype(np.uint8), labels=np.arange(10))
    whole, path, reasons = file.getvalue(), tmp_path / "damaged.npz", []
    for _ in range(400):
        content = bytearray(whole)
        for bit in rng.integers(0, 8 * len(content), rng.integers(1, 4)):
            content[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(content)
        try:
            read_arrays(path)
        except ValueError as error:
            reasons.append(str(error))
    assert len(reasons) > 300
    assert all(reason.startswith(str(path)) for reason in reasons)


def test_arrays_are_read_as_they_were_saved(tmp_path: Path) -> None:
    arrays = {
        "a": np.asfortranarray(np.random.default_rng(0).random((3, 4))),
        "b": np.array(["x", "yz"]),
        "c/d": np.zeros((0, 2)),
    }
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    found = read_arrays(tmp_path / "x.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    with pytest.raises(ValueError, match="no array 'z'; it holds a, b, c/d"):
        read_arrays(tmp_path / "x.npz", ["z"])


def png(width: int, height: int) -> bytes:
    """Return the header of a PNG file without any pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name in ("cats", "dogs"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), number).save(tmp_path / "pictures" / name / f"{number}.png")
    return tmp_path / "pictures"


def test_an_image_with_extreme_sides_is_refused(pictures: Path) -> None:
    assert len(datasets.load("imagefolder", path=str(pictures), size=4).train) == 8
    Image.new("L", (1, 200_000)).save(pictures / "cats" / "0.png")
    with pytest.raises(ValueError, match=r"0\.png.*1 x 200000 pixels"):
        datasets.load("imagefolder", path=str(pictures), size=5)  # data sets are cached by their arguments
    (pictures / "cats" / "0.png").write_bytes(png(2_000_000_000, 2_000_000_000))
    with pytest.raises(ValueError, match=r"0\.png cannot be read"):
        datasets.load("imagefolder", path=str(pictures), size=6)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("csv", {"label": "a"}, "is a pipe or a device, not a regular file; give the path of a regular file"),
        ("imagefolder", {}, "is not a folder; give a folder with one folder of images per class"),
    ],
)
def test_a_pipe_in_place_of_data_is_refused(tmp_path: Path, name: str, arguments: dict[str, Any], words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((ValueError, NotADirectoryError), match=words):
        datasets.load(name, path=str(tmp_path / "pipe"), **arguments)


def test_for_an_image_of_an_unknown_format_the_message_lists_the_formats(pictures: Path) -> None:
    (pictures / "cats" / "0.png").write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match=r"0\.png cannot be read \(its format is none of PNG, .*\); convert or remove it"):
        datasets.load("imagefolder", path=str(pictures), size=4)


def test_a_format_that_starts_another_program_is_not_opened(pictures: Path) -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    (pictures / "cats" / "7.eps").write_bytes(script)
    assert len(datasets.load("imagefolder", path=str(pictures), size=4).train) == 8
    (pictures / "cats" / "0.png").write_bytes(script)
    with pytest.raises(ValueError, match=r"0\.png cannot be read"):
        datasets.load("imagefolder", path=str(pictures), size=5)


def test_a_pipe_among_images_is_ignored(pictures: Path) -> None:
    os.mkfifo(pictures / "cats" / "8.png")
    started = time.monotonic()
    assert len(datasets.load("imagefolder", path=str(pictures), size=4).train) == 8
    assert time.monotonic() - started < SECONDS
