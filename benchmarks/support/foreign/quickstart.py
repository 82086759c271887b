"""Attacks on the app of Flower's PyTorch quickstart, recorded by one additional line, beside their nulls.

Ten clients train the template's network with the template's settings: batches of 32, momentum 0.9, one local epoch, learning rate
0.1. The same app then takes one step on one example in each client. The app is in tests/foreign/quickstart and reads
CIFAR-10 from a file, because nothing can be downloaded here. The file holds CIFAR-10 images of --data from the part "report", on
which no setting was chosen (see `support.splits`), or embedded photographs if --data lacks CIFAR-10.

`psnr` is the mean over those of a client's examples that a reconstruction was assigned to; `null` is this mean for the same
attack without the update, and `surplus` is `psnr` minus `null`. `labels` is the share of a client's labels that are among the
inferred labels, counted with repetitions. `examples` is the number of examples behind the update that the server assumes, and
`reported` the number that the client reported. The attack is `exact`, which tries closed forms before a search by
inverting_gradients with the given number of iterations; `route` is the closed form or search that gave the answer.
"""

import logging
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp.strategy import FedAvg
from support.contract import Options, TableAndSummary, measure_cpu
from support.splits import Images, load_images
from torch import Tensor

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.replay.replay import Replay
from attacker.scoring.assignment import assign_reconstructions
from attacker.scoring.metrics import psnr
from fedsim.engine import engines
from fedsim.recording import DataSpec, Observation, Recording, Training
from fedsim.server import record

APP_FOLDER = Path(__file__).parents[3] / "tests" / "foreign" / "quickstart"
DATA_SPEC = DataSpec(shape=(3, 32, 32), num_classes=10, mean=(0.5,) * 3, std=(0.5,) * 3)
NUM_CLIENTS, NUM_EXAMPLES, NUM_EXAMPLES_QUICK, LEARNING_RATE = 10, 1600, 60, 0.1


@dataclass(frozen=True, kw_only=True)
class AppSetting:
    """The settings of one run of Flower's quickstart app, and of the attack on its updates.

    name: of the setting in the table. steps: number of local steps of each client; None for one whole epoch.
    attacked: number of clients whose updates are attacked. iterations: number of iterations of the attack's search.
    """

    name: str
    batch_size: int
    steps: int | None
    attacked: int
    iterations: int

    @property
    def training(self) -> Training:
        """The clients' training settings, as stated in the recording."""
        epochs = 1 if self.steps is None else None
        return Training(
            learning_rate=LEARNING_RATE, batch_size=self.batch_size, epochs=epochs, steps=self.steps, momentum=0.9, mode="train"
        )


def measure_quickstart(options: Options) -> TableAndSummary:
    """Attack the app with the template's settings and with one step on one example; return a row per client, and a summary.

    The summary holds, for each setting, the mean surplus: the PSNR minus the PSNR of the null, in dB.
    """
    settings = [
        AppSetting(name="template", batch_size=32, steps=None, attacked=1, iterations=8 if options.quick else 150),
        make_one_step(attacked=2 if options.quick else 6, iterations=150 if options.quick else 1200),
    ]
    drawn = draw_images(options)
    rows = measure_settings(settings, drawn, options)
    by_name = {setting.name: [row["surplus"] for row in rows if row["setting"] == setting.name] for setting in settings}
    summary = {f"{name.replace(' ', '_')}_surplus_db": sum(found) / len(found) for name, found in by_name.items()}
    return rows, {**summary, "data": drawn.name, "part": drawn.part}


def draw_images(options: Options) -> Images:
    """Return the images that are divided among the clients: CIFAR-10's or, if --data lacks them, embedded photographs."""
    return load_images(options, "cifar10", NUM_EXAMPLES_QUICK if options.quick else NUM_EXAMPLES)


def make_one_step(*, attacked: int, iterations: int) -> AppSetting:
    """Return the setting "one step", in which each client takes one step on one example."""
    return AppSetting(name="one step", batch_size=1, steps=1, attacked=attacked, iterations=iterations)


def measure_settings(settings: Sequence[AppSetting], drawn: Images, options: Options) -> list[dict[str, Any]]:
    """Run the app on images with each of the settings, attack it, and return a row for each client that was attacked.

    For the rest of the process, the app's folder is put on the import path, Flower's log messages below critical are silenced,
    and the environment variable QUICKSTART_DATA names the file with the images, which is deleted at the end.
    """
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    sys.path.insert(0, str(APP_FOLDER))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "examples.npz"
        replace(drawn, y=drawn.y % DATA_SPEC.num_classes).write(path)
        os.environ["QUICKSTART_DATA"] = str(path)
        return [
            row
            for setting in settings
            for row in _measure_setting(setting, Path(folder) / setting.name.replace(" ", "-"), options)
        ]


def _measure_setting(setting: AppSetting, folder: Path, options: Options) -> list[dict[str, Any]]:
    import client_app
    import server_app

    random.seed(options.seed)
    strategy = record(FedAvg(fraction_evaluate=0.0), folder, model="task:Net", training=setting.training, data=DATA_SPEC)
    clients = client_app.make_app(batch_size=setting.batch_size, limit=None, momentum=0.9, steps=setting.steps)
    engines.run_local(server_app.make_app(strategy, rounds=1, lr=LEARNING_RATE, seed=options.seed + 2), clients, NUM_CLIENTS)
    recording = Recording(folder / "recording")
    chosen = recording.read_rows()[: setting.attacked]
    names = frozenset(row.client for row in chosen)
    folders, seconds = [], 0.0
    for null in (False, True):
        arguments = {"fallback": "inverting_gradients", "steps": setting.iterations}
        spec = AttackSpec(name="exact", arguments=arguments, null=null)
        with measure_cpu() as clock:
            replay = Replay(
                recording=recording, spec=spec, out=folder / "found", clients=names, seed=options.seed, device=options.device
            )
            folders.append(replay.run().folder)
        seconds += clock.seconds
    rows = []
    for row in chosen:
        x, y = _find_truth(recording.read_observation(row), setting)
        found, null = (Reconstruction.read(folder / f"{row.key}.safetensors") for folder in folders)
        scores = [_average_psnr(one.x, x) for one in (found, null)]
        shared = Counter(found.y.tolist()) & Counter(y.tolist())
        rows.append(
            {
                "setting": setting.name,
                "batch": setting.batch_size,
                "reported": row.reported,
                "examples": row.num_examples,
                "iterations": setting.iterations,
                "route": found.route,
                "psnr": scores[0],
                "null": scores[1],
                "surplus": scores[0] - scores[1],
                "labels": shared.total() / len(y),
                "seconds": seconds / len(chosen),
            }
        )
    return rows


def _average_psnr(x: Tensor, truth: Tensor) -> float:
    order = assign_reconstructions(x, truth)
    kept = [i for i, found in enumerate(order) if found is not None]
    return float(psnr(torch.stack([x[found] for found in order if found is not None]), truth[kept]).mean())


def _find_truth(observation: Observation, setting: AppSetting) -> tuple[Tensor, Tensor]:
    """Return the examples (N, 3, 32, 32) that the observed client trained on, in [0, 1], and their labels (N,).

    The recording does not say which examples a client holds. The training of each client is repeated, and the client is taken
    whose update is nearest to the observed one.
    """
    import task

    def measure_difference(client: int) -> float:
        network = task.Net()
        network.load_state_dict(dict(observation.weights))
        loader, _ = task.load_data(client, NUM_CLIENTS, setting.batch_size)
        task.train(network, loader, 1, LEARNING_RATE, momentum=0.9, steps=setting.steps)
        trained = {name: p.detach() - observation.weights[name] for name, p in network.named_parameters()}
        return sum(float((trained[name] - u).square().sum()) for name, u in observation.update.items())

    x, y = task.load_data(min(range(NUM_CLIENTS), key=measure_difference), NUM_CLIENTS, 1)[0].dataset.tensors
    count = len(x) if setting.steps is None else setting.steps * setting.batch_size
    return x[:count] / 2 + 0.5, y[:count]
