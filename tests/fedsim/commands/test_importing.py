"""Tests that two state dicts of any framework become a recording that can be attacked."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import join_lines, run_attacker
from state_dicts import RATE, SETTINGS, write
from typer.testing import Result

from fedsim import models
from fedsim.recording import ModelSpec, Observation, Recording

EXAMPLE = Path(__file__).parents[3] / "deploy" / "import.toml"


def read_observation(tmp_path: Path) -> Observation:
    (one,) = Recording(tmp_path / "out" / "recording").read_observations()
    return one


@pytest.mark.parametrize("kind", [".npz", ".safetensors", ".pt", ".pth"])
def test_a_training_step_is_imported_as_the_clients_update(tmp_path: Path, step: Any, bring: Any, kind: str) -> None:
    before, after, gradient = step
    result = bring(write(tmp_path / f"sent{kind}", before), write(tmp_path / f"back{kind}", after))
    assert result.exit_code == 0, result.stderr
    assert f"attacker replay {tmp_path / 'out'} --attack cpl" in join_lines(result.stdout)
    o = read_observation(tmp_path)
    assert (o.round, o.num_examples, o.payload.codec, o.model.name) == (1, 1, "weights", "lenet_dlg")
    for name, g in gradient.items():
        assert torch.equal(o.weights[name], torch.from_numpy(before[name]))
        assert torch.equal(o.payload.tensors[name], torch.from_numpy(after[name]))
        error = (o.update[name].double() + RATE * g.double()).abs()
        assert (error <= o.rounding[name] + 1e-7 * g.abs()).all()


def test_an_update_from_float64_weights_has_almost_no_rounding(tmp_path: Path, step: Any, bring: Any) -> None:
    before, _, gradient = step
    wide = {name: a.astype(np.float64) for name, a in before.items()}
    tiny = {name: a - 1e-9 * gradient[name].double().numpy() for name, a in wide.items()}  # too small for float32
    assert bring(write(tmp_path / "a.npz", wide), write(tmp_path / "b.npz", tiny)).exit_code == 0
    o = read_observation(tmp_path)
    assert (o.payload.codec, o.rounding) == ("dense", {})
    for name, g in gradient.items():
        assert o.weights[name].dtype is o.update[name].dtype is torch.float32
        torch.testing.assert_close(o.update[name], -1e-9 * g, rtol=1e-4, atol=1e-15)


def to_keras(name: str, a: np.ndarray, chw: tuple[int, int, int]) -> np.ndarray:
    """Convert a weight to the layout of Keras with loops: kernels (height, width, in, out), pixels flattened channels last."""
    if a.ndim == 4:
        kernel = np.zeros((*a.shape[2:], a.shape[1], a.shape[0]), a.dtype)
        for o, i, y, x in np.ndindex(a.shape):
            kernel[y, x, i, o] = a[o, i, y, x]
        return kernel
    if a.ndim == 2:
        c, h, w = chw
        kernel = np.zeros(a.shape[::-1], a.dtype)
        for k, y, x in np.ndindex(c, h, w):
            kernel[(y * w + x) * c + k] = a[:, (k * h + y) * w + x]
        return kernel
    return a


KERAS = {"0": "conv2d", "2": "conv2d_1", "4": "conv2d_2", "7": "dense"}
KEYS = {"weight": "kernel", "bias": "bias"}


def keras_name(name: str) -> str:
    layer, key = name.split(".")
    return f"{KERAS[layer]}/{KEYS[key]}"


def keras_settings(names: Any, flatten: str) -> str:
    table = ", ".join(f'"{keras_name(name)}" = "{name}"' for name in names)
    return f'layout = "keras"\nnames = {{ {table} }}\n{flatten}\n'


def test_the_layout_of_keras_and_jax_is_converted_to_that_of_the_model(tmp_path: Path, step: Any, bring: Any) -> None:
    files = [
        write(tmp_path / file, {keras_name(name): to_keras(name, a, (12, 2, 2)) for name, a in arrays.items()})
        for file, arrays in zip(("sent.npz", "back.npz"), step[:2], strict=True)
    ]
    result = bring(*files, keras_settings(step[0], 'flatten = { "7.weight" = [12, 2, 2] }'))
    assert result.exit_code == 0, result.stderr
    o = read_observation(tmp_path)
    for name, a in step[0].items():
        assert torch.equal(o.weights[name], torch.from_numpy(a)), name
        assert torch.equal(o.payload.tensors[name], torch.from_numpy(step[1][name]))


def test_the_order_of_flattened_pixels_cannot_be_found_from_shapes(tmp_path: Path, step: Any, bring: Any) -> None:
    """Without `flatten` the import succeeds with a permuted linear layer, which the example of the settings mentions."""
    arrays = [{keras_name(name): to_keras(name, a, (12, 2, 2)) for name, a in part.items()} for part in step[:2]]
    result = bring(write(tmp_path / "a.npz", arrays[0]), write(tmp_path / "b.npz", arrays[1]), keras_settings(step[0], ""))
    assert result.exit_code == 0
    o = read_observation(tmp_path)
    assert torch.equal(o.weights["0.weight"], torch.from_numpy(step[0]["0.weight"]))
    assert not torch.allclose(o.weights["7.weight"], torch.from_numpy(step[0]["7.weight"]))
    assert "flatten" in EXAMPLE.read_text()


NORMED = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4))
"""


def test_batch_norm_without_a_counter_is_imported_into_a_model_of_the_users_code(
    tmp_path: Path, bring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_net.py").write_text(NORMED)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = np.random.default_rng(0)
    shapes = {"0.weight": (2, 1, 3, 3), "0.bias": (2,), "1.weight": (2,), "1.bias": (2,), "3.weight": (4, 72), "3.bias": (4,)}
    statistics = {"1.running_mean": np.float32([1, 2]), "1.running_var": np.float32([3, 4])}
    sent = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()} | statistics
    back = {name: a + np.float32(0.5) for name, a in sent.items()}
    files = write(tmp_path / "a.npz", sent), write(tmp_path / "b.npz", back)
    unstated = SETTINGS.replace("lenet_dlg", "their_net:net")
    settings = unstated.replace("data.shape", 'training.mode = "eval"\ndata.shape')
    refused = bring(*files, settings=settings)
    assert refused.exit_code == 2
    assert "imported only with your permission: if you trust it, repeat the command with --model their_net:net" in join_lines(
        refused.stderr
    )
    refused = bring(*files, "", "--model", "their_net:net", settings=unstated)
    assert (refused.exit_code, "set training.mode to 'train' if they call net.train()" in join_lines(refused.stderr)) == (2, True)
    nameless = settings.replace('model = "their_net:net"\n', "")
    assert nameless != settings
    result = bring(*files, "", "--model", "their_net:net", settings=nameless)
    assert result.exit_code == 0, result.stderr
    assert "--attack cpl --model their_net:net" in join_lines(result.stdout)
    o = read_observation(tmp_path)
    assert set(o.weights) == set(shapes)
    assert [o.buffers["1.running_var"].tolist(), o.buffers_after["1.running_var"].tolist()] == [[3, 4], [3.5, 4.5]]
    assert (o.buffers["1.num_batches_tracked"].dtype, int(o.buffers["1.num_batches_tracked"])) == (torch.int64, 0)
    replayed = replay(tmp_path, "--model", "their_net:net")
    assert replayed.exit_code == 0, replayed.stderr


def replay(tmp_path: Path, *options: str) -> Result:
    search = ("--attack", "cpl", "--set", "steps=3", "--no-null", "--device", "cpu")
    return run_attacker("replay", tmp_path / "out", *search, *options)


def test_an_imported_update_can_be_attacked(tmp_path: Path, step: Any, bring: Any) -> None:
    assert bring(write(tmp_path / "a.npz", step[0]), write(tmp_path / "b.npz", step[1])).exit_code == 0
    result = replay(tmp_path)
    assert result.exit_code == 0, result.stderr
    from attacker.reconstruction import Reconstruction

    (file,) = (tmp_path / "out" / "reconstructions").rglob("00001-imported.safetensors")
    found = Reconstruction.read(file)
    assert (tuple(found.x.shape), found.y.tolist()) == ((1, 1, 8, 8), [2])
    assert found.loss[-1] < found.loss[0]


def test_a_second_import_into_one_folder_is_refused(tmp_path: Path, step: Any, bring: Any) -> None:
    files = write(tmp_path / "a.npz", step[0]), write(tmp_path / "b.npz", step[1])
    assert bring(*files).exit_code == 0
    again = bring(*files)
    assert again.exit_code == 2
    assert "holds a recording already; choose another folder, or remove it with" in join_lines(again.stderr)


def test_the_example_of_the_settings_can_be_read_also_with_its_commented_lines(tmp_path: Path) -> None:
    from fedsim.commands.import_updates import ImportSettings

    text = EXAMPLE.read_text()
    assert (ImportSettings.read(EXAMPLE).model.name, ImportSettings.read(EXAMPLE).layout) == ("lenet_cpl", "torch")
    (tmp_path / "all.toml").write_text(re.sub(r"^# (names|layout|flatten)", r"\1", text, flags=re.MULTILINE))
    settings = ImportSettings.read(tmp_path / "all.toml")
    assert (settings.layout, settings.flatten) == ("keras", {"9.weight": (12, 8, 8)})
    state = models.build(ModelSpec(name="lenet_cpl"), settings.data).state_dict()
    assert state["9.weight"].shape[1] == 12 * 8 * 8
    assert set(settings.names.values()) <= set(state)
