"""Figure 9 of ROG (Yue et al. 2022): accuracy of a federation beside what two attacks leave of each defense, as a sweep.

100 clients hold CIFAR-10 images with a Dirichlet(0.5) distribution of classes, and ten are drawn in each of 60 rounds, of the
paper's 100. The network is that of Flower's PyTorch quickstart. Its last layer has 84 inputs, and a step with Soteria takes one
backward pass for each of them. The sweep trains one federation per defense, and attacks updates of its first round by ROG with
its enhancer and by Inverting Gradients, both of which model the defense. LPIPS is measured on the pairs that the sweep keeps.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import tomli_w
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from scipy.spatial import ConvexHull
from support.contract import Options, ResultRow, TableAndSummary, measure_cpu
from support.rog.outcomes import LPIPS_FILE
from support.splits import Images, load_images

from attacker.scoring import Scorer, Summary, summarise
from attacker.sweep import SweepGrid, read_grid, run_sweep
from attacker.sweep.federations import RECONSTRUCTIONS_FOLDER
from attacker.sweep.grid import GridFederation
from fedsim import models

TRAINED, HELD_OUT = 2000, 1000
"""Number of images of all clients together, and of those on which accuracy is measured; both of the report part."""
NETWORK = "support.foreign.networks:QuickstartNet"
"""The network of Flower's PyTorch quickstart."""
DEFENSES: dict[str, list[Any]] = {
    "Fed-CDP": [{"gradient": f"fed_cdp(4, snr_db={snr})"} for snr in (0, -10, -20)],
    "Soteria": [{"gradient": "soteria(0.8)"}],
    "PRECODE": [{"network": "precode()"}],
    "top-k": ["rog_top_k(0.95)"],
    "QSGD": ["rog_qsgd(3)"],
    "uniform": ["rog_uniform(3)"],
    "sign": ["sign()"],
}
ATTACKS = {"ROG": "tab:red", "Inverting Gradients": "tab:blue"}
"""Names of the attacks in the grid, and the colours of their regions."""
SIZE_INCHES = (6.4, 4.2)


def measure_tradeoff(asked: Options, folder: Path) -> TableAndSummary:
    """Run the sweep, score every federation with LPIPS, and draw `tradeoff.svg` into the folder; an interrupted sweep continues.

    Returns one row for each defense and attack, and a summary, see `compare_attacks`, which compares PSNR if --data lacks the
    weights of LPIPS. Raises ValueError if a federation failed.
    """
    models.admit(NETWORK)
    images = load_images(asked, "cifar10", 120 if asked.quick else TRAINED + HELD_OUT)
    grid = write_grid(asked, folder, images)
    with measure_cpu() as clock:
        state = run_sweep(grid, folder / "federations", watch=lambda done: print(f"{done.done} of {done.total}: {done.name}"))
    rows: list[ResultRow] = []
    for federation, result in state.results:
        if result is None or result.failed:
            reason = "it was not run" if result is None else result.failed
            raise ValueError(
                f"the federation {federation.name} has no result: {reason}; start the benchmark again to continue it"
            )
        name = describe_defense(federation)
        for one in score_federation(asked, folder / "federations" / federation.name):
            rows.append({"defense": name, "accuracy": result.accuracy, **list_scores(one)})
    measure = "lpips" if all(row["lpips"] is not None for row in rows) else "psnr"
    (folder / "tradeoff.svg").write_text(draw_regions(rows, measure))
    return rows, {**compare_attacks(rows, measure), "images": len(images), "part": images.part, "cpu_seconds": clock.seconds}


def write_grid(asked: Options, folder: Path, images: Images) -> SweepGrid:
    """Write the images, the experiment, and the sweep's grid of defenses and attacks into the folder, and return the grid.

    images: two thirds go to the clients; accuracy is measured on the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cut = len(images) * TRAINED // (TRAINED + HELD_OUT)
    for name, part in (("private", images.take_first(cut)), ("held_out", images.of(range(cut, len(images))))):
        pixels = part.x.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        classes = np.array([str(i) for i in range(images.data.num_classes)])
        np.savez(folder / f"{name}.npz", images=pixels, labels=part.y.numpy(), class_names=classes)
    files = {name: str((folder / f"{file}.npz").absolute()) for name, file in (("train", "private"), ("test", "held_out"))}
    experiment = {
        "seed": asked.seed,
        "rounds": 2 if asked.quick else 60,
        "model": {"name": NETWORK},
        "data": {"name": "npz", **files},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "clients": {"count": 10 if asked.quick else 100, "fraction": 0.1 if not asked.quick else 0.5},
        "training": {"learning_rate": 0.1, "batch_size": 4, "steps": 1 if asked.quick else 2},
    }
    steps = (4, 4) if asked.quick else (100, 400)
    grid = {
        "experiment": "experiment.toml",
        "seeds": [asked.seed],
        "attacked": {"rounds": "1", "clients": 2 if asked.quick else 4},
        "defenses": {"top-k": DEFENSES["top-k"]} if asked.quick else DEFENSES,
        "attacks": {
            "ROG": {"attack": "rog", "steps": steps[0], "enhancer": "small"},
            "Inverting Gradients": {"attack": "inverting_gradients", "steps": steps[1], "tv": 1e-2, "give_up": 0.0},
        },
    }
    for name, content in (("experiment", experiment), ("grid", grid)):
        (folder / f"{name}.toml").write_text(tomli_w.dumps(content))
    return read_grid(folder / "grid.toml")


def describe_defense(federation: GridFederation) -> str:
    """Return the name of a defense with what it sets, such as `top-k: rog_top_k(0.95)`."""
    settings = ", ".join(map(str, federation.settings.values()))
    return f"{federation.defense}: {settings}" if settings else federation.defense


def score_federation(asked: Options, run: Path) -> list[Summary]:
    """Return a summary of the scores of each attack on one federation, with LPIPS if --data has its weights.

    run: folder of the federation, with the reconstructions.
    """
    weights = asked.data / LPIPS_FILE if asked.data else None
    scorer = Scorer(run, [run / "truth"], lpips_weights=weights if weights and weights.exists() else None)
    sources = sorted(path.parent for path in (run / RECONSTRUCTIONS_FOLDER).glob("*/attack.json"))
    return summarise(row for source in sources for row in scorer.score(source))


def list_scores(one: Summary) -> ResultRow:
    """Return the columns of one attack: its name, number of examples, mean LPIPS and PSNR, also of its null, and label success.

    A score that was not measured is None. The null is the same attack without the update.
    """
    null = one.null
    return {
        "attack": "ROG" if one.attack == "rog" else "Inverting Gradients",
        "examples": one.examples,
        "lpips": one.lpips.value if one.lpips else None,
        "null_lpips": null.lpips.value if null and null.lpips else None,
        "psnr": one.psnr.value if one.psnr else None,
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


def draw_regions(rows: Sequence[ResultRow], measure: str) -> str:
    """Return an SVG of accuracy beside a measure of leakage, with one point per defense and one region per attack.

    A region is the convex hull of the attack's points. The region of a stronger attack lies further to the side of larger
    leakage.
    """
    with mpl.rc_context({"svg.hashsalt": "fedleak rog", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for name, colour in ATTACKS.items():
            own = [row for row in rows if row["attack"] == name]
            points = np.array([[row[measure], row["accuracy"]] for row in own])
            axes.scatter(*points.T, color=colour, label=name, s=14)
            if len(points) > 2 and np.linalg.matrix_rank(points - points[0]) == 2:
                axes.add_patch(Polygon(points[ConvexHull(points).vertices], color=colour, alpha=0.15, linewidth=0))
            for (x, y), row in zip(points, own, strict=True):
                axes.annotate(row["defense"].split(":")[0], (x, y), textcoords="offset points", xytext=(4, 3), fontsize=6)
        axes.set(xlabel=f"{measure.upper()} of the reconstructions", ylabel="accuracy of the federation")
        axes.legend()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]
