"""Tests that LPIPS agrees with a second implementation of its formula, and that wrong weights are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, max_pool2d, relu

from attacker.attacks.learned import perceptual
from attacker.attacks.learned.perceptual import BACKBONES, explain_missing, load, load_lpips
from fedsim.recording import DataSpec

FILES = {"alex": "alexnet_features.safetensors", "vgg": "vgg16_features.safetensors"}


@pytest.fixture(scope="session")
def weights(shared_data: Path) -> Callable[[str], Path]:
    def find(net: str) -> Path:
        path = shared_data / "lpips" / FILES[net]
        if not path.exists():
            pytest.skip(f"{path} is absent")
        return path

    return find


@pytest.fixture
def pictures() -> Tensor:
    """Two photographs (2, 3, 40, 48)."""
    from skimage.data import astronaut

    image = torch.from_numpy(astronaut()[100:140, 180:228].transpose(2, 0, 1).copy()).float() / 255
    return torch.stack([image, image.flip(2) ** 2])


@pytest.fixture
def noisy(pictures: Tensor) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return (pictures + 0.2 * torch.randn(pictures.shape, generator=rng)).clamp(0, 1)


def features(net: str, given: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """Compute the five layers that LPIPS compares, from raw weights."""
    x = (2 * x - 1 - torch.tensor([-0.030, -0.088, -0.188])[:, None, None]) / torch.tensor([0.458, 0.448, 0.450])[:, None, None]

    def layer(x: Tensor, n: int, **how: int) -> Tensor:
        return relu(conv2d(x, given[f"features.{n}.weight"].float(), given[f"features.{n}.bias"].float(), **how))

    if net == "alex":
        one = layer(x, 0, stride=4, padding=2)
        two = layer(max_pool2d(one, 3, 2), 3, padding=2)
        three = layer(max_pool2d(two, 3, 2), 6, padding=1)
        four = layer(three, 8, padding=1)
        return [one, two, three, four, layer(four, 10, padding=1)]
    found = []
    for block in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28)):
        x = max_pool2d(x, 2, 2) if found else x
        for n in block:
            x = layer(x, n, padding=1)
        found.append(x)
    return found


def compute_by_hand(net: str, path: Path, x: Tensor, truth: Tensor) -> Tensor:
    import lpips

    linear = torch.load(Path(lpips.__file__).parent / f"weights/v0.1/{net}.pth", map_location="cpu", weights_only=True)
    given, total = load_file(path), torch.zeros(len(x))
    for i, (a, b) in enumerate(zip(features(net, given, x), features(net, given, truth), strict=True)):
        a, b = (t / (t.square().sum(dim=1, keepdim=True).sqrt() + 1e-10) for t in (a, b))
        total += ((a - b).square() * linear[f"lin{i}.model.1.weight"][0]).sum(dim=1).mean(dim=(1, 2))
    return total


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_lpips_agrees_with_its_formula(net: str, weights: Callable[[str], Path], pictures: Tensor, noisy: Tensor) -> None:
    found = load(net, weights(net))(noisy, pictures)
    torch.testing.assert_close(found, compute_by_hand(net, weights(net), noisy, pictures), rtol=1e-4, atol=1e-5)
    assert (found > 0.3).all()


def test_lpips_prefers_a_blurred_image_to_a_noisy_one(weights: Callable[[str], Path], pictures: Tensor, noisy: Tensor) -> None:
    lpips = load("alex", weights("alex"))
    blurred = avg_pool2d(pictures, 3, 1, 1, count_include_pad=False)
    assert lpips(pictures, pictures).tolist() == [0, 0]
    assert (lpips(blurred, pictures) < lpips(noisy, pictures) - 0.1).all()
    torch.testing.assert_close(lpips(noisy, pictures), lpips(pictures, noisy))


def test_grey_images_are_three_equal_channels(weights: Callable[[str], Path], pictures: Tensor, noisy: Tensor) -> None:
    lpips = load("alex", weights("alex"))
    grey, other = pictures[:, :1], noisy[:, :1]
    torch.testing.assert_close(lpips(other, grey), lpips(other.expand(-1, 3, -1, -1), grey.expand(-1, 3, -1, -1)))


def test_images_are_measured_separately_and_in_chunks(
    weights: Callable[[str], Path], pictures: Tensor, noisy: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    lpips = load("alex", weights("alex"))
    whole = lpips(noisy.repeat(3, 1, 1, 1), pictures.repeat(3, 1, 1, 1))
    monkeypatch.setattr(perceptual, "CHUNK_PIXELS", 4 * 40 * 48)
    torch.testing.assert_close(lpips(noisy.repeat(3, 1, 1, 1), pictures.repeat(3, 1, 1, 1)), whole)
    torch.testing.assert_close(whole[:1], lpips(noisy[:1], pictures[:1]))
    assert lpips(noisy[:0], pictures[:0]).shape == (0,)


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_too_small_images_are_refused(net: str, weights: Callable[[str], Path]) -> None:
    lpips, smallest = load(net, weights(net)), BACKBONES[net].smallest
    just, below = torch.rand(1, 3, smallest, smallest + 5), torch.rand(1, 3, smallest - 1, smallest + 5)
    assert explain_missing(net, tuple(just.shape[1:])) is None
    assert torch.isfinite(lpips(just, just.flip(3))).all()
    assert f"{smallest}x{smallest}" in str(explain_missing(net, tuple(below.shape[1:])))
    with pytest.raises(ValueError, match="needs images of at least"):
        lpips(below, below)
    with pytest.raises(RuntimeError, match="too small"):
        lpips._model(below, below)
    assert ("--lpips-net vgg takes 16x16" in str(explain_missing(net, (1, 28, 28)))) == (net == "alex")
    assert "1 or 3 channels, got 4" in str(explain_missing(net, (4, 64, 64)))


def test_loading_is_cached_and_draws_no_random_numbers(weights: Callable[[str], Path]) -> None:
    load.cache_clear()
    before = torch.random.get_rng_state()
    lpips = load("alex", weights("alex"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert load("alex", weights("alex")) is lpips
    assert {p.device.type for p in lpips._model.parameters()} == {"cpu"}
    assert not any(p.requires_grad for p in lpips._model.parameters())


def random_weights() -> dict[str, Tensor]:
    """Return random weights of AlexNet's convolutions, with the right names and shapes."""
    layers = {0: (64, 3, 11), 3: (192, 64, 5), 6: (384, 192, 3), 8: (256, 384, 3), 10: (256, 256, 3)}
    rng = torch.Generator().manual_seed(0)
    kernels = {f"features.{n}.weight": 0.05 * torch.randn(a, b, k, k, generator=rng) for n, (a, b, k) in layers.items()}
    return {**kernels, **{f"features.{n}.bias": torch.zeros(a) for n, (a, _, _) in layers.items()}}


def drop_one_tensor(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in given.items() if name != "features.8.bias"}


def cut(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**given, "features.3.weight": given["features.3.weight"][:, :, :3, :3].contiguous()}


def infinite(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**given, "features.6.bias": given["features.6.bias"] / 0}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict, ": tensor features.0.weight differs from torchvision's"),
        (drop_one_tensor, " lacks the tensor features.8.bias"),
        (cut, r": tensor features.3.weight has shape \(192, 64, 3, 3\) instead of \(192, 64, 5, 5\)"),
        (infinite, ": tensor features.6.bias holds NaN or infinity"),
        (lambda given: {**given, "features.12.bias": torch.zeros(3)}, " has the unknown tensor features.12.bias"),
    ],
)
def test_wrong_weights_are_refused_with_the_reason(tmp_path: Path, change: Callable, reason: str) -> None:
    path = tmp_path / "given.safetensors"
    save_file(change(random_weights()), path)
    with pytest.raises(ValueError, match=f"given.safetensors{reason}.*weights of AlexNet"):
        load("alex", path)


def test_other_files_are_refused(tmp_path: Path, weights: Callable[[str], Path]) -> None:
    for name in ("text.safetensors", "text.pth"):
        (tmp_path / name).write_text("no weights")
        with pytest.raises(ValueError, match=f"{name}: not a file of weights"):
            load("alex", tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"absent\.safetensors do not exist"):
        load("alex", tmp_path / "absent.safetensors")
    with pytest.raises(ValueError, match="unknown LPIPS net 'squeeze'"):
        load("squeeze")
    with pytest.raises(ValueError, match=r"has the unknown tensor .*; give a file of torchvision's weights of AlexNet"):
        load("alex", weights("vgg"))


@pytest.mark.parametrize("shape", [(3, 64, 64), (5,)])
def test_unknown_backbone_is_explained_with_the_known_ones(shape: tuple[int, ...]) -> None:
    reason = load_lpips(DataSpec(shape=shape, num_classes=2), "squeeze")
    assert reason == "unknown LPIPS net 'squeeze'. Known: alex, vgg"


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "executed",)

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="not a file of weights"):
        load("alex", tmp_path / "evil.pth")
    assert not (tmp_path / "executed").exists()


def test_weights_are_read_from_torchs_cache_and_never_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Callable[[str], Path], pictures: Tensor, noisy: Tensor
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    load.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"no weights of AlexNet; .*--lpips-weights.* put alexnet-owt-7be5be79.pth into"):
        load("alex")
    assert not list(tmp_path.iterdir())
    (tmp_path / "checkpoints").mkdir()
    classifier = {"classifier.1.weight": torch.zeros(2)}
    torch.save({**load_file(weights("alex")), **classifier}, tmp_path / "checkpoints" / "alexnet-owt-7be5be79.pth")
    assert torch.equal(load("alex")(noisy, pictures), load("alex", weights("alex"))(noisy, pictures))
    load.cache_clear()
