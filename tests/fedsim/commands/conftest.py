"""Fixtures: a small experiment; and for `fedsim import`, a training step of one client and a function that imports it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_runs import SMALL
from command_line import run_fedsim
from state_dicts import RATE, SETTINGS, Arrays, network
from torch import Tensor, nn
from typer.testing import Result


@pytest.fixture
def step() -> tuple[Arrays, Arrays, dict[str, Tensor]]:
    """Weights before and after one step on one image, and the gradient of that step."""
    torch.manual_seed(0)
    model = network()
    before = {name: t.detach().clone().numpy() for name, t in model.state_dict().items()}
    nn.functional.cross_entropy(model(torch.rand(1, 1, 8, 8)), torch.tensor([2])).backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return before, {name: t.detach().numpy() for name, t in model.state_dict().items()}, gradient


@pytest.fixture
def bring(tmp_path: Path) -> Callable[..., Result]:
    """A function that runs `fedsim import` on two files with `SETTINGS`, to which `more` is appended, into the folder `out`."""

    def go(before: Path, after: Path, more: str = "", *options: str, settings: str = SETTINGS) -> Result:
        (tmp_path / "settings.toml").write_text(settings + more)
        to = ("--settings", tmp_path / "settings.toml", "--out", tmp_path / "out")
        return run_fedsim("import", before, after, *to, *options)

    return go


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of a small experiment in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"
