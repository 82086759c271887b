"""The attacks that are compared on the columns of ROG's figures 3 and 8, and the images, sizes and tools that they share."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from support.contract import Options
from support.rog.columns import BatchSetting, DefendedColumn, observe, resize
from support.rog.outcomes import AnswerFolder, Similarity, load_perceptual, measure_similarity
from support.splits import load_images
from torch import Tensor

from attacker.attacks import Case, GradientMatching, inverting_gradients, rog
from attacker.attacks.learned.enhancer import READY_FILE, Enhancer, read_enhancer

FOLDER = Path("runs/benchmark-rog")


@dataclass(frozen=True)
class Scale:
    """The size of the benchmark. setting: of the federation. images: number of images of a batch. batches: number of batches.

    steps: iterations of ROG and of its search in pixels. steps_of_ig: iterations of Inverting Gradients, over which its schedule
    of learning rates runs. long_steps: iterations of ROG that take as much CPU time. folder: name of the folder of kept answers.
    all_attacks: whether all attacks run if no column is selected; otherwise ROG and its null alone do.
    """

    setting: BatchSetting
    images: int
    steps: int
    steps_of_ig: int
    long_steps: int
    folder: str
    all_attacks: bool = True
    batches: int = 1


FULL = Scale(BatchSetting(), images=4, steps=100, steps_of_ig=400, long_steps=340, folder="full")
QUICK = Scale(BatchSetting(side=32), images=2, steps=8, steps_of_ig=12, long_steps=10, folder="quick")
PUBLISHED = Scale(
    BatchSetting(side=128), images=16, steps=100, steps_of_ig=400, long_steps=340, folder="published", all_attacks=False
)
"""The batch and the images of the paper."""
REPEATED = 5
"""Number of batches with --repeated, the smallest one for which means have intervals."""


@dataclass(frozen=True)
class ColumnTools:
    """What the attacks on all columns share for one batch.

    options: of the benchmark, with its seed plus the number of the batch. x, y: original images (N, 3, H, W) and their labels
    (N,), of the data set's part `part`. folder: kept reconstructions. perceptual: LPIPS; None if it cannot be measured.
    enhancer: None if there is no file of its weights.
    """

    options: Options
    scale: Scale
    x: Tensor
    y: Tensor
    part: str
    folder: AnswerFolder
    perceptual: Any
    enhancer: Enhancer | None

    def measure(self, x: Tensor) -> Similarity:
        return measure_similarity(x, self.x, self.perceptual)


def choose_scale(options: Options) -> Scale:
    """Return the scale that the options select."""
    full = PUBLISHED if "published" in options.flags else FULL
    scale = replace(QUICK, all_attacks=full.all_attacks) if options.quick else full
    return replace(scale, batches=REPEATED if "repeated" in options.flags else 1)


@cache
def load_tools(options: Options, batch: int = 0) -> ColumnTools:
    """Load what all columns share for a batch, once for each process. batch: its number, from 0."""
    scale = choose_scale(options)
    images = load_images(options, "imagenet", scale.images, skip=batch * scale.images)
    folder = AnswerFolder(FOLDER / scale.folder, fresh="fresh" in options.flags or options.quick)
    enhancer = read_enhancer(READY_FILE) if READY_FILE.exists() else None
    perceptual = load_perceptual(options, scale.setting.side)
    x = resize(images, scale.setting.side)
    seeded = replace(options, seed=options.seed + batch)
    return ColumnTools(seeded, scale, x, images.y, images.part, folder, perceptual, enhancer)


def make_case(tools: ColumnTools, column: DefendedColumn) -> Case:
    """Return the update of the client of one column as a case, in which the true labels are given to attacks."""
    case = observe(column, tools.scale.setting, tools.x, tools.y, key="client", seed=tools.options.seed)
    return replace(case, known_labels=tools.y)


def make_attacks(scale: Scale, column: DefendedColumn) -> dict[str, GradientMatching]:
    """Return a dict of the attacks: ROG, a longer search, ROG's search in pixels from the paper's start, Inverting Gradients.

    The longer search takes as much CPU time as Inverting Gradients, which has the total variation of ROG (`colour`, with a
    constant weight); its paper does not have it. What both add for known noise has the weight of a MAP estimate: with half of it,
    the default, their LPIPS behind QSGD was higher on tuning images.
    """
    baseline = inverting_gradients(
        steps=scale.steps_of_ig, tv=column.tv, continuation=1.0, polish=0.0, give_up=0.0, local_steps="one_batch", surrogate=True
    )
    long = rog(steps=scale.long_steps)
    return {
        "ROG": rog(steps=scale.steps),
        "ROG, long": replace(long, prior=replace(long.prior, map_tv=1.0)),
        "pixels": rog(steps=scale.steps, decoder="pixels", init="uniform"),
        "Inverting Gradients": replace(baseline, prior=replace(baseline.prior, map_tv=1.0)),
    }
