"""Learned priors beside pixels: what each finds in an update of CIFAR-10 images, and what its null draws without the update.

These priors are trained on the tuning part of CIFAR-10, and the network that comes with ROG on that of ImageNet. Neither part
shares an image with the report part, on which published tables are measured.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from support.contract import Options, ResultRow, TableAndSummary, measure_cpu
from support.rog.columns import BatchSetting, DefendedColumn, observe
from support.rog.outcomes import (
    LPIPS_FILE,
    AnswerFolder,
    Similarity,
    load_perceptual,
    measure_similarity,
    share_of_labels,
    sort_like,
)
from support.splits import count_part, load_images

from attacker.attacks import GradientMatching, rog
from attacker.attacks.learned.generator import ImageGenerator, match_images
from attacker.attacks.learned.prior_file import PriorFacts, PriorKind, read_prior, write_prior
from attacker.attacks.learned.training import ADVERSARIAL_OF_ENHANCERS, PriorTraining, Trainer

SIDE, CLASSES = 32, 10
SHORT = PriorTraining(steps=600)
AUTOENCODER_ROWS = ("autoencoder, 512 unknowns", "autoencoder, 128 unknowns", "autoencoder, 32 unknowns")
RAW = DefendedColumn("raw")
LATENT_WEIGHT = 1e-3
"""Weight of the prior on latents, relative to the loss of a zero gradient."""
DENOISER_WEIGHT, DENOISER_NOISE = 1.0, 0.2
"""Weight of the denoiser's term, relative to the loss of a zero gradient, and standard deviation of the noise at the first
step."""
READY_TRAINING = PriorTraining(steps=1600, adversarial=ADVERSARIAL_OF_ENHANCERS)
QUICK_READY_TRAINING = PriorTraining(steps=4)
FACTS = PriorFacts(kind="enhancer", size=64, settings={"width": 16}, data="ImageNet, tuning part of benchmarks/support/splits.py")


@dataclass(frozen=True)
class PriorPlan:
    """The kind of a prior, the settings of its network, and its training."""

    kind: PriorKind
    settings: dict[str, int]
    training: PriorTraining


PLANS = {
    "generator": PriorPlan(
        "generator", {"width": 16, "latents": 128, "side": SIDE, "classes": CLASSES}, PriorTraining(steps=3000, batch=32)
    ),
    "denoiser": PriorPlan("denoiser", {"width": 16}, SHORT),
    "autoencoder": PriorPlan("autoencoder", {"width": 16, "factor": 4, "channels": 8}, SHORT),
    "autoencoder8": PriorPlan("autoencoder", {"width": 16, "factor": 8, "channels": 8}, SHORT),
    "autoencoder16": PriorPlan("autoencoder", {"width": 16, "factor": 16, "channels": 8}, SHORT),
}
"""The priors, by the name of the file. The autoencoders have 512, 128 and 32 latent values for each image, the same shares of the
pixels as the 8192, 2048 and 512 values that ROG searches for images of 128x128 pixels."""


@dataclass(frozen=True)
class PriorScale:
    """The size of a table of priors.

    columns: defenses of the clients. setting: network and training. images: number of images of all clients together.
    batch: images of each client. steps: iterations of each attack, in all its phases together. names: of the attacks of
    `make_attacks`; all of them if it is empty.
    """

    columns: tuple[DefendedColumn, ...]
    setting: BatchSetting
    images: int
    batch: int
    steps: int
    names: tuple[str, ...] = ()


SMALL_BATCHES = PriorScale(
    (RAW, DefendedColumn("top-k, 5 % sent", defense="rog_top_k(0.95)")),
    BatchSetting(side=SIDE, epochs=1),
    images=8,
    batch=4,
    steps=150,
)
LARGE_BATCH = PriorScale(
    (RAW,),
    BatchSetting(model="resnet18_rog", side=SIDE, epochs=1),
    images=32,
    batch=32,
    steps=40,
    names=(
        "pixels",
        "bicubic4 (ROG)",
        "coarse to fine",
        *AUTOENCODER_ROWS,
        "coarse to fine, then nearest image (ROGS)",
        "features (GIFD)",
        "weights (GIAS)",
        "pixels, denoiser (RED)",
    ),
)


def train_priors(options: Options, folder: Path) -> TableAndSummary:
    """Train the priors of `PLANS`, and write them into the folder; return one row for each, and an empty summary.

    A prior whose file exists is not trained again, unless --fresh or --quick is given.
    """
    count = 8 if options.quick else count_part(options, "cifar10", "tuning")
    images = load_images(options, "cifar10", count, part="tuning")
    rows: list[ResultRow] = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, plan in PLANS.items():
        file = folder / f"{name}.safetensors"
        if file.exists() and not options.quick and "fresh" not in options.flags:
            continue
        told = "CIFAR-10, tuning part of benchmarks/support/splits.py"
        trainer = Trainer(
            images.to_bytes(),
            PriorFacts(kind=plan.kind, size=SIDE, settings=plan.settings, data=told),
            replace(plan.training, steps=4) if options.quick else plan.training,
            options.device,
            checkpoint=file.with_name(file.name + ".checkpoint"),
            labels=images.y % CLASSES if plan.kind == "generator" else None,
        )
        with measure_cpu() as clock:
            network = trainer.run(print_progress)
        digest = write_prior(file, network, trainer.facts)
        trainer.clean_up()
        size = file.stat().st_size
        rows.append({"file": file.name, "bytes": size, "hash": digest, "images": len(images), "cpu_seconds": clock.seconds})
    return rows, {}


def make_attacks(folder: Path, steps: int, lpips_weights: str = "") -> dict[str, GradientMatching]:
    """Return a dict of attacks by name, which differ in their priors only. Labels are inferred from the update.

    folder: of the trained priors. steps: iterations of each attack, in all its phases together. lpips_weights: file of
    AlexNet's weights for ROGS; "" for none.
    """
    generator, denoiser, *autoencoders = (str(folder / f"{name}.safetensors") for name in PLANS)
    own = {"steps": steps, "decoder": "pixels", "init": "uniform", "tv": 0.0}
    learned = {"denoiser": denoiser, "denoiser_weight": DENOISER_WEIGHT}
    return {
        "pixels": rog(steps=steps, decoder="pixels", init="uniform"),
        "bicubic4 (ROG)": rog(steps=steps, decoder="bicubic4"),
        "coarse to fine": rog(steps=steps),
        **{name: rog(steps=steps, decoder=file) for name, file in zip(AUTOENCODER_ROWS, autoencoders, strict=True)},
        "coarse to fine, then nearest image (ROGS)": rog(steps=steps, enhancer=generator, lpips_weights=lpips_weights),
        "the same by Frank-Wolfe": rog(steps=steps, enhancer=f"{generator}@frank_wolfe", lpips_weights=lpips_weights),
        "latents (GGL)": rog(steps=steps, decoder=f"{generator}@latents", latent=LATENT_WEIGHT),
        "features (GIFD)": rog(steps=steps, decoder=f"{generator}@features", latent=LATENT_WEIGHT),
        "features in l1 balls": rog(steps=steps, decoder=f"{generator}@features", latent=0.0, boxed=True),
        "weights (GIAS)": rog(steps=steps, decoder=f"{generator}@weights", latent=LATENT_WEIGHT),
        "pixels, no prior": rog(**own),
        "pixels, denoiser (RED)": rog(**own, **learned),
        "pixels, denoiser with noise (diffusion)": rog(**own, **learned, denoiser_noise=DENOISER_NOISE),
    }


def measure_priors(options: Options, folder: Path, scale: PriorScale) -> TableAndSummary:
    """Attack clients that train for one epoch of one batch each, with every prior and its null.

    folder: of the trained priors; with --quick, the priors are trained there first, and the batches and searches are smaller.
    Answers are kept in its subfolder `answers`, and used again unless --fresh or --quick is given. The first row is the limit of
    the generator: of all images that it can make with the true labels, those nearest to the originals. other_psnr, other_ssim and
    other_lpips are a control: the similarity of the same answers to as many images of which no client sent an update.
    """
    if options.quick:
        train_priors(options, folder)
        scale = replace(scale, images=4, batch=4, steps=8)
    batch = scale.batch
    images = load_images(options, "cifar10", scale.images)
    images = replace(images, y=images.y % CLASSES)
    others = load_images(options, "cifar10", scale.images, skip=scale.images).x
    perceptual = load_perceptual(options, SIDE)
    weights = "" if perceptual is None or options.data is None else str(options.data / LPIPS_FILE)
    network = read_prior(folder / "generator.safetensors", "generator").network
    assert isinstance(network, ImageGenerator)
    nearest = match_images(network, images.x, images.y, perceptual=perceptual, steps=4 if options.quick else 0)
    rows: list[ResultRow] = [
        {"column": "none", "attack": "nearest image of the generator", **_list(measure_similarity(nearest, images.x, perceptual))}
    ]
    answers = AnswerFolder(folder / "answers", fresh="fresh" in options.flags or options.quick)
    best: dict[str, str] = {}
    for column in scale.columns:
        parts = [slice(i, i + batch) for i in range(0, len(images), batch)]
        keys = [(part, {"key": f"client {part.start}", "seed": options.seed + part.start}) for part in parts]
        cases = [observe(column, scale.setting, images.x[part], images.y[part], **own, classes=CLASSES) for part, own in keys]
        labels = mean(share_of_labels(case, images.y[part], options) for case, part in zip(cases, parts, strict=True))
        found = {}
        attacks = make_attacks(folder, scale.steps, weights)
        for name, attack in ((name, attacks[name]) for name in scale.names or attacks):
            for title, one in ((name, attack), (f"{name}, null", attack.null())):
                own = [answers.attack(one, case, images.x[part], options) for case, part in zip(cases, parts, strict=True)]
                found[title] = measure_similarity(torch.cat([answer.x for answer in own]), images.x, perceptual)
                rearranged = torch.cat([sort_like(answer.x, others[part]) for answer, part in zip(own, parts, strict=True)])
                control = {f"other_{k}": v for k, v in _list(measure_similarity(rearranged, others, perceptual)).items()}
                cost = mean(answer.cpu_seconds for answer in own)
                told = {"labels_inferred": None if one is not attack else labels, "cpu_seconds": cost}
                rows.append({"column": column.name, "attack": title, **_list(found[title]), **control, **told})
        best[column.name] = max((name for name in found if "null" not in name), key=lambda name: found[name].psnr)
    return rows, {"best_by_psnr": best, "images": len(images), "part": images.part}


def _list(similarity: Similarity) -> ResultRow:
    return {"psnr": similarity.psnr, "ssim": similarity.ssim, "lpips": similarity.lpips}


def train_ready_enhancer(options: Options, out: Path) -> TableAndSummary:
    """Train the network that improves reconstructed images, and write it to the file `out`.

    An interrupted training continues from a checkpoint in the folder of `out`. Returns one row on the file, its size and hash,
    the number of images and the CPU-seconds, and an empty summary. Raises ValueError if --data lacks ImageNet, except with
    --quick.
    """
    images = load_images(options, "imagenet", 8 if options.quick else count_part(options, "imagenet", "tuning"), part="tuning")
    trainer = Trainer(
        images.to_bytes(),
        FACTS,
        QUICK_READY_TRAINING if options.quick else READY_TRAINING,
        options.device,
        checkpoint=out.with_name(out.name + ".checkpoint"),
    )
    with measure_cpu() as clock:
        network = trainer.run(print_progress)
    digest = write_prior(out, network, trainer.facts)
    trainer.clean_up()
    row: ResultRow = {
        "file": out.name,
        "bytes": out.stat().st_size,
        "hash": digest,
        "images": len(images),
        "cpu_seconds": clock.seconds,
    }
    return [row], {}


def print_progress(done: int, steps: int, words: str) -> None:
    """Print the number `done` of finished steps and `words`, if that number is a multiple of 100. steps: number of all steps."""
    if done % 100 == 0:
        print(f"{done} of {steps}: {words}", flush=True)
