"""Tests of the command `attacker rank`, which counts the equations that a gradient gives for a network's input."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import run_attacker
from PIL import Image
from typer.testing import Result

from fedsim.models import building

CODE = """
from torch import nn

def network(shape, num_classes):
    return nn.Sequential(nn.Conv2d(shape[0], 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, num_classes))

class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 10)
    def forward(self, x):
        return self.head(x) + self.head(2 * x)
"""


@pytest.fixture(autouse=True)
def restore_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(building, "_ADMITTED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("custom_network", None)


def call(*words: object) -> Result:
    return run_attacker("rank", *words)


def test_rank_of_a_deficient_network_is_printed_by_layer() -> None:
    result = call("cnn6_d", "--input", "3x32x32", "--classes", 2, "--no-prove")
    assert result.exit_code == 0, result.stderr
    assert "no closed form" in result.stdout
    assert "280 are missing" in result.stdout
    for number in ("3,468", "2,160", "1,620", "-708", "3,188"):
        assert number in result.stdout


def test_json_holds_the_same_numbers() -> None:
    result = call("cnn6_d", "--input", "1x28x28", "--classes", 2, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["full"], found["locally_unique"], found["critical"], found["dead"]) == (False, True, "2", None)
    assert found["index"] == max(layer["index"] for layer in found["layers"])
    second = found["layers"][1]
    assert (second["rank"], second["missing"], second["proved"]) == (2668, 32, True)


def test_model_arguments_and_table_rows_are_accepted() -> None:
    result = call("mlp", "--input", 30, "--classes", 3, "--set", "hidden=[64, 32]", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert [(layer["unknowns"], layer["gradients"]) for layer in found["layers"]] == [(30, 1920), (64, 2048), (32, 96)]
    assert found["full"]


def test_custom_network_is_imported_if_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "custom_network.py").write_text(CODE)
    result = call("custom_network:network", "--input", "3x8x8", "--json")
    assert result.exit_code == 0, result.stderr
    (first, _) = json.loads(result.stdout)["layers"]
    assert first["rank"] == 2 * 27 + 2 * 36 - 4
    joined = call("custom_network:Joined", "--input", 4)
    assert joined.exit_code == 1
    assert "joins 2 paths" in joined.stderr or "second path" in joined.stderr


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_chain_of_layers_is_drawn(suffix: str, tmp_path: Path) -> None:
    result = call("cnn6_d", "--input", "3x32x32", "--no-prove", "--out", f"chain.{suffix}")
    assert result.exit_code == 0, result.stderr
    drawn = tmp_path / f"chain.{suffix}"
    if suffix == "png":
        colours = np.asarray(Image.open(drawn).convert("RGB")).astype(int)
        red = (colours[..., 0] > 180) & (colours[..., 1:].max(axis=-1) < 70)
        assert red.sum() > 500  # the frame of the critical layer
    elif suffix == "svg":
        before = drawn.read_bytes()
        call("cnn6_d", "--input", "3x32x32", "--no-prove", "--out", "chain.svg")
        assert drawn.read_bytes() == before
    else:
        assert drawn.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (("resnet20_4", "--input", "3x32x32"), 1, "residual networks"),
        (("nope", "--input", "3x32x32"), 2, "Known: cnn6"),
        (("absent:f", "--input", "3x32x32"), 2, "cannot import absent:f"),
        (("cnn6", "--input", "3x32"), 2, "--input '3x32'"),
        (("cnn6", "--input", "3x-1x32"), 2, "--input '3x-1x32'"),
        (("cnn6", "--input", "30"), 2, "takes images"),
        (("cnn6", "--input", "3x32x32", "--classes", "1"), 2, "num_classes"),
        (("cnn6", "--input", "3x32x32", "--dead", "1"), 2, "dead must be"),
        (("mlp", "--input", "30", "--set", "hiden=[3]"), 2, "hiden"),
        (("cnn6", "--input", "3x32x32", "--out", "x.jpg"), 2, ".png, .svg or .pdf"),
        (("cnn6", "--input", "3x32x32", "--out", "absent/x.png"), 2, "there is no folder"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(words: tuple[str, ...], status: int, reason: str) -> None:
    result = call(*words)
    assert result.exit_code == status
    assert reason in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
