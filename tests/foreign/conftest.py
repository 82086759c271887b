"""Fixtures that run and record a third party's Flower app. The app in quickstart/ imports nothing of this project."""

import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from torch import Tensor

from fedsim.engine import engines as engine
from fedsim.recording import DataSpec, Observation, Recording, Training
from fedsim.server import record

DATA = DataSpec(shape=(3, 32, 32), num_classes=10, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
RATE = 0.05
MODULES = ("task", "client_app", "server_app")


@pytest.fixture(autouse=True)
def _restored_global_state() -> Iterator[None]:
    state, level = random.getstate(), logging.getLogger("flwr").level
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(state)
    logging.getLogger("flwr").setLevel(level)


@dataclass
class App:
    """The modules of the quickstart app, and functions that run it, record it and repeat its training."""

    task: ModuleType
    client_app: ModuleType
    server_app: ModuleType
    folder: Path

    def run(self, strategy: Strategy, *, clients: int = 3, rounds: int = 2, net: str = "Net", **client: Any) -> Result:
        """Run a federation with fixed seeds for all that Flower draws; return Flower's result."""
        random.seed(7)
        np.random.seed(7)
        results: list[Result] = []
        network = getattr(self.task, net)
        server = self.server_app.make_app(strategy, net=network, rounds=rounds, lr=RATE, done=results.append)
        engine.run_local(server, self.client_app.make_app(network, **client), clients)
        return results[0]

    def record(self, strategy: Strategy | None = None, *, net: str = "Net", defense: str = "", **options: Any) -> Strategy:
        """Return `strategy` after the one line that a user adds, so that it records in `folder`."""
        chosen = strategy or FedAvg(fraction_evaluate=0.0)
        facts = {"training": Training(learning_rate=RATE, batch_size=1, steps=1, mode="train"), "data": DATA, **options}
        return record(chosen, self.folder, model=f"task:{net}", defense=defense, **facts)

    @property
    def recording(self) -> Recording:
        return Recording(self.folder / "recording")

    def observations(self, **selection: Any) -> list[Observation]:
        """Return the recorded observations; fail if there are none, so that no loop over them passes without a check."""
        found = list(self.recording.read_observations(**selection))
        assert found
        return found

    def example(self, client: int, clients: int = 3, limit: int = 1) -> tuple[Tensor, Tensor]:
        """Return the examples that a client trains on: x in [0, 1], and y."""
        images, labels = self.task.load_data(client, clients, limit, limit)[0].dataset.tensors
        return images / 2 + 0.5, labels

    def trained(self, observation: Observation, client: int, *, net: str = "Net", clients: int = 3, mode: bool = True) -> Any:
        """Repeat a client's training from the weights that an observation says were sent; return the state dict after it."""
        model = getattr(self.task, net)()
        model.load_state_dict({**observation.weights, **observation.buffers})
        loader, _ = self.task.load_data(client, clients, 1, 1)
        self.task.train(model, loader, 1, RATE, mode=mode)
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    def matched(self, observation: Observation, **options: Any) -> tuple[int, dict[str, Tensor]]:
        """Return the client whose repeated training is most similar to the observed update, and its state dict afterwards."""
        candidates = [(client, self.trained(observation, client, **options)) for client in range(options.get("clients", 3))]
        seen = torch.cat([u.flatten() for u in observation.update.values()])

        def likeness(candidate: tuple[int, dict[str, Tensor]]) -> float:
            true = torch.cat([(candidate[1][name] - observation.weights[name]).flatten() for name in observation.update])
            return float(torch.cosine_similarity(seen, true, dim=0))

        return max(candidates, key=likeness)

    def true_update(self, observation: Observation) -> dict[str, Tensor]:
        """Return the update of the client behind an observation, before any defense."""
        _, after = self.matched(observation)
        return {name: after[name] - observation.weights[name] for name in observation.update}


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.syspath_prepend(str(Path(__file__).with_name("quickstart")))
    from importlib import import_module

    loaded = [import_module(name) for name in MODULES]
    yield App(*loaded, folder=tmp_path / "theirs")
    for name in MODULES:
        sys.modules.pop(name, None)
