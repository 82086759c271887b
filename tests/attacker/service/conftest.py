"""Fixtures of tests of the service: a federation on disk, attacked and scored, and the application, called without a socket."""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from federations import federate

from attacker.attacks import AttackSpec
from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from attacker.service.http.app import make_app, make_components
from attacker.service.http.dependencies import ServiceComponents
from attacker.service.jobs.queue import Queue
from attacker.service.settings import ServiceSettings
from fedsim.recording import Recording


@pytest.fixture(scope="session")
def federated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two rounds of three clients, attacked by `exact` and its null, and scored; tests must not change it."""
    run = federate(tmp_path_factory.mktemp("federated") / "digits", rounds=2, model="lenet_dlg", clients=3)
    recording = Recording(run / "recording")
    for null in (False, True):
        Replay(recording=recording, spec=AttackSpec(name="exact", null=null), out=run / "reconstructions").run()
    scorer = Scorer(run, [run / "truth"])
    for source in sorted((run / "reconstructions").iterdir()):
        scorer.score(source)
    return run


@pytest.fixture
def root(federated: Path, tmp_path: Path) -> Path:
    """Folder of runs (the service's root) with a copy of that run, `digits`."""
    shutil.copytree(federated, tmp_path / "root" / "digits")
    return tmp_path / "root"


class Client:
    """A client of an application without watchers and workers. Call `scan` to index the root; requests come from localhost."""

    def __init__(self, app: FastAPI, base: str = "http://localhost:8600") -> None:
        self.app, self.base = app, base

    @property
    def components(self) -> ServiceComponents:
        components: ServiceComponents = self.app.state.components
        return components

    def scan(self) -> None:
        self.components.catalogue.scan()

    def __call__(self, path: str, method: str = "GET", **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=self.base) as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())

    def json(self, path: str, **options: Any) -> Any:
        """Return the JSON of a response, after checking its status."""
        answer = self(path if path.startswith("/") else f"/api/v1/{path}", **options)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="session")
def application() -> FastAPI:
    """Application of the service, made once, as making its routes is slow."""
    return make_app()


@pytest.fixture
def ask_of() -> Callable[[FastAPI], Client]:
    """Function that makes a client of an application without changing it."""
    return Client


@pytest.fixture
def ask(root: Path, application: FastAPI) -> Iterator[Callable[..., Client]]:
    """Function that configures the application for `root`, without a token, scans the root once, and returns a client.

    All clients use the configuration of the last call.
    """
    made: list[ServiceComponents] = []

    def make(**settings: Any) -> Client:
        made.append(make_components(ServiceSettings(root=root, workers=0, **{"token": False, **settings})))
        application.state.components = made[-1]
        asked = Client(application)
        asked.scan()
        return asked

    yield make
    for components in made:
        components.queue.close()


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    """Settings of a service with one worker, whose root has the empty folders `photos` and `other`."""
    for name in ("photos", "other"):
        (tmp_path / "root" / name).mkdir(parents=True)
    return ServiceSettings(root=tmp_path / "root", state=tmp_path / "state", workers=1)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    queue = Queue(tmp_path / "queue.sqlite")
    yield queue
    queue.close()
