"""Tests of MNIST and CIFAR downloads from a site on this machine: values, caching, and what a failed download leaves."""

import gzip
import pickle
import socket
import struct
import tarfile
import time
from collections.abc import Callable
from hashlib import md5
from io import BytesIO
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
from torchvision import datasets as published

from fedsim import data as datasets
from fedsim.data import cache

DRAWN = np.random.default_rng(0)
GREY = DRAWN.integers(0, 256, (12, 28, 28), dtype=np.uint8)
COLOUR = DRAWN.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)
LABELS = np.arange(12) % 10
Site = tuple[Path, str]


def idx(values: np.ndarray) -> bytes:
    """Return an array in the format of MNIST's files: a magic number, the sizes, the bytes."""
    return struct.pack(f">{1 + values.ndim}I", 0x800 + values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def mnist_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with MNIST files of twelve training and seven test digits."""
    folder, address = site
    arrays = {
        "train-images-idx3": GREY,
        "train-labels-idx1": LABELS,
        "t10k-images-idx3": GREY[5:],
        "t10k-labels-idx1": LABELS[5:],
    }
    resources = []
    for name, array in arrays.items():
        packed = gzip.compress(idx(array))
        (folder / f"{name}-ubyte.gz").write_bytes(packed)
        resources.append((f"{name}-ubyte.gz", md5(packed).hexdigest()))
    monkeypatch.setattr(published.MNIST, "mirrors", [address])
    monkeypatch.setattr(published.MNIST, "resources", resources)
    return site


@pytest.fixture
def cifar_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A site with CIFAR-10 files of twelve training images in two batches, and five test images."""
    folder, address = site
    contents = {
        "data_batch_1": {"data": COLOUR[:8].reshape(8, -1), "labels": LABELS[:8].tolist()},
        "data_batch_2": {"data": COLOUR[8:].reshape(4, -1), "labels": LABELS[8:].tolist()},
        "test_batch": {"data": COLOUR[:5].reshape(5, -1), "labels": LABELS[:5].tolist()},
        "batches.meta": {"label_names": [f"class {i}" for i in range(10)]},
    }
    sums = {}
    with tarfile.open(folder / "cifar.tar.gz", "w:gz") as archive:
        for name, content in contents.items():
            raw = pickle.dumps(content)
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size, sums[name] = len(raw), md5(raw).hexdigest()
            archive.addfile(info, BytesIO(raw))
    changes = {
        "url": address + "cifar.tar.gz",
        "tgz_md5": md5((folder / "cifar.tar.gz").read_bytes()).hexdigest(),
        "train_list": [[name, sums[name]] for name in ("data_batch_1", "data_batch_2")],
        "test_list": [["test_batch", sums["test_batch"]]],
        "meta": {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]},
    }
    for key, value in changes.items():
        monkeypatch.setattr(published.CIFAR10, key, value)
    return site


def test_mnist_is_downloaded_once_and_read(mnist_site: Site, tmp_path: Path) -> None:
    data = datasets.mnist(str(tmp_path / "root"))
    assert np.array_equal(data.train.values[:, 0], GREY)
    assert np.array_equal(data.test.values[:, 0], GREY[5:])
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == (LABELS.tolist(), LABELS[5:].tolist())
    assert (data.spec.shape, data.spec.num_classes, data.train.values.dtype) == ((1, 28, 28), 10, np.uint8)
    assert [entry.name for entry in (tmp_path / "root").iterdir()] == ["MNIST"]
    for file in mnist_site[0].iterdir():
        file.unlink()
    assert datasets.mnist(str(tmp_path / "root")).compute_hash() == data.compute_hash()


def test_cifar_is_downloaded_and_read(cifar_site: Site, tmp_path: Path) -> None:
    data = datasets.cifar10(str(tmp_path / "root"), normalise=True)
    assert np.array_equal(data.train.values, COLOUR)
    assert np.array_equal(data.test.values, COLOUR[:5])
    assert data.train.labels.tolist() == LABELS.tolist()
    assert (data.class_names[3], data.spec.shape, data.train.values.dtype) == ("class 3", (3, 32, 32), np.uint8)
    assert (data.spec.mean, data.spec.std) == ((0.49147, 0.48226, 0.44677), (0.24703, 0.24349, 0.26159))
    normalised = data.spec.normalise(data.train[:1][0])[0, 2, 4, 5]
    assert float(normalised) == pytest.approx((COLOUR[0, 2, 4, 5] / 255 - 0.44677) / 0.26159, rel=1e-5)


def test_inputs_are_not_normalised_by_default(mnist_site: Site, tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    assert (datasets.mnist(root).spec.mean, datasets.mnist(root).spec.std) == ((0.0,), (1.0,))
    assert datasets.mnist(root, mean=[0.5], std=[0.25]).spec.std == (0.25,)
    assert datasets.mnist(root, normalise=True).spec.std == (0.3081,)
    with pytest.raises(ValueError, match="give either normalise or mean and std"):
        datasets.mnist(root, normalise=True, mean=[0.5])


@pytest.mark.parametrize(("variable", "folder"), [("FEDLEAK_CACHE", "elsewhere"), ("HOME", "home/.cache/fedleak/datasets")])
def test_the_cache_is_where_the_environment_says(
    mnist_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, folder: str
) -> None:
    monkeypatch.delenv("FEDLEAK_CACHE", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / folder.split("/")[0]))
    datasets.mnist()
    assert (tmp_path / folder / "MNIST" / "raw").is_dir()


# --- what fails ---


def expect_refusal(load: Callable[..., Any], root: Path) -> str:
    """Return the message of a failed download, after checking that it was quick and left no files."""
    start = time.monotonic()
    with pytest.raises(FileNotFoundError) as failed:
        load(str(root))
    assert time.monotonic() - start < 5
    assert list(root.iterdir()) == []
    message = str(failed.value)
    assert "\n" not in message
    assert str(root) in message
    assert "FEDLEAK_CACHE" in message
    return message


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_a_failed_download_is_reported_in_one_line_with_cause_and_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    for kind in (published.MNIST, published.FashionMNIST):
        monkeypatch.setattr(kind, "mirrors", ["http://127.0.0.1:9/", "http://127.0.0.1:9/other/"])
    for kind in (published.CIFAR10, published.CIFAR100):
        monkeypatch.setattr(kind, "url", "http://127.0.0.1:9/cifar.tar.gz")
    message = expect_refusal(getattr(datasets, name), tmp_path / "root")
    assert message.startswith(f"{name}: ")
    assert "Connection refused" in message


def test_a_download_from_a_silent_server_times_out(mnist_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(published.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        monkeypatch.setattr(cache, "TIMEOUT_SECONDS", 0.2)
        hung_up = Timer(4, silent.close)  # ends the connection if the client waits too long
        hung_up.start()
        assert "timed out" in expect_refusal(datasets.mnist, tmp_path / "root")
        hung_up.cancel()
    assert socket.getdefaulttimeout() is None


def test_a_failed_download_can_be_repeated(mnist_site: Site, tmp_path: Path) -> None:
    last = mnist_site[0] / "t10k-labels-idx1-ubyte.gz"
    whole = last.read_bytes()
    last.write_bytes(whole[:-20])
    expect_refusal(datasets.mnist, tmp_path / "root")
    last.write_bytes(whole)
    assert len(datasets.mnist(str(tmp_path / "root")).test) == 7


def test_a_cache_that_cannot_be_written_is_named(mnist_site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"mnist: .*file.* does not exist, and downloading it failed"):
        datasets.mnist(str(tmp_path / "file"))


def test_damaged_files_are_named_with_advice(mnist_site: Site, tmp_path: Path) -> None:
    root = tmp_path / "root"
    datasets.mnist(str(root))
    images = root / "MNIST" / "raw" / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    for damaged in (whole[:-3000], whole[:2], b"", idx(GREY[:11])):
        images.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"mnist: .*MNIST is damaged .*; delete it") as failed:
            datasets.mnist(str(root))
        assert "\n" not in str(failed.value)
    images.unlink()
    with pytest.raises(ValueError, match="is damaged"):
        datasets.mnist(str(root))


def test_a_changed_batch_of_cifar_is_never_unpickled(cifar_site: Site, tmp_path: Path) -> None:
    datasets.cifar10(str(tmp_path / "root"))
    batch = tmp_path / "root" / "cifar-10-batches-py" / "data_batch_1"
    batch.write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(ValueError, match="cifar-10-batches-py is damaged"):
        datasets.cifar10(str(tmp_path / "root"))


def test_data_that_another_process_downloaded_meanwhile_are_kept(tmp_path: Path) -> None:
    def fetch(own: str) -> None:
        for place, words in ((Path(own) / "part", "mine"), (tmp_path / "part", "theirs")):
            place.mkdir()
            (place / "file").write_text(words)

    assert cache.fetch_once("some", str(tmp_path), "part", fetch) == tmp_path
    assert (tmp_path / "part" / "file").read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["part"]
