"""ROG beside Inverting Gradients and ROG's search in pixels, with and without the enhancer, in the columns of figures 3 and 8.

Each column is one client that trains for five local epochs on one batch of ImageNet images of 64x64 pixels, with ROG's LeNet, a
head of 1,000 classes, and a defense (none in the column `raw`). Every attack models the defense, and is given the labels, as in
the paper. The enhancer is a network that removes noise and blur from reconstructed images. All answers, also those of nulls, are
measured before and after it. By default all columns of these figures run; an argument selects one column, also DGC, or a table
below. Reconstructions of columns are kept in runs/benchmark-rog, and later runs reuse them unless --fresh or --quick is given.

    single     one CIFAR-10 image in one step behind PRECODE: the closed form of PRECODE's encoder beside Inverting Gradients
    unseen     the gain of the enhancer on degraded images of faces, CIFAR-10 and ImageNet that it never saw, without any attack
    weights    train the enhancer that the project ships
    esrgan     port the x4 network of the npm package @upscalerjs/esrgan-medium, which `unseen` then measures, too
    train      train the generator, the denoiser and the autoencoders of the tables `priors` and `batch32`, unless their
               files exist
    priors     one step on CIFAR-10 images, labels inferred: searches with learned priors beside pixels, each with its null
    batch32    the searches of `priors` on a batch of 32 images, on ROG's ResNet-18
    tradeoff   figure 9: accuracy of a federation of 100 clients beside LPIPS of two attacks for each defense, with a picture,
               which --picture draws into docs/tradeoff.png
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support.attacked import run_attack
from support.contract import Options, ResultRow, TableAndSummary, parse_options, print_results
from support.rog.columns import COLUMNS, OTHER_COLUMNS, BatchSetting, DefendedColumn, observe, resize
from support.rog.esrgan import port_upscaler
from support.rog.learned_priors import LARGE_BATCH, SMALL_BATCHES, measure_priors, train_priors
from support.rog.outcomes import AnswerFolder, Similarity, load_perceptual, measure_similarity, share_of_labels
from support.rog.ready_prior import train_ready_enhancer
from support.rog.tradeoff import measure_tradeoff
from support.splits import load_images
from torch import Tensor

from attacker.attacks import Case, GradientMatching, exact, inverting_gradients, rog
from attacker.attacks.learned.degradation import degrade
from attacker.attacks.learned.enhancer import READY_FILE, Enhancer, read_enhancer
from attacker.scoring.metrics import psnr

FOLDER = Path("runs/benchmark-rog")
PORTED_FILE = FOLDER / "esrgan.safetensors"
TABLES = (
    *(column.table for column in (*COLUMNS, *OTHER_COLUMNS)),
    "single",
    "unseen",
    "weights",
    "esrgan",
    "train",
    "priors",
    "batch32",
    "tradeoff",
)
"""Names that select what runs: the first word of each column's name, and the tables that are no columns."""
DECODER, TV = "coarse_to_fine", 3e-2
"""Decoder of ROG in the columns, and weight of total variation of ROG and of its search in pixels."""
RATIO_STEPS = (10, 20, 30, 40, 60)
"""Numbers of iterations with which ROG is run in the raw column, besides its default, to find the fewest that suffice."""


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark. setting: of the federation. images: number of images of the batch.

    steps: iterations of ROG and of its search in pixels. steps_of_ig: iterations of Inverting Gradients, over which its schedule
    of learning rates runs.
    """

    setting: BatchSetting
    images: int
    steps: int
    steps_of_ig: int


FULL = Scale(BatchSetting(), images=4, steps=100, steps_of_ig=400)
QUICK = Scale(BatchSetting(side=32), images=2, steps=8, steps_of_ig=12)


@dataclass(frozen=True)
class ColumnTools:
    """What all columns share.

    asked: options. x, y: original images (N, 3, H, W) and their labels (N,). folder: kept reconstructions.
    perceptual: LPIPS; None if it cannot be measured. enhancer: None if there is no file of its weights.
    """

    asked: Options
    scale: Scale
    x: Tensor
    y: Tensor
    folder: AnswerFolder
    perceptual: Any
    enhancer: Enhancer | None

    def measure(self, x: Tensor) -> Similarity:
        return measure_similarity(x, self.x, self.perceptual)


def main() -> None:
    """Run the benchmark."""
    asked = parse_options(__doc__ or "", tables=TABLES, flags=("fresh", "picture"))
    torch.set_num_threads(1)
    if asked.table == "weights":
        found = train_ready_enhancer(asked, READY_FILE if not asked.quick else FOLDER / "enhancer.safetensors")
    elif asked.table == "esrgan":
        found = port_upscaler(asked, PORTED_FILE)
    elif asked.table == "train":
        found = train_priors(asked, FOLDER / ("quick" if asked.quick else "priors"))
    elif asked.table in ("priors", "batch32"):
        scale = SMALL_BATCHES if asked.table == "priors" else LARGE_BATCH
        found = measure_priors(asked, FOLDER / ("quick" if asked.quick else "priors"), scale)
    elif asked.table == "tradeoff":
        found = measure_tradeoff(asked, FOLDER / ("tradeoff-quick" if asked.quick else "tradeoff"))
    elif asked.table == "single":
        found = measure_single(asked)
    elif asked.table == "unseen":
        found = measure_unseen(asked)
    else:
        found = measure_columns(asked)
    print_results("rog", *found, asked)


def measure_columns(asked: Options) -> TableAndSummary:
    """Attack every column, or the selected one; return the rows and a summary.

    columns_better_than_identity, columns_not_worse_than_ig: numbers of columns with `ColumnResult.better_than_pixels` and with
    `ColumnResult.not_worse_than_ig`. If the first column is measured, the summary includes `measure_iterations`.
    """
    scale = QUICK if asked.quick else FULL
    images = load_images(asked, "imagenet", scale.images)
    folder = AnswerFolder(FOLDER / ("quick" if asked.quick else "full"), fresh="fresh" in asked.flags or asked.quick)
    enhancer = read_enhancer(READY_FILE) if READY_FILE.exists() else None
    perceptual = load_perceptual(asked, scale.setting.side)
    tools = ColumnTools(asked, scale, resize(images, scale.setting.side), images.y, folder, perceptual, enhancer)
    rows: list[ResultRow] = []
    better, not_worse = [], []
    for column in (*COLUMNS, *OTHER_COLUMNS):
        if asked.table == column.table or (asked.table is None and column in COLUMNS):
            found = measure_column(tools, column)
            rows += found.rows
            better.append(found.better_than_pixels)
            not_worse.append(found.not_worse_than_ig)
    summary = {"columns_better_than_identity": sum(better), "columns_not_worse_than_ig": sum(not_worse), "columns": len(better)}
    if asked.table in (None, COLUMNS[0].table):
        summary |= measure_iterations(tools)
    return rows, {**summary, "lpips_gap": None, "images": len(tools.x), "part": images.part}


@dataclass(frozen=True)
class ColumnResult:
    """The rows of one column, and how ROG followed by the enhancer compares with two attacks (by LPIPS, or PSNR without LPIPS).

    better_than_pixels: whether it is better than ROG's search in pixels without the enhancer, and than the same search with it.
    not_worse_than_ig:  whether it is at least as good as Inverting Gradients without the enhancer, and as the same with it.
    """

    rows: list[ResultRow]
    better_than_pixels: bool
    not_worse_than_ig: bool


def measure_column(tools: ColumnTools, column: DefendedColumn) -> ColumnResult:
    """Attack one column with ROG, its search in pixels, Inverting Gradients, and the nulls of ROG and of Inverting Gradients."""
    case = make_case(tools, column)
    attacks = make_attacks(tools.scale)
    attacks |= {f"{name}, null": attacks[name].null() for name in ("ROG", "Inverting Gradients")}
    rows, plain, enhanced = [], {}, {}
    labels = share_of_labels(case, tools.y, tools.asked)
    for name, attack in attacks.items():
        answer = tools.folder.attack(attack, case, tools.x, tools.asked)
        plain[name] = tools.measure(answer.x)
        enhanced[name] = tools.measure(tools.enhancer(answer.x)) if tools.enhancer else plain[name]
        rows.append(
            {
                "column": column.name,
                "attack": name,
                "iterations": attack.search.steps,
                **_list_measures(plain[name]),
                **{f"enhanced_{key}": value for key, value in _list_measures(enhanced[name]).items()},
                "labels_if_not_told": labels,
                "paper_lpips_128": column.paper if name == "ROG" else None,
                "cpu_seconds": answer.cpu_seconds,
            }
        )
    own = enhanced["ROG"]
    return ColumnResult(
        rows,
        all(own.is_better_than(other["pixels"]) for other in (plain, enhanced)),
        all(own.is_better_than(other["Inverting Gradients"], or_equal=True) for other in (plain, enhanced)),
    )


def make_case(tools: ColumnTools, column: DefendedColumn) -> Case:
    """Return the update of the client of one column as a case, in which the true labels are given to attacks."""
    case = observe(column, tools.scale.setting, tools.x, tools.y, key="client", seed=tools.asked.seed)
    return replace(case, known_labels=tools.y)


def make_attacks(scale: Scale) -> dict[str, GradientMatching]:
    """Return a dict of the attacks on a column: ROG, the same search in pixels from the paper's start, Inverting Gradients."""
    return {
        "ROG": make_rog(scale.steps),
        "pixels": rog(steps=scale.steps, decoder="pixels", init="uniform", tv=TV),
        "Inverting Gradients": inverting_gradients(steps=scale.steps_of_ig, tv=1e-2, give_up=0.0),
    }


def make_rog(steps: int) -> GradientMatching:
    """Return ROG as it is measured in the columns, with a number of iterations."""
    return rog(steps=steps, decoder=DECODER, tv=TV)


def measure_iterations(tools: ColumnTools) -> ResultRow:
    """Return how many iterations ROG needs for the score of Inverting Gradients in the first column, which has no defense.

    Each ratio is the smallest number of iterations that suffices, of those tried (`RATIO_STEPS` and the default), divided by the
    number of iterations of Inverting Gradients; None if none of them suffices.
    iterations_ratio: for at least the PSNR of Inverting Gradients, both without the enhancer. iterations_ratio_lpips: for a lower
    LPIPS (a higher PSNR where there is no LPIPS), both without the enhancer. iterations_ratio_enhanced: for a lower LPIPS
    likewise, both followed by the enhancer.
    """
    case, attacks = make_case(tools, COLUMNS[0]), make_attacks(tools.scale)
    own = attacks["Inverting Gradients"]
    aim = tools.folder.attack(own, case, tools.x, tools.asked).x
    ratios: dict[str, float | None] = dict.fromkeys(("iterations_ratio", "iterations_ratio_lpips", "iterations_ratio_enhanced"))
    for steps in (*(() if tools.asked.quick else RATIO_STEPS), tools.scale.steps):
        found = tools.folder.attack(make_rog(steps), case, tools.x, tools.asked).x
        plain, enhanced = ([tools.measure(x if e is None else e(x)) for x in (found, aim)] for e in (None, tools.enhancer))
        reached = (plain[0].psnr >= plain[1].psnr, plain[0].is_better_than(plain[1]), enhanced[0].is_better_than(enhanced[1]))
        for name, is_reached in zip(ratios, reached, strict=True):
            if is_reached and ratios[name] is None:
                ratios[name] = steps / own.search.steps
    return {**ratios, "iterations_of_ig": own.search.steps}


def measure_single(asked: Options) -> TableAndSummary:
    """Attack clients with one image each and one step, behind PRECODE, a random bottleneck before the network's last layer.

    The summary holds the mean PSNR of the closed form minus the highest mean PSNR of the other rows, in dB.
    """
    count = 1 if asked.quick else 6
    images, column = load_images(asked, "cifar10", count), next(c for c in COLUMNS if c.network)
    setting = BatchSetting(epochs=1, side=32)
    attacks = {
        "exact": exact(route="layer_input", fallback="none"),
        "Inverting Gradients": inverting_gradients(steps=400, tv=1e-2, give_up=0.0),
    }
    rows: list[ResultRow] = []
    for name, attack in attacks.items():
        for title, one in ((name, attack), (f"{name}, null", attack.null())):
            made = []
            for i in range(count):
                case = observe(column, setting, images.x[i : i + 1], images.y[i : i + 1], key=f"client {i}", seed=asked.seed + i)
                made.append(run_attack(one, [case], asked)[0][0])
            x, labels = torch.cat([m.x for m in made]).clamp(0, 1), torch.cat([m.y for m in made])
            rows.append(
                {"attack": title, "images": count, "part": images.part, **_list_measures(measure_similarity(x, images.x, None))}
                | {"least_psnr": float(psnr(x, images.x).min()), "labels": float((labels == images.y).float().mean())}
            )
    return rows, {"single_gain_db": rows[0]["psnr"] - max(row["psnr"] for row in rows[1:])}


def measure_unseen(asked: Options) -> TableAndSummary:
    """Measure the quality of images that were shrunk, blurred and covered with noise, before and after the enhancer.

    Returns one row for each data set and enhancer, with PSNR, SSIM and LPIPS before and after, and an empty summary.
    Images of --data are of the report part, on which neither the enhancer was trained nor any setting was chosen.
    LPIPS is only measured for images that are large enough for it.
    """
    rows: list[ResultRow] = []
    count = 4 if asked.quick else 100
    enhancers = {file.stem: read_enhancer(file) for file in (READY_FILE, PORTED_FILE) if file.exists()}
    for name, side in (("lfw", 32), ("cifar10", 32), ("imagenet", 64)):
        images = load_images(asked, name, count)
        x = resize(images, side)
        given = degrade(x, torch.Generator().manual_seed(asked.seed)).clamp(0, 1)
        perceptual = load_perceptual(asked, side)
        before = _list_measures(measure_similarity(given, x, perceptual))
        for title, enhancer in enhancers.items():
            after = _list_measures(measure_similarity(enhancer(given), x, perceptual))
            rows.append(
                {"data": images.name, "side": side, "images": len(x), "part": images.part, "enhancer": title, **before}
                | {f"enhanced_{key}": value for key, value in after.items()}
            )
    return rows, {}


def _list_measures(found: Similarity) -> dict[str, float | None]:
    return {"psnr": found.psnr, "ssim": found.ssim, "ssim_global": found.ssim_global, "lpips": found.lpips}


if __name__ == "__main__":
    main()
