"""Tests that files which cannot be imported are refused in one line, and that code in them is never run."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import join_lines
from state_dicts import Arrays, network, write


def write_broken(change: Callable[[Arrays], None]) -> Callable[[Path, Any], tuple[Path, Path]]:
    def files(folder: Path, step: Any) -> tuple[Path, Path]:
        after = dict(step[1])
        change(after)
        return write(folder / "a.npz", step[0]), write(folder / "b.npz", after)

    return files


def other(name: str, content: bytes) -> Callable[[Path, Any], tuple[Path, Path]]:
    def files(folder: Path, step: Any) -> tuple[Path, Path]:
        (folder / name).write_bytes(content)
        return write(folder / "a.npz", step[0]), folder / name

    return files


def objects(folder: Path, step: Any) -> tuple[Path, Path]:
    np.savez(folder / "b.npz", **{"0.weight": np.array([{}], dtype=object)})
    return write(folder / "a.npz", step[0]), folder / "b.npz"


def whole_model(folder: Path, step: Any) -> tuple[Path, Path]:
    torch.save(network(), folder / "b.pt")
    return write(folder / "a.npz", step[0]), folder / "b.pt"


@pytest.mark.parametrize(
    ("files", "more", "expected"),
    [
        (
            write_broken(lambda a: a.update({"7.bias": np.float32([1, 2, 3])})),
            "",
            "b.npz: '7.bias' has shape (3,), but the model's has (4,)",
        ),
        (
            write_broken(lambda a: a.pop("7.bias")),
            "",
            "b.npz: no tensor '7.bias'; its other tensors: none; map the names in [names]",
        ),
        (write_broken(lambda a: a["0.bias"].__setitem__(3, np.nan)), "", "b.npz: '0.bias' holds NaN or infinity"),
        (
            write_broken(lambda a: a.update({"0.bias": a["0.bias"].astype(int)})),
            "",
            "has type torch.int64, but the model's tensor has torch.float32",
        ),
        (lambda folder, step: (write(folder / "a.npz", step[0]),) * 2, "", "hold the same weights, so there is no update"),
        (
            write_broken(lambda a: None),
            'names = { "x" = "7.bias" }',
            "a.npz: no tensor 'x', which [names] of the import settings gives for the model's '7.bias'; the file holds 0.bias",
        ),
        (
            write_broken(lambda a: None),
            'names = { "7.bias" = "x" }',
            "the model has no tensor 'x', given for '7.bias'; it has 0.weight",
        ),
        (write_broken(lambda a: None), 'names = { "7.bias" = "0.bias" }', "two of its tensors the same name"),
        (write_broken(lambda a: None), 'flatten = { "7.weight" = [12, 2, 2] }', "flatten requires layout"),
        (write_broken(lambda a: None), 'layout = "keras"', "has shape (5, 5, 12, 1), but the model's has"),
        (
            write_broken(lambda a: None),
            'layout = "keras"\nflatten = { "8.weight" = [1, 2, 2] }',
            "flatten: the model has no tensor '8.weight'",
        ),
        (write_broken(lambda a: None), "data.mena = [0.5]", "settings.toml: data: unknown key 'mena'. Did you mean 'mean'?"),
        (lambda folder, step: (write(folder / "a.npz", step[0]), folder / "no.npz"), "", "no.npz does not exist"),
        (other("b.h5", b"x"), "", "b.h5: unknown kind of file; give .safetensors, .npz or .pt"),
        (other("b.npz", b"PK\x03\x04 no archive"), "", "b.npz: not a NumPy archive"),
        (other("b.safetensors", b"\xff" * 100), "", "b.safetensors cannot be read as a .safetensors file"),
        (other("b.pt", b""), "", "b.pt cannot be read as a .pt file (EOFError); check"),
        (objects, "", "b.npz: array '0.weight' has type object"),
        (
            whole_model,
            "",
            "b.pt is damaged, or holds code or objects besides tensors, which are not loaded for safety; save model.state_dict()",
        ),
    ],
)
def test_wrong_files_and_settings_are_refused_in_one_line_and_nothing_is_written(
    tmp_path: Path, step: Any, bring: Any, files: Any, more: str, expected: str
) -> None:
    result = bring(*files(tmp_path, step), more)
    assert result.exit_code == 2
    assert expected in join_lines(result.stderr)
    assert "Traceback" not in result.stderr
    assert "weights_only" not in result.stderr  # PyTorch's advice would run code in the file
    assert result.stdout == ""
    assert not (tmp_path / "out").exists()


class Hostile:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
def test_code_in_a_file_is_never_executed(tmp_path: Path, step: Any, bring: Any, kind: str) -> None:
    hostile = {"0.weight": Hostile(tmp_path / "executed")}
    if kind == "pickle":
        (tmp_path / "b.pt").write_bytes(pickle.dumps(hostile, protocol=2))
    else:
        torch.save(hostile, tmp_path / "b.pt")
    result = bring(write(tmp_path / "a.npz", step[0]), tmp_path / "b.pt")
    assert result.exit_code == 2
    assert "are not loaded" in join_lines(result.stderr)
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "out").exists()
    torch.load(tmp_path / "b.pt", weights_only=False) if kind == "torch.save" else pickle.loads((tmp_path / "b.pt").read_bytes())
    assert (tmp_path / "executed").exists()  # the file is dangerous: unpickling it runs its code


def test_a_checkpoint_that_contains_a_state_dict_is_refused(tmp_path: Path, step: Any, bring: Any) -> None:
    torch.save({"epoch": 3, "model": {name: torch.from_numpy(a) for name, a in step[1].items()}}, tmp_path / "b.pt")
    result = bring(write(tmp_path / "a.npz", step[0]), tmp_path / "b.pt")
    assert result.exit_code == 2
    assert "b.pt: no tensor '0.weight'" in join_lines(result.stderr)
