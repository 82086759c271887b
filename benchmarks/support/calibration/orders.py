"""The calibration of searches whose local steps are in an inferred order: cells, fit of the curve, and its check.

Clients train on several local batches per round. The curve is fitted to images of the tuning part, and checked on other networks
with images of the validation part. Each cell is one client, whose network and start have a seed of their own.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from support.calibration.cases import NETWORKS_MODULE, Cell, JudgedReconstruction, attack_cell
from support.calibration.confidence import make_bins, measure_calibration_error
from support.calibration.curves import fit_route, write_curves
from support.contract import Options, ResultRow, TableAndSummary
from support.splits import Part

from attacker.attacks.confidence import INFERRED_ORDER
from attacker.scoring.statistics import Floats

FOLDER = Path(__file__).parents[3] / "build"
SIGMOIDS, TANH, LEAKY = (("lenet_cpl", {"activation": name}) for name in ("sigmoid", "tanh", "leaky_relu"))
STRIDED, CONVNET, SMOOTH = ((f"{NETWORKS_MODULE}:{name}", {}) for name in ("strided", "convnet", "smooth"))
DENSE, WIDE, DLG = (("mlp", {}), ("cnn6", {}), ("lenet_dlg", {}))
NETWORKS: Mapping[Part, Sequence[tuple[str, Mapping[str, Any]]]] = {
    "tuning": (SIGMOIDS, STRIDED, TANH, CONVNET, SIGMOIDS, STRIDED, DENSE, WIDE),
    "validation": (SIGMOIDS, STRIDED, DLG, TANH, CONVNET, SMOOTH, STRIDED, DENSE, LEAKY, STRIDED),
}
"""Networks of the clients in turn, with their arguments. Three of the validation part are not in the tuning part."""
DATA = ("cifar10", "cifar10", "lfw", "lfw", "cifar100", "mnist")
SIZES = ((4, 2), (4, 2), (4, 2), (6, 3), (6, 3), (8, 4), (10, 5), (4, 1), (6, 2), (8, 2))
"""Number of images of a client, and its batch size."""
RATES, EVALUATIONS = (0.01, 0.03, 0.05, 0.1, 0.1), (600, 1200, 1200, 2400, 2400, 4800)
MAX_WHOLE_EFFORT = 15_000
"""Largest number of evaluations times images for images of 32x32; other searches of these have fewer evaluations."""


class CellDraw(NamedTuple):
    """A draw of cells with a fixed seed.

    count: number of cells. skip: number of examples of each data set to leave out. most: largest number of evaluations.
    """

    seed: int
    count: int
    skip: int
    most: int


DRAWS: Mapping[Part, Sequence[CellDraw]] = {
    "tuning": (CellDraw(101, 8, 150, 4800), CellDraw(102, 24, 300, 1200), CellDraw(104, 24, 600, 1200)),
    "validation": (CellDraw(200, 15, 0, 2400), CellDraw(201, 10, 90, 2400)),
}
RESAMPLES = 1000


def draw_cells(part: Part) -> Iterator[tuple[int, Cell, int]]:
    """Yield seed, cell and number of examples to skip of each client. Settings are drawn with fixed seeds."""
    for draw in DRAWS[part]:
        rng, taken = Random(draw.seed), dict.fromkeys(DATA, draw.skip)
        for k in range(draw.count):
            cell = _draw_cell(rng, draw, *NETWORKS[part][k % len(NETWORKS[part])])
            yield 1000 * draw.seed + k, cell, taken[cell.data]
            taken[cell.data] += cell.examples


def _draw_cell(rng: Random, draw: CellDraw, network: str, arguments: Mapping[str, Any]) -> Cell:
    data, (images, batch) = rng.choice(DATA), rng.choice(SIZES)
    steps = images // batch
    epochs = rng.choice((1, 1, 2)) if 2 * steps <= 4 else 1
    momentum, rate, evaluations = rng.choice((0.0, 0.0, 0.9)), rng.choice(RATES), min(rng.choice(EVALUATIONS), draw.most)
    half = rng.random() > 0.25
    if not half and images * evaluations > MAX_WHOLE_EFFORT:
        evaluations = 2400 if images <= 6 else 1200
    settings = {"steps": evaluations, **({"tv": 3e-3} if rng.random() >= 0.5 and network == CONVNET[0] else {})}
    return Cell(
        attack="inverting_gradients", settings=settings, network=network, arguments=arguments, data=data, batch=batch,
        steps=steps, epochs=epochs, shuffled=True, momentum=momentum, rate=rate, half=half, cases=1,
    )  # fmt: skip


def fit_order_confidence(options: Options) -> TableAndSummary:
    """Fit the curve to clients of the tuning part, write it, and check it on clients of the validation part.

    Answers are recorded in the folder build, and not made again if they are there. With --quick, two clients of each part are
    attacked, and nothing is written. Returns the rows and the summary of `summarise_clients` for the validation part.
    """
    curve = fit_route(_read_answers(options, "tuning"), INFERRED_ORDER, "images")
    if curve is not None and not options.quick:
        write_curves([curve])
    answers = [r for r in _read_answers(options, "validation") if r["route"] == INFERRED_ORDER]
    return summarise_clients([(r["confidence"], r["recovered"]) for r in answers])


def _read_answers(options: Options, part: Part) -> list[ResultRow]:
    """Return the answers to the clients of a part, as dicts; attack those that are not recorded yet."""
    torch.set_num_threads(1)
    attacks, path = list(draw_cells(part)), FOLDER / f"confidence_of_orders_{part}.jsonl"
    if options.quick:
        return [asdict(one) for seed, cell, skip in attacks[:2] for one in _attack(options, part, seed, cell, skip)]
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with path.open("r+") as file:
        done = file.readlines()
        for seed, cell, skip in attacks[len(done) :]:
            done.append(json.dumps([asdict(one) for one in _attack(options, part, seed, cell, skip)]) + "\n")
            file.write(done[-1])
            file.flush()
    return [record for line in done for record in json.loads(line)]


def _attack(options: Options, part: Part, seed: int, cell: Cell, skip: int) -> list[JudgedReconstruction]:
    short = replace(cell, settings={**cell.settings, "steps": 60}) if options.quick else cell
    return list(attack_cell(short, replace(options, seed=seed), part=part, skip=skip))


def summarise_clients(clients: Sequence[tuple[Sequence[float], Sequence[bool]]]) -> TableAndSummary:
    """Return the calibration bins of the decided examples, and a summary.

    clients: confidences and outcomes of the examples of each client. The summary has the numbers of clients and of examples, of
    undecided ones, of recovered and other ones with a confidence of at least 0.9, and the expected calibration error, with the
    95 % interval of a bootstrap over clients.
    """
    pairs = [(np.array(p, dtype=float), np.array(right, dtype=float)) for p, right in clients]
    if not pairs:
        return [], {"clients": 0}
    rng = np.random.default_rng(0)
    drawn = [_measure_error([pairs[k] for k in rng.integers(len(pairs), size=len(pairs))]) for _ in range(RESAMPLES)]
    p, right = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    decided, sure = ~np.isnan(p), p >= 0.9
    low, high = np.quantile(drawn, (0.025, 0.975))
    return make_bins(p[decided], right[decided]), {
        "clients": len(pairs), "examples": len(p), "recovered": int(right.sum()), "undecided": int((~decided).sum()),
        "undecided recovered": int(right[~decided].sum()),
        "sure": int(sure.sum()), "sure, not recovered": int((1 - right[sure]).sum()),
        "ece": _measure_error(pairs), "ece from": float(low), "ece to": float(high),
    }  # fmt: skip


def _measure_error(pairs: Sequence[tuple[Floats, Floats]]) -> float:
    p, right = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return measure_calibration_error(p[~np.isnan(p)], right[~np.isnan(p)])
