"""Training of the enhancer that this project ships: a network that improves the images that an attack reconstructs.

It is trained on the tuning part of ImageNet, which shares no image with the report part, on which published tables are measured.
"""

from pathlib import Path

from support.contract import Options, ResultRow, TableAndSummary, measure_cpu
from support.splits import count_part, load_images

from attacker.attacks.learned.prior_file import PriorFacts, write_prior
from attacker.attacks.learned.training import ADVERSARIAL_OF_ENHANCERS, PriorTraining, Trainer

TRAINING = PriorTraining(steps=1600, adversarial=ADVERSARIAL_OF_ENHANCERS)
QUICK_TRAINING = PriorTraining(steps=4)
FACTS = PriorFacts(kind="enhancer", size=64, settings={"width": 16}, data="ImageNet, tuning part of benchmarks/support/splits.py")


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
        QUICK_TRAINING if options.quick else TRAINING,
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
