"""A real federation on disk, attacked and scored, and the service's application on it, asked without a socket."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from attacker.service.http.app import make_app, make_parts
from attacker.service.http.dependencies import Parts
from attacker.service.settings import ServiceSettings
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording

EXPERIMENT = {
    "rounds": 2,
    "model": "lenet_dlg",
    "data": "digits",
    "clients": {"count": 3},
    "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 1},
}


@pytest.fixture(scope="session")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds of three clients, attacked by `exact` and its null, and scored: not to be changed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("federated") / "digits"
    engine.run(FederationRun(experiment=validate(EXPERIMENT, source="test"), out=run, client_seed=1), engine="local")
    recording = Recording(run / "recording")
    for null in (False, True):
        Replay(recording=recording, spec=AttackSpec(name="exact", null=null), out=run / "reconstructions").run()
    scorer = Scorer(run, [run / "truth"])
    for source in sorted((run / "reconstructions").iterdir()):
        scorer.score(source)
    torch.set_num_threads(threads)
    return run


@pytest.fixture
def root(federated: Path, tmp_path: Path) -> Path:
    """A root with a copy of that run, `digits`."""
    shutil.copytree(federated, tmp_path / "root" / "digits")
    return tmp_path / "root"


class Asked:
    """An application without its watchers and workers: `scan` is theirs. Answers come as from a browser on this machine."""

    def __init__(self, app: FastAPI, base: str = "http://localhost:8600") -> None:
        self.app, self.base = app, base

    @property
    def parts(self) -> Parts:
        parts: Parts = self.app.state.parts
        return parts

    def scan(self) -> None:
        self.parts.catalogue.scan()

    def __call__(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=self.base) as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def json(self, path: str, **options: Any) -> Any:
        """Of an answer that is one."""
        answer = self(path if path.startswith("/") else f"/api/v1/{path}", **options)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="session")
def application() -> FastAPI:
    """Its routes: to make them takes longer than all else."""
    return make_app()


@pytest.fixture
def ask_of() -> Callable[[FastAPI], Asked]:
    """Asks an application as it is."""
    return Asked


@pytest.fixture
def ask(root: Path, application: FastAPI) -> Iterator[Callable[..., Asked]]:
    """The application on `root`, after its first look, without a token; the last one made is the one that answers."""
    made: list[Parts] = []

    def make(**settings: Any) -> Asked:
        made.append(make_parts(ServiceSettings(root=root, workers=0, **{"token": False, **settings})))
        application.state.parts = made[-1]
        asked = Asked(application)
        asked.scan()
        return asked

    yield make
    for parts in made:
        parts.queue.close()
