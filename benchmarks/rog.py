"""ROG beside Inverting Gradients and ROG's search in pixels, with and without the enhancer, in the columns of figures 3 and 8.

Each column is one client that trains for five local epochs on one batch of ImageNet images of 64x64 pixels, with ROG's LeNet,
a head of 1,000 classes, and a defense (none in the column `raw`). Every attack models the defense, and is given the labels, as
in the paper. It takes the five epochs for one batch, whose gradient it computes at weights between those sent and those
returned (in the column `sign`, at those sent). The enhancer is a network that removes noise and blur from reconstructed
images. All answers, also those of nulls, are measured before and after it, and in the column `sign` also after the paper's
equalisation of histograms. By default all columns of these figures run, in --workers processes of one thread each; an argument
selects one column, also DGC or uniform-code, or a table below. Reconstructions of columns are kept in runs/benchmark-rog, and
later runs of the same code reuse them unless --fresh or --quick is given. With --repeated, each column has five batches, and
means have 95 % intervals, whose units are the batches. With it, or with a selected column, ROG also runs for as long as
Inverting Gradients. With --published, columns have the paper's batches of 16 images of 128x128 pixels, and are attacked by ROG
and its null alone, or by all attacks if a column is selected; lpips_gap is then the difference between the LPIPS of ROG with
the enhancer and that of the paper.

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

from dataclasses import asdict

import torch
from support.attacked import PUBLISHED_SEARCH, run_attack
from support.contract import Options, ResultRow, TableAndSummary, parse_options, print_results
from support.rog.attacks import FOLDER
from support.rog.columns import COLUMNS, OTHER_COLUMNS, BatchSetting, observe, resize
from support.rog.comparison import measure_columns
from support.rog.esrgan import port_upscaler
from support.rog.learned_priors import LARGE_BATCH, SMALL_BATCHES, measure_priors, train_priors, train_ready_enhancer
from support.rog.outcomes import load_perceptual, measure_similarity
from support.rog.tradeoff import measure_tradeoff
from support.splits import load_images
from torch import Tensor

from attacker.attacks import exact, inverting_gradients
from attacker.attacks.learned.degradation import degrade
from attacker.attacks.learned.enhancer import READY_FILE, read_enhancer
from attacker.scoring.metrics import psnr

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


def main() -> None:
    """Run the benchmark."""
    options = parse_options(
        __doc__ or "", tables=TABLES, flags=("fresh", "picture", "published", "repeated"), offers_workers=True
    )
    torch.set_num_threads(1)
    if options.table == "weights":
        table = train_ready_enhancer(options, READY_FILE if not options.quick else FOLDER / "enhancer.safetensors")
    elif options.table == "esrgan":
        table = port_upscaler(options, PORTED_FILE)
    elif options.table == "train":
        table = train_priors(options, FOLDER / ("quick" if options.quick else "priors"))
    elif options.table in ("priors", "batch32"):
        scale = SMALL_BATCHES if options.table == "priors" else LARGE_BATCH
        table = measure_priors(options, FOLDER / ("quick" if options.quick else "priors"), scale)
    elif options.table == "tradeoff":
        table = measure_tradeoff(options, FOLDER / ("tradeoff-quick" if options.quick else "tradeoff"))
    elif options.table == "single":
        table = measure_single(options)
    elif options.table == "unseen":
        table = measure_unseen(options)
    else:
        table = measure_columns(options)
    print_results("rog", *table, options)


def measure_single(options: Options) -> TableAndSummary:
    """Attack clients with one image each and one step, behind PRECODE, a random bottleneck before the network's last layer.

    The summary holds the mean PSNR of the closed form minus the highest mean PSNR of the other rows, in dB.
    """
    count = 1 if options.quick else 6
    images, column = load_images(options, "cifar10", count), next(c for c in COLUMNS if c.network)
    setting = BatchSetting(epochs=1, side=32)
    attacks = {
        "exact": exact(route="layer_input", fallback="none"),
        "Inverting Gradients": inverting_gradients(steps=400, tv=1e-2, give_up=0.0, **PUBLISHED_SEARCH),
    }
    rows: list[ResultRow] = []
    for name, attack in attacks.items():
        for title, one in ((name, attack), (f"{name}, null", attack.null())):
            made = []
            for i in range(count):
                case = observe(
                    column, setting, images.x[i : i + 1], images.y[i : i + 1], key=f"client {i}", seed=options.seed + i
                )
                made.append(run_attack(one, [case], options)[0][0])
            x, labels = torch.cat([m.x for m in made]).clamp(0, 1), torch.cat([m.y for m in made])
            rows.append(
                {"attack": title, "images": count, "part": images.part, **asdict(measure_similarity(x, images.x, None))}
                | {"least_psnr": float(psnr(x, images.x).min()), "labels": float((labels == images.y).float().mean())}
            )
    return rows, {"single_gain_db": rows[0]["psnr"] - max(row["psnr"] for row in rows[1:])}


def measure_unseen(options: Options) -> TableAndSummary:
    """Measure the quality of images that were shrunk, blurred and covered with noise, before and after the enhancer.

    Each image is degraded with draws of its own, see `degrade_visibly`.
    Returns one row for each data set and enhancer, with PSNR, SSIM and LPIPS before and after, and an empty summary.
    Images of --data are of the report part, on which neither the enhancer was trained nor any setting was chosen.
    LPIPS is only measured for images that are large enough for it.
    """
    rows: list[ResultRow] = []
    count = 4 if options.quick else 100
    enhancers = {file.stem: read_enhancer(file) for file in (READY_FILE, PORTED_FILE) if file.exists()}
    for name, side in (("lfw", 32), ("cifar10", 32), ("imagenet", 64)):
        images = load_images(options, name, count)
        x = resize(images, side)
        rng = torch.Generator().manual_seed(options.seed)
        given = torch.cat([degrade_visibly(one, rng) for one in x.split(1)])
        perceptual = load_perceptual(options, side)
        before = asdict(measure_similarity(given, x, perceptual))
        for title, enhancer in enhancers.items():
            after = asdict(measure_similarity(enhancer(given), x, perceptual))
            rows.append(
                {"data": images.name, "side": side, "images": len(x), "part": images.part, "enhancer": title, **before}
                | {f"enhanced_{key}": value for key, value in after.items()}
            )
    return rows, {}


def degrade_visibly(x: Tensor, rng: torch.Generator) -> Tensor:
    """Return degraded images in [0, 1] of x (N, 3, H, W), with new draws for as long as all of them stay as they are."""
    while torch.equal(given := degrade(x, rng).clamp(0, 1), x):
        pass
    return given


if __name__ == "__main__":
    main()
