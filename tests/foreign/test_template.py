"""Test of Flower's template app with the call of `record()` added; its download of CIFAR-10 is replaced by a file."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from attacker.attacks.simulation.client import build_network
from fedsim.engine.engines import LocalGrid
from fedsim.recording import Recording

TEMPLATE = Path(__file__).with_name("template")
CLIENTS, EXAMPLES = 3, 10


@pytest.fixture
def _template_is_importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (60, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, 60)
    np.savez(tmp_path / "examples.npz", images=pixels, labels=labels)
    monkeypatch.setenv("FLWR_DATASETS_FILE", str(tmp_path / "examples.npz"))
    monkeypatch.setenv("FLWR_DATASETS_EXAMPLES", str(EXAMPLES))
    monkeypatch.syspath_prepend(TEMPLATE)
    monkeypatch.syspath_prepend(TEMPLATE / "stand_in")
    monkeypatch.chdir(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pytorchexample", "flwr_datasets")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_template_is_importable")
def test_the_template_is_recorded_with_the_updates_that_its_server_received(tmp_path: Path) -> None:
    from pytorchexample import client_app, server_app

    config = tomllib.loads((TEMPLATE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] | {"batch-size": 4}
    grid = LocalGrid(client_app.app, CLIENTS)
    for client in grid._contexts.values():
        client.run_config.update(config)
    server_app.app(grid, Context(run_id=grid.run.run_id, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    recording = Recording(tmp_path / "recorded" / "recording")
    observations = list(recording.read_observations())
    assert [observation.num_examples for observation in observations] == [8] * CLIENTS  # four fifths of ten
    assert (recording.manifest.training.batch_size, recording.manifest.training.epochs) == (4, 1)
    mean = torch.load("final_model.pt")
    for name, parameter in build_network(observations[0]).named_parameters():
        updated = [observation.weights[name] + observation.update[name] for observation in observations]
        assert parameter.shape == mean[name].shape
        torch.testing.assert_close(mean[name], torch.stack(updated).mean(dim=0), atol=1e-6, rtol=1e-5)
