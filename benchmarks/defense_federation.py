"""The federation of each setting of a defense: the one that learns, that privacy is accounted of, and that is attacked.

16 clients hold part of MNIST at half its size. In each of 60 rounds each of them sends the gradient of one example, and the
server steps by their mean; the network is CPL's LeNet with tanh. All updates of the first round are recorded and attacked.
The learning rate was chosen on the tuning part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from contract import Options
from splits import Images, Part, images

from defenses import global_norm
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines

CLIENTS = 16
ROUNDS = 60
LEARNING_RATE = 0.3
RATE_OF_SUMS = 0.1
"""Learning rate where a round has only a few examples."""
TRAINED_ON, HELD_OUT, PUBLIC = 2560, 1000, 640
MEAN, STD = 0.13, 0.3
"""Of the pixels of MNIST, by which the network normalises its input."""


@dataclass(frozen=True)
class Data:
    """Files of one part of a data set. part: that of the images that are trained on, held out and attacked."""

    private: Path
    held_out: Path
    public: Path
    part: str
    name: str


@dataclass(frozen=True)
class Federation:
    """One that has run. accuracy, epsilon: after its last round. bytes_up: of its first one."""

    run: FederationRun
    accuracy: float
    epsilon: float | str | None
    bytes_up: int

    @property
    def recording(self) -> Recording:
        """What its server saw."""
        return Recording(self.run.out / "recording")


def write_data(asked: Options, folder: Path, part: Part) -> Data:
    """Write what clients train on, what accuracy is measured on, and the public images of InstaHide.

    The public images are of the validation part, and so are no client's. `--quick` and embedded data take fewer.
    """
    share = 8 if asked.quick else 1
    own = images(asked, "mnist", (TRAINED_ON + HELD_OUT) // share, part=part)
    public = images(asked, "mnist", PUBLIC // share, part="validation")
    cut = TRAINED_ON // share
    files = {
        "private": own.of(range(cut)),
        "held_out": own.of(range(cut, len(own))),
        "public": public,
    }
    for name, one in files.items():
        _write(folder / f"{name}.npz", one)
    paths = {name: folder / f"{name}.npz" for name in files}
    return Data(**paths, part=own.part, name=own.name)


def _write(path: Path, own: Images) -> None:
    x = own.x
    if min(x.shape[2:]) > 14:
        x = torch.nn.functional.avg_pool2d(x, 2)
    pixels = x.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    np.savez(path, images=pixels, labels=own.y.numpy(), class_names=np.array([str(i) for i in range(own.data.num_classes)]))


def settings(data: Data, *, attacked: int, batch: int = 1, cohort: int | None = None, quick: bool = False) -> dict[str, Any]:
    """Return the experiment without a defense.

    attacked: number of clients recorded in the first round; with a cohort, number of rounds recorded.
    batch:    examples of a client's step. cohort: clients drawn in each round, of all; None for all of them.
    """
    rounds = 4 if quick else ROUNDS
    recorded = {"rounds": "1", "clients": str(attacked)} if cohort is None else {"rounds": f"1-{min(attacked, rounds)}"}
    return {
        "seed": 0,
        "rounds": rounds if cohort is None or quick else 3 * rounds,
        "model": {"name": "lenet_cpl", "activation": "tanh"},
        "data": {
            "name": "npz",
            "train": str(data.private),
            "test": str(data.held_out),
            "mean": [MEAN],
            "std": [STD],
        },
        "clients": {"count": CLIENTS, "fraction": 1.0 if cohort is None else cohort / CLIENTS},
        "training": {"learning_rate": LEARNING_RATE if cohort is None else RATE_OF_SUMS, "batch_size": batch, "steps": 1},
        "record": recorded,
    }


def federate(experiment: Mapping[str, Any], out: Path, device: str) -> Federation:
    """Run a federation in this process."""
    run = FederationRun(experiment=validate(dict(experiment), source=out.name), out=out, device=device, client_seed=0)
    engine.run(run, engine="local")
    metrics = read_json_lines(out / "metrics.jsonl")
    last, first = metrics[-1], next(row for row in metrics if "bytes_up" in row)
    return Federation(run, last["accuracy"], last.get("privacy", {}).get("epsilon"), first["bytes_up"])


def units(federation: Federation) -> dict[str, float]:
    """Measure the median length of a federation's recorded updates, and the root of their mean square."""
    recording = federation.recording
    norm = median(float(global_norm(one.update)) for one in recording.observations())
    coordinates = sum(t.numel() for t in recording.sent(1).weights.values())
    return {"norm": norm, "rms": norm / coordinates**0.5}
