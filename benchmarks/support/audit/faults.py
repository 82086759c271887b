"""Faults that are planted in federations, to test whether an audit reports them."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Generator, nn

from defenses.base import Defense, Update, identity, stateless
from defenses.spec import DEFENSES
from fedsim.recording.files import read_json_lines

NOISE_DEFENSE = "clip(0.5) | gaussian(0.05)"


@dataclass(frozen=True)
class Fault:
    """A deliberate fault, and the identifier of the audit's check (`Finding.rule`) that must report it.

    settings: keys of the experiment that differ from the benchmark's base experiment. faulty: dict from a defense's name to the
              function that builds what clients run instead.
    report:   function that falsifies metrics.jsonl in the folder of the finished run; by default nothing is falsified.
    """

    name: str
    rule: str
    settings: dict[str, Any]
    faulty: dict[str, Callable[..., Defense]]
    report: Callable[[Path], None] = lambda run: None


def constant_noise(std: float) -> Defense:
    """Return a defense that adds Gaussian noise of standard deviation `std`, drawn from the same seed for every message."""
    return stateless(lambda update, rng: _add_noise(update, std, Generator().manual_seed(7)))


def partial_noise(std: float) -> Defense:
    """Return a defense that adds Gaussian noise of standard deviation `std` to some entries of each tensor.

    The last fifth of the flattened tensor's entries, rounded down, gets no noise.
    """

    def add(update: Update, rng: Generator) -> Update:
        noised = _add_noise(update, std, rng)
        found = {}
        for name, values in update.items():
            flat = noised[name].flatten().clone()
            cut = flat.numel() - flat.numel() // 5
            flat[cut:] = values.flatten()[cut:]
            found[name] = flat.reshape(values.shape)
        return found

    return stateless(add)


def _add_noise(update: Update, deviation: float, rng: Generator) -> Update:
    return {name: values + deviation * torch.randn(values.shape, generator=rng) for name, values in update.items()}


def reset_epsilon(run: Path) -> None:
    """Replace the epsilon in each row of metrics.jsonl, which is over all rounds so far, by the epsilon of that round alone."""
    _rewrite_metrics(run, lambda privacy, number: {**privacy, "epsilon": privacy["epsilon_round"]})


def count_one_use(run: Path) -> None:
    """Replace the epsilon reported after round n by the epsilon after round n / 2, rounded up.

    This is as if only one of the two local epochs of each round counted as a use of the data.
    """
    rows = read_json_lines(run / "metrics.jsonl")
    known = {row["round"]: row["privacy"]["epsilon"] for row in rows if "privacy" in row}
    _rewrite_metrics(run, lambda privacy, number: {**privacy, "epsilon": known[(number + 1) // 2]})


def _rewrite_metrics(run: Path, change: Callable[[dict[str, Any], int], dict[str, Any]]) -> None:
    path = run / "metrics.jsonl"
    rows = read_json_lines(path)
    for row in rows:
        if "privacy" in row:
            row["privacy"] = change(row["privacy"], row["round"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def imprinted(shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Return a network whose first layer is an imprint layer: all neurons compare the mean pixel with different thresholds."""
    size = torch.Size(shape).numel()
    first = nn.Linear(size, 64)
    with torch.no_grad():
        first.weight.fill_(1 / size)
        first.bias.copy_(-torch.linspace(0, 1, 64))
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(64, size), nn.ReLU(), nn.Linear(size, num_classes))


TWO_EPOCH_TRAINING = {"batch_size": 8, "epochs": 2, "learning_rate": 0.05}
FAULTS = (
    Fault("defense returns its input", "defense-not-applied", {"defense": "top_k(0.1)"}, {"top_k": lambda share: identity}),
    Fault("noise reseeded by a constant", "noise-reused", {"defense": NOISE_DEFENSE}, {"gaussian": constant_noise}),
    Fault("some coordinates without noise", "noise-missing", {"defense": NOISE_DEFENSE}, {"gaussian": partial_noise}),
    Fault("epsilon reset every round", "epsilon-understated", {"defense": NOISE_DEFENSE}, {}, reset_epsilon),
    Fault(
        "composition misses the second use of the data",
        "epsilon-understated",
        {"gradient": "dp_sgd(max_norm=1, noise=1.0)", "training": TWO_EPOCH_TRAINING},
        {},
        count_one_use,
    ),
    Fault("tampered weights", "weights-tampered", {"model": f"{__name__}:imprinted"}, {}),
)
SOUND_SETTINGS: tuple[dict[str, Any], ...] = (
    {"defense": "clip(0.2)"},
    {"defense": "clip_each(0.1)"},
    {"defense": NOISE_DEFENSE},
    {"defense": "clip(0.5) | laplace(0.05)"},
    {"defense": "gaussian(snr_db=0)"},
    {"defense": "top_k(0.1)"},
    {"defense": "prune(0.8)"},
    {"defense": "random_k(0.3)"},
    {"defense": "sign()"},
    {"defense": "qsgd(levels=8)"},
    {"defense": "uniform(4)"},
    {"gradient": "dp_sgd(max_norm=1, noise=1.0)", "training": TWO_EPOCH_TRAINING},
)


@contextmanager
def plant_fault(fault: Fault) -> Iterator[None]:
    """Replace implementations of defenses by those of `fault.faulty` inside the `with` block, in which clients are run."""
    kinds = {name: replace_defense(DEFENSES[name], made) for name, made in fault.faulty.items()}
    with patch.dict(DEFENSES._builtin, kinds):
        yield


def replace_defense(kind: Any, made: Callable[..., Defense]) -> Any:
    """Return a copy of `kind`, an entry of the registry of defenses, with the implementation `made`."""
    return kind._replace(defense=made)
