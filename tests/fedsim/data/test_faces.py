"""Tests of Labeled Faces in the Wild on three invented people: the images equal those that scikit-learn reads."""

import tarfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import _lfw, fetch_lfw_people

from fedsim import data as datasets

PEOPLE = {"Ada_L": 15, "Bea_M": 3, "Ada_A": 14}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the data set as scikit-learn stores them."""
    root = tmp_path_factory.mktemp("faces")
    rng = np.random.default_rng(0)
    for person, count in PEOPLE.items():
        folder = root / "lfw_home" / "lfw_funneled" / person
        folder.mkdir(parents=True)
        for i in range(count):
            coarse = Image.fromarray(rng.integers(0, 256, (10, 10, 3), dtype=np.uint8))
            coarse.resize((250, 250)).save(folder / f"{person}_{i:04d}.jpg")
    for name in ("pairsDevTrain", "pairsDevTest", "pairs"):
        (root / "lfw_home" / f"{name}.txt").write_text(name)
    return root


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("min_faces", [14, 2])
def test_faces_are_those_of_scikit_learn_with_the_last_quarter_held_out(size: int, min_faces: int, home: Path) -> None:
    window = (slice(61, 189), slice(61, 189))
    expected = fetch_lfw_people(
        data_home=home, min_faces_per_person=min_faces, color=True, slice_=window, resize=size / 128, download_if_missing=False
    )
    data = datasets.lfw(size, min_faces, str(home))
    count = len(expected.target)
    assert (len(data.train), len(data.test)) == (count * 3 // 4, count - count * 3 // 4)
    assert data.class_names == tuple(expected.target_names)
    assert data.train.values.dtype == np.uint8
    x = np.concatenate([examples[:][0] for examples in (data.train, data.test)])
    assert np.allclose(x.transpose(0, 2, 3, 1), expected.images, atol=1e-6)
    for examples, target in ((data.train, expected.target[: len(data.train)]), (data.test, expected.target[len(data.train) :])):
        assert examples.labels.tolist() == target.tolist()
        assert examples.groups["person"].tolist() == expected.target_names[target].tolist()


def test_everything_is_downloaded_once(
    home: Path, site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = site
    with tarfile.open(folder / "lfw-funneled.tgz", "w:gz") as archive:
        archive.add(home / "lfw_home" / "lfw_funneled", "lfw_funneled")
    for file in (home / "lfw_home").glob("*.txt"):
        (folder / file.name).write_bytes(file.read_bytes())

    def moved(remote: object) -> object:
        name = remote.filename
        checksum = sha256((folder / name).read_bytes()).hexdigest()
        return remote._replace(url=address + name, checksum=checksum)

    monkeypatch.setattr(_lfw, "TARGETS", tuple(map(moved, _lfw.TARGETS)))
    monkeypatch.setattr(_lfw, "FUNNELED_ARCHIVE", moved(_lfw.FUNNELED_ARCHIVE))
    data = datasets.lfw(root=str(tmp_path / "root"))
    assert data.compute_hash() == datasets.lfw(root=str(home)).compute_hash()
    assert [entry.name for entry in (tmp_path / "root").iterdir()] == ["lfw_home"]
    for file in folder.iterdir():
        file.unlink()
    assert datasets.lfw(root=str(tmp_path / "root")).compute_hash() == data.compute_hash()


def test_a_failed_download_is_reported_in_one_line_with_cause_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    targets = tuple(target._replace(url="http://127.0.0.1:9/") for target in _lfw.TARGETS)
    monkeypatch.setattr(_lfw, "TARGETS", targets)
    with pytest.raises(FileNotFoundError, match=r"lfw: .*lfw_home does not exist, .*Connection refused.*FEDLEAK_CACHE") as failed:
        datasets.lfw(root=str(tmp_path / "root"))
    assert "\n" not in str(failed.value)
    assert list((tmp_path / "root").iterdir()) == []


def test_wrong_arguments_and_broken_photographs_are_refused(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="size must be 32, 64 or 128, got 50"):
        datasets.lfw(50, root=str(home))
    with pytest.raises(ValueError, match="1 of 3 people have at least 15 photographs, but 2 people are needed; lower min_faces"):
        datasets.lfw(min_faces=15, root=str(home))
    (tmp_path / "lfw_home" / "lfw_funneled").mkdir(parents=True)
    for person in "ab":
        (tmp_path / "lfw_home" / "lfw_funneled" / person).mkdir()
        (tmp_path / "lfw_home" / "lfw_funneled" / person / "1.jpg").write_bytes(b"none")
    with pytest.raises(ValueError, match=r"lfw: .*1\.jpg cannot be read"):
        datasets.lfw(min_faces=1, root=str(tmp_path))
