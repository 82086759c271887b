"""Attacks on realistic networks and images: ResNet-18, MobileNet and a vision transformer at 64, 128 and 224 pixels.

`real.py NETWORK-PIXELS`, for example `real.py resnet18-64`, which is the default, or `real.py resnet18-64-16` for one batch size.
A client holds two batches of 1, 4 or 16 images and trains on them for one epoch of SGD with momentum 0.9. Its update is attacked
by Inverting Gradients, and by the same search without the update, its null. `above_null_db` is the mean difference in PSNR over
examples, `interval_db` half the width of its 95 % interval; an interval that covers 0 shows no leak. Closed forms are also tried
on the update: `closed_form` is the name of the closed form that gives an answer, or the reason why none applies.

`most_iterations` is the maximum number of iterations: 300 on a CPU, and 1000 on a GPU. A search whose loss hardly falls is given
up after 6 to 45 iterations on a CPU, and after 6 to 100 on a GPU; the null is never given up. The search and its null are each
also stopped by a limit of CPU-seconds. `ended` names what ended the search. cpu_seconds are those of the search and its null
together, on one thread. The networks are torchvision's, untrained, in evaluation mode.

If --data is a folder that holds `imagenet128/train.npz`, images are those of ImageNet that were not used to choose settings (the
part "report" of `support.splits`). Otherwise they are photographs that are shipped with the project. Images of another size are
resized. `--quick` makes two iterations at 32 pixels for one batch of 2 images, which only checks that everything runs.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import mean, stdev
from time import perf_counter, process_time
from typing import Any

import torch
from support.attacked import PUBLISHED_SEARCH, match_examples, run_attack
from support.contract import Options, measure_cpu, parse_options, print_results
from support.single_cases import LocalClient, make_client
from support.splits import Images, load_images
from torch.nn.functional import interpolate

from attacker.attacks import Case, exact, inverting_gradients
from attacker.reconstruction import Reconstruction
from attacker.scoring.metrics import psnr
from fedsim import data as datasets
from fedsim.recording import DataSpec, Training

NETWORKS = {"resnet18": "resnet18", "mobilenet": "mobilenet_v3_small", "vit": "vit_b_16"}
IMAGE_SIDES = (64, 128, 224)
BATCH_SIZES, QUICK_BATCH_SIZES = (1, 4, 16), (2,)
TABLES = tuple(
    f"{network}-{pixels}{batch}"
    for network in NETWORKS
    for pixels in IMAGE_SIDES
    for batch in ("", *(f"-{size}" for size in BATCH_SIZES))
)
SEARCH_SECONDS = {"cpu": 300.0, "cuda": 80.0}
"""CPU-seconds after which a search is stopped, at the end of an iteration.

The limit is smaller on a GPU, where a piece of `make bench-gpu` has nine minutes for three batch sizes, each with a
search and its null.
"""
QUICK_PIXELS = 32
STORED_PIXELS = 128
"""Height and width of the ImageNet images in --data, and of the largest embedded photographs."""
NUM_CLASSES = 10


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "", tables=TABLES)
    network, pixels, *chosen = (options.table or TABLES[0]).split("-")
    batches = QUICK_BATCH_SIZES if options.quick else [int(batch) for batch in chosen] or BATCH_SIZES
    rows = [_measure(options, network, int(pixels), batch) for batch in batches]
    last = rows[-1]
    print_results(
        f"real {network}-{pixels}",
        rows,
        {f"seconds_to_verdict_b{last['batch']}": last["cpu_seconds"], f"above_null_db_b{last['batch']}": last["above_null_db"]},
        options,
    )


def _measure(options: Options, network: str, pixels: int, batch: int) -> dict[str, Any]:
    """Attack the update of one client by Inverting Gradients and by its null, and return a row.

    The client's epoch has two batches of `batch` images, or one with --quick.
    """
    steps = 2 if options.quick else 300 if options.device == "cpu" else 1000
    count = batch if options.quick else 2 * batch
    found = _load_examples(options, pixels, count)
    case = _make_client(options, network, found.data, batch).make_case(
        list(zip(found.x.split(batch), found.y.split(batch), strict=True)), f"{network}-{pixels}-{batch}"
    )
    search = inverting_gradients(steps=steps, tv=3e-3, **PUBLISHED_SEARCH)
    started, scores, made = perf_counter(), [], []
    with measure_cpu() as clock:
        for attack in (search, search.null()):
            progress = _stop_after(SEARCH_SECONDS[options.device])
            (answer,) = replace(attack, device=options.device)(
                [case], rng=torch.Generator().manual_seed(options.seed), progress=progress
            )
            made.append(answer)
    scores = [psnr(match_examples(answer, found.x)[0], found.x) for answer in made]
    gained = (scores[0] - scores[1]).tolist()
    half = 1.96 * stdev(gained) / len(gained) ** 0.5 if len(gained) > 1 else None
    return {
        "network": network,
        "pixels": found.data.shape[-1],
        "batch": batch,
        "examples": count,
        "data": found.name,
        "part": found.part,
        "iterations": made[0].iterations,
        "ended": _describe_end(made[0], options.device),
        "most_iterations": steps,
        "closed_form": _describe_closed_form(case, options),
        "psnr": float(scores[0].mean()),
        "null_psnr": float(scores[1].mean()),
        "above_null_db": mean(gained),
        "interval_db": half,
        "cpu_seconds": clock.seconds,
        "wall_seconds": perf_counter() - started,
    }


def _stop_after(seconds: float) -> Callable[[int, int, str], None]:
    """Return a progress callback that interrupts a search at the end of the first iteration after this many CPU-seconds."""
    end = process_time() + seconds

    def report(done: int, most: int, text: str) -> None:
        if process_time() > end:
            raise KeyboardInterrupt

    return report


def _describe_end(answer: Reconstruction, device: str) -> str:
    if answer.interrupted:
        return f"limit of {SEARCH_SECONDS[device]:.0f} CPU-seconds"
    return "given up" if any("was given up" in note for note in answer.notes) else "all iterations"


def _load_examples(options: Options, pixels: int, count: int) -> Images:
    if options.data:
        images = load_images(options, "imagenet", count)
    else:
        loaded = datasets.load("photos", size=min(pixels, STORED_PIXELS))
        order = torch.randperm(len(loaded.train), generator=torch.Generator().manual_seed(options.seed))
        chosen = order.repeat(-(-count // len(order)))[:count]
        x, y = loaded.train[chosen.numpy()]
        images = Images("photos", x, torch.as_tensor(y), loaded.spec)
    side = QUICK_PIXELS if options.quick else pixels
    x = interpolate(images.x, size=(side, side), mode="bilinear", antialias=True).clamp(0, 1)
    return replace(images, x=x, y=images.y % NUM_CLASSES, data=DataSpec(shape=(3, side, side), num_classes=NUM_CLASSES))


def _make_client(options: Options, network: str, data: DataSpec, batch: int) -> LocalClient:
    made = make_client("torchvision", data, seed=options.seed, arguments={"architecture": NETWORKS[network]})
    return replace(made, training=Training(learning_rate=0.01, momentum=0.9, batch_size=batch, epochs=1))


def _describe_closed_form(case: Case, options: Options) -> str:
    """Return the name of the closed form that gives an answer, or the reason why none applies. No search is run."""
    try:
        (answer,), _ = run_attack(exact(fallback="none"), [case], options)
    except ValueError as error:
        return str(error).split(";")[0].splitlines()[0][:100]
    return answer.route


if __name__ == "__main__":
    main()
