"""The federation that is run for each setting of a defense, to measure accuracy, privacy and the success of attacks.

16 clients hold part of MNIST at half its resolution; the network is CPL's LeNet with tanh. Unless a defense needs another setup,
each client takes one step on one example in each of 60 rounds, and the updates of the first round are recorded, to be attacked.
For secure aggregation, a few clients are drawn in each of 180 rounds, and several rounds are recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from support.contract import Options
from support.splits import Part, load_images

from defenses import global_norm
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines

NUM_CLIENTS = 16
NUM_ROUNDS = 60
LEARNING_RATE = 0.3
SUM_LEARNING_RATE = 0.1
"""Learning rate of federations whose rounds have only a few examples."""
NUM_TRAINED, NUM_HELD_OUT, NUM_PUBLIC = 2560, 1000, 640
PIXEL_MEAN, PIXEL_STD = 0.13, 0.3
"""Mean and standard deviation of the pixels of MNIST, with which the network normalises its input."""


@dataclass(frozen=True)
class DataFiles:
    """The .npz files with the images of a federation.

    private: of the clients. held_out: for accuracy. public: for the defense InstaHide, which mixes them in. name: of the data
    set. part: "tuning", "validation" or "report", from which the clients' and the held-out images are (`support.splits.Part`);
    "embedded" if shipped data replace a missing set.
    """

    private: Path
    held_out: Path
    public: Path
    part: str
    name: str


@dataclass(frozen=True)
class Federation:
    """A federation that has run.

    accuracy: on the held-out images, after the last round. epsilon: of differential privacy over all rounds; "infinity" if there
    is no guarantee, and None if none was computed. bytes_up: bytes that all clients together sent in the first round.
    """

    run: FederationRun
    accuracy: float
    epsilon: float | str | None
    bytes_up: int

    @property
    def recording(self) -> Recording:
        """The recording of what the federation's server saw."""
        return Recording(self.run.out / "recording")


def write_data(options: Options, folder: Path, part: Part) -> DataFiles:
    """Write the clients' images, the held-out images for accuracy, and the public images of InstaHide to files in `folder`.

    Clients' and held-out images are different images of `part`, public images are of the validation part; with `--quick` there
    are fewer. If MNIST is missing, all are drawn from the same embedded digits, with repetitions.
    """
    share = 8 if options.quick else 1
    own = load_images(options, "mnist", (NUM_TRAINED + NUM_HELD_OUT) // share, part=part)
    public = load_images(options, "mnist", NUM_PUBLIC // share, part="validation")
    cut = NUM_TRAINED // share
    files = {"private": own.of(range(cut)), "held_out": own.of(range(cut, len(own))), "public": public}
    for name, one in files.items():
        small = torch.nn.functional.avg_pool2d(one.x, 2) if min(one.x.shape[2:]) > 14 else one.x
        replace(one, x=small).write(folder / f"{name}.npz")
    paths = {name: folder / f"{name}.npz" for name in files}
    return DataFiles(**paths, part=own.part, name=own.name)


def make_settings(
    data: DataFiles, *, attacked: int, batch: int = 1, cohort: int | None = None, quick: bool = False
) -> dict[str, Any]:
    """Return the settings of an experiment without a defense.

    attacked: without `cohort`, number of clients that are recorded, in the first round only; with `cohort`, number of rounds,
              from the first on, that are recorded, each with all drawn clients or their secure sum.
    batch:    number of examples per client step. cohort: number of clients drawn in each round; None for all.
    """
    rounds = 4 if quick else NUM_ROUNDS
    recorded = {"rounds": "1", "clients": str(attacked)} if cohort is None else {"rounds": f"1-{min(attacked, rounds)}"}
    return {
        "seed": 0,
        "rounds": rounds if cohort is None or quick else 3 * rounds,
        "model": {"name": "lenet_cpl", "activation": "tanh"},
        "data": {"name": "npz", "train": str(data.private), "test": str(data.held_out), "mean": [PIXEL_MEAN], "std": [PIXEL_STD]},
        "clients": {"count": NUM_CLIENTS, "fraction": 1.0 if cohort is None else cohort / NUM_CLIENTS},
        "training": {"learning_rate": LEARNING_RATE if cohort is None else SUM_LEARNING_RATE, "batch_size": batch, "steps": 1},
        "record": recorded,
    }


def federate(experiment: Mapping[str, Any], out: Path, device: str) -> Federation:
    """Run the federation of an experiment's settings in this process, and return its results.

    out: folder of its recording and metrics.
    """
    run = FederationRun(experiment=validate(dict(experiment), source=out.name), out=out, device=device, client_seed=0)
    engine.run(run, engine="local")
    metrics = read_json_lines(out / "metrics.jsonl")
    last, first = metrics[-1], next(row for row in metrics if "bytes_up" in row)
    return Federation(run, last["accuracy"], last.get("privacy", {}).get("epsilon"), first["bytes_up"])


def measure_units(federation: Federation) -> dict[str, float]:
    """Return a dict with the size of a federation's recorded updates.

    Key "norm": their median L2 norm. Key "rms": the root mean square of the coordinates of an update with this norm.
    """
    recording = federation.recording
    norm = median(float(global_norm(one.update)) for one in recording.read_observations())
    coordinates = sum(t.numel() for t in recording.read_sent(1).weights.values())
    return {"norm": norm, "rms": norm / coordinates**0.5}
