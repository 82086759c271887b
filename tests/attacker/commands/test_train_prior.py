"""Tests of the command `attacker train-prior`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import join_lines, run_attacker
from PIL import Image
from typer.testing import Result

from attacker.attacks.learned.images import read_images
from attacker.attacks.learned.prior_file import read_prior


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (5, 34, 40, 3), dtype=np.uint8)
    np.savez(tmp_path / "public.npz", images=images)
    return tmp_path / "public.npz"


def call(data: Path, out: Path, *words: str) -> Result:
    given = ["train-prior", str(data), "--out", str(out), "--size", "32", "--steps", "3", "--batch", "2", "--width", "4"]
    return run_attacker(*given, "--device", "cpu", *words)


@pytest.mark.parametrize(
    ("kind", "other"),
    [("enhancer", "autoencoder"), ("autoencoder", "enhancer"), ("generator", "denoiser"), ("denoiser", "generator")],
)
def test_a_prior_is_trained_and_can_be_read(kind: str, other: str, archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "prior.safetensors"
    result = call(archive, out, "--kind", kind, "--seed", "7", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    prior = read_prior(out, kind)
    assert (printed["hash"], printed["images"]) == (prior.weights_hash, 5)
    assert (prior.facts.data, prior.facts.seed, prior.facts.size, prior.facts.steps) == ("public.npz", 7, 32, 3)
    assert not out.with_name("prior.safetensors.checkpoint").exists()
    with pytest.raises(ValueError, match="of kind"):
        read_prior(out, other)
    again = tmp_path / "again.safetensors"
    call(archive, again, "--kind", kind, "--seed", "7")
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize(("kind", "default", "other"), [("enhancer", "0.03", "0.01"), ("autoencoder", "0.01", "0.03")])
def test_default_weight_of_the_adversarial_loss_depends_on_the_kind(
    kind: str, default: str, other: str, archive: Path, tmp_path: Path
) -> None:
    found = []
    for i, words in enumerate(([], ["--adversarial", default], ["--adversarial", other])):
        assert call(archive, tmp_path / f"{i}.safetensors", "--kind", kind, *words).exit_code == 0
        found.append(read_prior(tmp_path / f"{i}.safetensors", kind).weights_hash)
    assert found[0] == found[1] != found[2]


def test_generator_is_conditional_on_the_labels_of_an_archive(archive: Path, tmp_path: Path) -> None:
    out, images = tmp_path / "generator.safetensors", np.load(archive)["images"]
    for labels, classes in ((None, 1), ([0, 3, 1, 3, 2], 4)):
        np.savez(archive, images=images, **({} if labels is None else {"labels": np.array(labels)}))
        assert call(archive, out, "--kind", "generator").exit_code == 0
        assert read_prior(out, "generator").facts.settings == {"width": 4, "latents": 128, "side": 32, "classes": classes}
    for wrong in ([0, 1], [0, -1, 1, 1, 1], [0.5] * 5):
        np.savez(archive, images=images, labels=np.array(wrong))
        result = call(archive, out, "--kind", "generator")
        assert result.exit_code == 2
        assert "labels must be 5 whole numbers" in join_lines(result.output)


def test_a_folder_of_image_files_is_cropped_to_squares_of_one_size(tmp_path: Path) -> None:
    (tmp_path / "photos" / "deep").mkdir(parents=True)
    for name, size in (("a.png", (70, 50)), ("deep/b.jpg", (64, 200)), ("c.PNG", (40, 45))):
        Image.new("RGB", size, (200, 10, 30)).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "readme.txt").write_text("no image")
    images = read_images(tmp_path / "photos", 32)
    assert images.shape == (3, 3, 40, 40)
    assert images.dtype == torch.uint8
    assert torch.allclose(images.float().mean(dim=(0, 2, 3)), torch.tensor([200.0, 10.0, 30.0]), atol=3)


def test_unusable_images_and_options_are_refused(archive: Path, tmp_path: Path) -> None:
    out, empty = tmp_path / "prior.safetensors", tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.png").write_bytes(b"nothing")
    np.savez(tmp_path / "grey.npz", images=np.zeros((2, 32, 32), dtype=np.uint8))
    for data, reason in (
        (empty, "holds no images"),
        (tmp_path / "bad", "cannot be read as an image"),
        (tmp_path / "grey.npz", "must be uint8 of shape"),
        (tmp_path / "none.npz", "does not exist"),
    ):
        result = call(data, out)
        assert result.exit_code == 2
        assert reason in join_lines(result.output)
    result = call(archive, tmp_path / "prior.pt")
    assert result.exit_code == 2
    assert "must end in .safetensors" in join_lines(result.output)
    result = call(archive, out, "--size", "64")
    assert "smaller than --size 64" in join_lines(result.output)
