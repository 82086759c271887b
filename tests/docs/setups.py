"""Functions that make recordings, files and objects for the code blocks of a page. A comment above a block names them."""

import contextlib
import json
import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from federations import federate, make_replay
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from PIL import Image
from started_service import DOCUMENTED_ADDRESS, StartedService

from attacker.attacks import AttackSpec
from attacker.commands import demo
from attacker.scoring import Scorer
from fedsim import models
from fedsim.deployment.certificates import make_server
from fedsim.engine import engines
from fedsim.recording import DataSpec, ModelSpec, Recording, Training
from fedsim.server import record


@dataclass(kw_only=True)
class Page:
    """A page under test.

    names: the namespace of its Python blocks. replaced: values in its shell blocks, such as a client's name, and the
    values to put in their place.
    """

    folder: Path
    names: dict[str, Any]
    monkeypatch: pytest.MonkeyPatch
    service: StartedService
    replaced: dict[str, str] = field(default_factory=dict)


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONE_STEP = {"learning_rate": 0.1, "batch_size": 1, "steps": 1}
RUNS: dict[str, dict[str, Any]] = {
    "images": {"rounds": 2, "model": "lenet_dlg", "data": "digits", "clients": {"count": 2}, "training": ONE_STEP},
    "photos": {
        "rounds": 1,
        "model": "lenet_cpl",
        "data": {"name": "photos", "size": 32},
        "clients": {"count": 1},
        "training": ONE_STEP,
    },
    "epochs": {
        "rounds": 8,
        "model": {"name": "mlp", "hidden": [64]},
        "data": {"name": "npz", "train": "noise.npz"},
        "clients": {"count": 2},
        "training": {"learning_rate": 0.1, "batch_size": 3, "steps": 1},
    },
    "sums": {
        "rounds": 12,
        "model": {"name": "mlp", "hidden": [64]},
        "data": {"name": "npz", "train": "noise.npz"},
        "clients": {"count": 6, "fraction": 0.5},
        "training": {"learning_rate": 0.1, "batch_size": 3, "epochs": 1},
        "secure_aggregation": True,
    },
}


def recorded(page: Page) -> None:
    """Make a recording of a small convolutional network, two clients and two rounds."""
    _copy_run(page, "images", "first")


def recorded_photos(page: Page) -> None:
    """Make a recording of one update from one photograph."""
    _copy_run(page, "photos", "first")


def photographs(page: Page) -> None:
    """Write public images, as a folder and as an archive."""
    images = np.random.default_rng(0).integers(0, 256, (3, 40, 40, 3), dtype=np.uint8)
    np.savez("photographs.npz", images=images)
    (page.folder / "photographs").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(page.folder / "photographs" / f"{number}.png")


def candidates(page: Page) -> None:
    """Write an archive of random images of the size of the recorded ones, with labels."""
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez("candidates.npz", images=images, labels=np.arange(60) % 10)


def recorded_epochs(page: Page) -> None:
    """Make a recording of eight rounds with few examples and a network whose first layer is linear."""
    _copy_run(page, "epochs", "first")


def recorded_sums(page: Page) -> None:
    """Make a recording of secure sums over changing sets of clients that use all their examples in each round."""
    _copy_run(page, "sums", "first")


def scored(page: Page) -> None:
    """Make two runs as `recorded` does, attacked by `exact` without a search, and scored."""
    for name in ("first", "second"):
        _copy_run(page, "images", name, scored=True)


def _copy_run(page: Page, kind: str, name: str, *, scored: bool = False) -> None:
    folder = page.folder / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_make_run(kind, scored), folder)
    client = next(row.client for row in Recording(folder / "recording").read_rows() if row.client != "sum")
    page.replaced |= {"3f2a9c01d2e4": client, "3f2a": client}


@cache
def _make_run(kind: str, scored: bool) -> Path:
    folder = Path(mkdtemp())
    run = folder / "run"
    draw = np.random.default_rng(0)
    images = {
        f"{part}_images": draw.integers(0, 255, (count, 8, 8), dtype=np.uint8) for part, count in (("train", 18), ("test", 4))
    }
    labels = {f"{part}_labels": np.arange(count) % 4 for part, count in (("train", 18), ("test", 4))}
    np.savez(folder / "noise.npz", **images, **labels)
    with contextlib.chdir(folder):
        federate(run, **RUNS[kind])
    if scored:
        for null in (False, True):
            spec = AttackSpec(name="exact", arguments={"fallback": "none"}, null=null)
            make_replay(run, spec).run()
        for source in sorted((run / "reconstructions").iterdir()):
            Scorer(run, [run / "truth"]).score(source)
    return run


TASK = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))


app = ClientApp()


@app.train()
def train(msg, context):
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    torch.nn.functional.cross_entropy(net(torch.rand(1, 3, 32, 32) * 2 - 1), torch.tensor([3])).backward()
    torch.optim.SGD(net.parameters(), lr=0.05).step()
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=msg)
"""


def own_app(page: Page) -> None:
    """Write a user's Flower app as `task.py`, and make its strategy, which does not record yet."""
    (page.folder / "task.py").write_text(TASK)
    page.names["strategy"] = FedAvg(fraction_evaluate=0.0)


def run_own_app(page: Page) -> None:
    """Run the user's app with the strategy that the page has made."""
    import task

    strategy, server = page.names["strategy"], ServerApp()
    arrays = ArrayRecord(task.Net().state_dict())
    server.main()(lambda grid, context: strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1))
    engines.run_local(server, task.app, 2)


def recorded_app(page: Page) -> None:
    """Make a recording of the user's app in `runs/mine`."""
    own_app(page)
    training = Training(learning_rate=0.05, batch_size=1, steps=1)
    data = DataSpec(shape=(3, 32, 32), num_classes=10, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    strategy = record(page.names["strategy"], "runs/mine", model="task:Net", training=training, data=data)
    page.names["strategy"] = strategy
    run_own_app(page)


def recorded_elsewhere(page: Page) -> None:
    """Make a recording of the user's app in place of `/srv/runs/theirs`, the folder of another machine."""
    recorded_app(page)
    page.replaced |= {"/srv/runs/theirs": "runs/mine", "/srv/runs": "runs"}


def model_of_the_server(page: Page) -> None:
    """Make a model that no server has manipulated."""
    page.names["model"] = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )


def pictures(page: Page) -> None:
    """Make a folder of pictures in the home directory, which is the page's folder."""
    for name in ("cats", "dogs"):
        (page.folder / "pictures" / name).mkdir(parents=True)


def state_dicts(page: Page) -> None:
    """Write two state dicts as NumPy archives, and the settings to import them."""
    shutil.copy("deploy/import.toml", "settings.toml")
    net = models.build(ModelSpec(name="lenet_cpl"), DataSpec(shape=(3, 32, 32), num_classes=8))
    for name, factor in (("sent", 1.0), ("returned", 0.99)):
        np.savez(f"{name}.npz", **{key: factor * tensor.numpy() for key, tensor in net.state_dict().items()})


def own_images(page: Page) -> None:
    """Write a client's own images, of the shape of the federation's photographs."""
    images = np.random.default_rng(0).integers(0, 255, (12, 32, 32, 3), dtype=np.uint8)
    np.savez("mine.npz", images=images, labels=np.arange(12) % 8)


def public_facts(page: Page) -> None:
    """Copy the public folder of a prepared federation to the page's folder."""
    shutil.copytree("federation/public", "public")


def no_federation(page: Page) -> None:
    """Remove the folder that an earlier block has prepared, as on another machine."""
    shutil.rmtree(page.folder / "federation")


def serving(page: Page) -> None:
    """Start the service on the page's folder of runs, without TLS and without the jobs of earlier blocks.

    Its jobs search for two steps.
    """
    page.service.stop()
    shutil.rmtree("runs/.attacker", ignore_errors=True)  # rules have submitted searches of full length
    page.replaced |= {'"rounds": "1-4"': '"rounds": "1-4", "arguments": {"steps": 2}'}
    page.service.start(["serve", "runs", "--no-stand-by"])


def small_grid(page: Page) -> None:
    """Reduce the grid of experiments to one seed, one batch size, one defense of one strength, and a search of two steps."""
    path = page.folder / "deploy" / "grids" / "digits.toml"
    text = path.read_text()
    for old, new in (
        ("seeds = [0, 1]", "seeds = [0]"),
        ("batch_sizes = [1, 4]", "batch_sizes = [1]"),
        ("clients = 8, tuning_clients = 2", "clients = 2, tuning_clients = 1"),
        (', "top_k(0.05)"', ""),
        ("clip_and_noise", "# clip_and_noise"),
        ("dp_sgd = ", "# dp_sgd = "),
        ("steps = 60", "steps = 2"),
        ("[{ tv = 3e-5 }, { tv = 3e-4 }]", "[{ tv = 3e-5 }]"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    experiment = page.folder / "deploy" / "experiments" / "digits.toml"
    experiment.write_text(experiment.read_text().replace("rounds = 20", "rounds = 1"))


def short_demo(page: Page) -> None:
    """Reduce the demo to one federation of two clients and one round, and two steps of each search."""
    federation = demo.DEMO_FEDERATIONS["single"]
    attacks = tuple((attack, {"steps": 2}) for attack, _ in federation.attacks)
    short = replace(federation, overrides={**federation.overrides, "clients.count": 2, "rounds": 1}, attacks=attacks)
    page.monkeypatch.setattr(demo, "DEMO_FEDERATIONS", {"single": short})


def benchmark_data(page: Page) -> None:
    """Make the interpreter and the benchmarks available on the page, and let them run a small instance without data sets."""
    python = page.folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    (page.folder / "benchmarks").symlink_to(BENCHMARKS)
    page.replaced |= {"--data DIR": "--quick"}


def short_audit(page: Page) -> None:
    """Reduce the budget of the audit that the page starts to one second."""
    page.replaced |= {'"seconds": 600': '"seconds": 1'}


def finished_audit(page: Page) -> None:
    """Wait for the audit that the page has started, and put the id of its job in place of `JOB`."""
    address = f"{DOCUMENTED_ADDRESS}/api/v1/jobs"
    token = (page.folder / "runs" / ".attacker" / "token").read_text()
    while True:
        status, answer = page.service.ask(["curl", "-H", f"Authorization: Bearer {token}", address])
        assert status == 0, answer
        (job,) = (one for one in json.loads(answer)["items"] if "attack" not in one["spec"])
        if job["state"] not in ("queued", "running"):
            break
        time.sleep(0.2)
    page.replaced |= {"JOB": job["id"]}


def certificate(page: Page) -> None:
    """Write a TLS certificate and its key."""
    made = make_server(page.folder / "certificates")
    shutil.copy(made.certificate, "cert.pem")
    shutil.copy(made.key, "key.pem")
