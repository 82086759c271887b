"""Figure 9 of ROG (Yue et al. 2022): accuracy of a federation beside what two attacks leave of each defense, as a sweep.

100 clients hold CIFAR-10 images with a Dirichlet(0.5) distribution of classes. Ten are drawn in each of 100 rounds, and each
takes one step on a batch of four images. The server averages the updates and applies FedAdam, since updates of signs or behind
noise have another scale than gradients. The sweep trains one federation per defense, and attacks updates of its first round by
ROG with its enhancer and by Inverting Gradients, both of which model the defense. LPIPS is measured on the pairs that the sweep
keeps.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import tomli_w
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from scipy.spatial import ConvexHull
from support.contract import Options, ResultRow, TableAndSummary, measure_cpu
from support.rog.outcomes import LPIPS_FILE
from support.splits import Images, load_images
from torch import nn

from attacker.scoring import Scorer, Summary, summarise
from attacker.sweep import SweepGrid, read_grid, run_sweep
from attacker.sweep.federations import RECONSTRUCTIONS_FOLDER
from attacker.sweep.grid import GridFederation
from fedsim import models
from fedsim.recording import DataSpec, ModelSpec
from fedsim.server.checkpoint import ServerCheckpoint
from fedsim.training.local import evaluate

TRAINED, HELD_OUT = 3000, 577
"""Number of images of all clients together, of CIFAR-10's training images, and number of those on which accuracy is measured, of
its test images; both of the report part."""
WATCHED = 10
"""Number of held-out images on which the server evaluates after each round. All of them would take as long as the round."""
NETWORK = "support.rog.tradeoff:make_narrow_lenet"
PIXELS: dict[str, Any] = {"mean": (0.5,), "std": (0.25,)}
"""Normalisation of the network's input."""
STRATEGY = {"name": "FedAdam", "eta": 1e-3, "tau": 1e-5}
"""How the server applies averaged updates. Its learning rate was chosen on the tuning part, see the results page; tau is small
beside the values of updates."""
DEFENSES: dict[str, list[Any]] = {
    "Soteria": [{"gradient": "soteria(0.8)"}],
    "PRECODE": [{"network": "precode()"}],
    "top-k": ["rog_top_k(0.95)"],
    "QSGD": ["rog_qsgd(3)"],
    "uniform": ["rog_uniform(3)"],
    "sign": ["sign()"],
    "Fed-CDP": [{"gradient": f"fed_cdp(4, snr_db={snr})"} for snr in (0, -5, -10, -15, -20)],
}
ATTACKS = {"ROG": "tab:red", "Inverting Gradients": "tab:blue"}
"""Names of the attacks in the grid, and the colours of their regions."""
CHANCE = 0.1
"""Accuracy of a guess among ten classes."""
PICTURE_FILE = Path(__file__).parents[3] / "docs" / "tradeoff.png"
DIRECTIONS = {"lpips": "smaller: a better attack", "psnr": "in dB; larger: a better attack"}
SIZE_INCHES = (7.6, 4.6)
LABEL_GAP = 0.036
"""Least distance between the names of two defenses in the picture, as a share of its height."""


def make_narrow_lenet() -> nn.Sequential:
    """Return ROG's LeNet for CIFAR-10 with 64 instead of 512 hidden units, whose derivatives Soteria takes in every step.

    It has two 5x5 convolutions of 32 and 64 channels with biases, each followed by ReLU and 2x2 max pooling, and two linear
    layers without biases.
    """
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(64 * 8 * 8, 64, bias=False), nn.ReLU()),
        nn.Linear(64, 10, bias=False),
    )


def measure_tradeoff(options: Options, folder: Path) -> TableAndSummary:
    """Run the sweep, and score every federation with LPIPS; an interrupted sweep continues.

    The picture is drawn into the folder, and with --picture into `docs/tradeoff.png`, too. Returns one row for each defense and
    attack, and a summary, see `compare_attacks`, which compares PSNR if --data lacks the weights of LPIPS. Raises ValueError if a
    federation failed.
    """
    models.admit(NETWORK)
    private, held_out = load_parts(options)
    grid = write_grid(options, folder, private, held_out)
    with measure_cpu() as clock:
        results = run_sweep(grid, folder / "federations", watch=lambda done: print(f"{done.done} of {done.total}: {done.name}"))
    rows: list[ResultRow] = []
    for federation, result in results:
        if result is None or result.failed:
            reason = "it was not run" if result is None else result.failed
            raise ValueError(
                f"the federation {federation.name} has no result: {reason}; start the benchmark again to continue it"
            )
        name = describe_defense(federation)
        accuracy = measure_accuracy(folder / "federations" / federation.name, federation, held_out, options.seed)
        run = folder / "federations" / federation.name
        for one in score_federation(options, run):
            rows.append({"defense": name, "accuracy": accuracy, **list_scores(one)})
    measure = "lpips" if all(row["lpips"] is not None for row in rows) else "psnr"
    for path in (folder / "tradeoff.png", *([PICTURE_FILE] if "picture" in options.flags else [])):
        draw_regions(rows, measure, path)
    sizes = {"images": len(private), "held_out": len(held_out), "part": private.part}
    return rows, {**compare_attacks(rows, measure), **sizes, "cpu_seconds": clock.seconds}


def load_parts(options: Options) -> tuple[Images, Images]:
    """Return the images of the clients, and those on which accuracy is measured."""
    trained, tested = (80, 40) if options.quick else (TRAINED, HELD_OUT)
    private = load_images(options, "cifar10", trained)
    return private, load_images(options, "cifar10_test", tested, skip=trained if private.part == "embedded" else 0)


def write_grid(options: Options, folder: Path, private: Images, held_out: Images) -> SweepGrid:
    """Write the images, the experiment, and the sweep's grid of defenses and attacks into the folder, and return the grid."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("private", private), ("watched", held_out.take_first(WATCHED))):
        part.write(folder / f"{name}.npz")
    files = {name: str((folder / f"{file}.npz").absolute()) for name, file in (("train", "private"), ("test", "watched"))}
    experiment = {
        "seed": options.seed,
        "rounds": 2 if options.quick else 100,
        "model": {"name": NETWORK},
        "data": {"name": "npz", **PIXELS, **files},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "clients": {"count": 10 if options.quick else 100, "fraction": 0.1 if not options.quick else 0.5},
        "strategy": STRATEGY,
        "training": {"learning_rate": 0.1, "batch_size": 4, "steps": 1},
    }
    steps = (4, 4) if options.quick else (100, 400)
    grid = {
        "experiment": "experiment.toml",
        "seeds": [options.seed],
        "attacked": {"rounds": "1", "clients": 2 if options.quick else 5},
        "defenses": {"top-k": DEFENSES["top-k"]} if options.quick else DEFENSES,
        "attacks": {
            "ROG": {"attack": "rog", "steps": steps[0], "enhancer": "small"},
            "Inverting Gradients": {
                "attack": "inverting_gradients",
                "steps": steps[1],
                "tv": 1e-2,
                "continuation": 1.0,
                "polish": 0.0,
                "give_up": 0.0,
            },
        },
    }
    for name, content in (("experiment", experiment), ("grid", grid)):
        (folder / f"{name}.toml").write_text(tomli_w.dumps(content))
    return read_grid(folder / "grid.toml")


def describe_defense(federation: GridFederation) -> str:
    """Return the name of a defense with what it sets, such as `top-k: rog_top_k(0.95)`."""
    settings = ", ".join(map(str, federation.settings.values()))
    return f"{federation.defense}: {settings}" if settings else federation.defense


def measure_accuracy(run: Path, federation: GridFederation, held_out: Images, seed: int) -> float:
    """Return the share of held-out images that the model of a finished federation classifies correctly.

    run: folder of the federation. seed: of the draws of a random network. Raises ValueError if the run has no checkpoint.
    """
    checkpoint = ServerCheckpoint.read(run / "state")
    if checkpoint is None:
        raise ValueError(f"{run}: there is no checkpoint; delete the folder and start again")
    data = DataSpec(shape=tuple(held_out.x.shape[1:]), num_classes=held_out.data.num_classes, **PIXELS)
    settings = federation.experiment
    model = models.build(ModelSpec(name=settings.model.name, network=settings.network), data)
    torch.manual_seed(seed)
    return evaluate(model, checkpoint.arrays, held_out.x, held_out.y, data, settings.training)["accuracy"]


def score_federation(options: Options, run: Path) -> list[Summary]:
    """Return a summary of the scores of each attack on one federation, with LPIPS if --data has its weights.

    run: folder of the federation, with the reconstructions.
    """
    weights = options.data / LPIPS_FILE if options.data else None
    scorer = Scorer(run, [run / "truth"], lpips_weights=weights if weights and weights.exists() else None)
    sources = sorted(path.parent for path in (run / RECONSTRUCTIONS_FOLDER).glob("*/attack.json"))
    return summarise(row for source in sources for row in scorer.score(source))


def list_scores(one: Summary) -> ResultRow:
    """Return the columns of one attack: its name, numbers of examples and of updates, and mean scores, also of its null.

    A score that was not measured is None. The null is the same attack without the update. other_lpips, other_psnr: scores of what
    the attack found in another client's update, a control, since noise alone lowers LPIPS below the null's. low, high: limits of
    the interval of 95 % of PSNR over updates, None if there are too few of them.
    """
    null = one.null
    limits = (one.psnr.low, one.psnr.high) if one.psnr and one.psnr.is_interval else (None, None)
    return {
        "attack": "ROG" if one.attack == "rog" else "Inverting Gradients",
        "examples": one.examples,
        "updates": one.psnr.clusters if one.psnr else None,
        "lpips": one.lpips.value if one.lpips else None,
        "other_lpips": one.other_lpips.value if one.other_lpips else None,
        "null_lpips": null.lpips.value if null and null.lpips else None,
        "psnr": one.psnr.value if one.psnr else None,
        "other_psnr": one.other_psnr.value if one.other_psnr else None,
        "low": limits[0],
        "high": limits[1],
        "null_psnr": null.psnr.value if null and null.psnr else None,
        "labels": one.label_success.value if one.label_success else None,
    }


def compare_attacks(rows: Sequence[ResultRow], measure: str) -> ResultRow:
    """Return how many defenses there are, for how many of them ROG scores better, and the mean difference of scores.

    The difference is ROG's score minus the score of Inverting Gradients. measure: the compared score, "lpips" (lower is better)
    or "psnr" (higher is better).
    """
    values = {name: {row["defense"]: row[measure] for row in rows if row["attack"] == name} for name in ATTACKS}
    own, other = values.values()
    gaps = [own[defense] - other[defense] for defense in own]
    better = sum(gap < 0 if measure == "lpips" else gap > 0 for gap in gaps)
    return {"measure": measure, "defenses": len(gaps), "rog_better": better, "mean_difference": sum(gaps) / len(gaps)}


def draw_regions(rows: Sequence[ResultRow], measure: str, path: Path) -> None:
    """Draw accuracy beside a measure of leakage, with one point per defense and one region per attack, into the file `path`.

    A region is the convex hull of the attack's points. A grey line joins the points of a defense, and leads to its name at the
    right. Hollow points show the score of what the attack found in another client's update, and dashed lines the mean score of
    each attack's null and the accuracy of a guess. measure: "lpips" or "psnr".
    """
    with mpl.rc_context({"svg.hashsalt": "fedleak rog", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for name, colour in ATTACKS.items():
            own = [row for row in rows if row["attack"] == name]
            points = np.array([[row[measure], row["accuracy"]] for row in own])
            axes.scatter(*points.T, color=colour, label=name, s=16, zorder=3)
            if len(points) > 2 and np.linalg.matrix_rank(points - points[0]) == 2:
                axes.add_patch(Polygon(points[ConvexHull(points).vertices], color=colour, alpha=0.15, linewidth=0))
            controls = [[row[f"other_{measure}"], row["accuracy"]] for row in own if row.get(f"other_{measure}") is not None]
            if controls:
                axes.scatter(*np.array(controls).T, facecolors="none", edgecolors=colour, label=f"{name}, other update", s=16)
            nulls = [row[f"null_{measure}"] for row in own if row.get(f"null_{measure}") is not None]
            if nulls:
                axes.axvline(np.mean(nulls), color=colour, linestyle="--", linewidth=1, label=f"null of {name}")
        axes.axhline(CHANCE, color="#8a8f98", linestyle="--", linewidth=1, label="guess among ten classes")
        axes.set_ylim(0.05, max(row["accuracy"] for row in rows) + 0.05)
        axes.set(xlabel=f"{measure.upper()} of the reconstructions ({DIRECTIONS[measure]})", ylabel="accuracy of the federation")
        axes.spines[["top", "right"]].set_visible(False)
        _name_defenses(axes, rows, measure)
        figure.legend(loc="outside upper center", frameon=False, ncols=3, fontsize=8)
        figure.savefig(path, dpi=160, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)


def _name_defenses(axes: Axes, rows: Sequence[ResultRow], measure: str) -> None:
    """Write the names of defenses at the right of the axes, apart from each other, and join them with their points."""
    low, high = axes.get_ylim()
    gap, at = LABEL_GAP * (high - low), high
    for name in sorted({row["defense"] for row in rows}, key=lambda name: -_find_points(rows, name, measure)[1]):
        places, accuracy = _find_points(rows, name, measure)
        at = min(accuracy, at - gap)
        axes.plot([min(places), max(places)], [accuracy, accuracy], color="#8a8f98", linewidth=0.8, zorder=1)
        axes.annotate(
            shorten_name(name),
            (max(places), accuracy),
            xytext=(1.02, (at - low) / (high - low)),
            textcoords="axes fraction",
            verticalalignment="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": "#c4c8ce", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def _find_points(rows: Sequence[ResultRow], defense: str, measure: str) -> tuple[list[float], float]:
    """Return the scores of the attacks on a defense, and the accuracy of its federation."""
    own = [row for row in rows if row["defense"] == defense]
    return [row[measure] for row in own], own[0]["accuracy"]


def shorten_name(defense: str) -> str:
    """Return the name of a defense in the picture: that before the colon, with the decibels of Fed-CDP's noise."""
    name, _, settings = defense.partition(":")
    _, separator, level = settings.partition("snr_db=")
    return f"{name}, {level.rstrip(')')} dB" if separator else {"none": "no defense"}.get(name, name)
