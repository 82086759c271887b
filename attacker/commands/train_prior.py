"""Command `attacker train-prior`."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from attacker.commands.options import Device, resolve_device
from fedsim.commands.console import Json, err, out, print_json, report_errors, show_progress_bar

KEPT_ON_INTERRUPT = "a checkpoint is kept; run the same command again to continue"


def train_prior(
    data: Annotated[
        Path,
        typer.Argument(help="Public images: a folder of image files, or a NumPy archive with images (N, H, W, 3) of type uint8."),
    ],
    out_file: Annotated[Path, typer.Option("--out", help="File of the prior, which must end in .safetensors.")],
    kind: Annotated[
        Literal["enhancer", "autoencoder", "generator", "denoiser"],
        typer.Option(
            help="enhancer: sharpens reconstructions. autoencoder: its latents are searched in place of pixels. generator: its "
            "latents, features or weights are searched; it is conditional on classes if an archive has labels. denoiser: keeps "
            "a search near images that it leaves as they are."
        ),
    ] = "enhancer",
    size: Annotated[Literal["32", "64", "128"], typer.Option(help="Side of the images in training, in pixels.")] = "64",
    steps: Annotated[int, typer.Option(min=1, help="Number of batches.")] = 2000,
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 16,
    width: Annotated[int, typer.Option(min=1, max=512, help="Channels of the network at full resolution.")] = 16,
    factor: Annotated[
        Literal["4", "8", "16"], typer.Option(help="Ratio of the sides of image and latent of an autoencoder.")
    ] = "4",
    adversarial: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Weight of the adversarial loss beside l1; 0 for l1 alone, which denoisers always have. Default: 0.03 for an "
            "enhancer, 0.01 for the other kinds.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of weights and batches.")] = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Train a learned image prior, for --set enhancer=FILE, decoder=FILE or denoiser=FILE, on public images.

    The file holds the weights in half precision, and a description of the training images, with hashes and the seed. If the same
    command is repeated after Ctrl-C or a crash, training continues from a checkpoint beside the file.
    """
    with report_errors(kept=KEPT_ON_INTERRUPT):
        from attacker.attacks.learned.images import read_images, read_labels
        from attacker.attacks.learned.prior_file import FILE_ENDING, PriorFacts, write_prior
        from attacker.attacks.learned.training import ADVERSARIAL_OF_ENHANCERS, PriorTraining, Trainer

        if out_file.suffix != FILE_ENDING:
            raise ValueError(f"--out must end in {FILE_ENDING}, got {out_file}")
        images = read_images(data, int(size))
        labels = read_labels(data, len(images)) if kind == "generator" else None
        settings = {"width": width} | ({"factor": int(factor)} if kind == "autoencoder" else {})
        if kind == "generator":
            settings |= {"latents": 4 * int(size), "side": int(size), "classes": 1 if labels is None else 1 + int(labels.max())}
        if adversarial is None:
            adversarial = ADVERSARIAL_OF_ENHANCERS if kind == "enhancer" else PriorTraining.adversarial
        facts = PriorFacts(kind=kind, size=int(size), settings=settings, data=data.name, seed=seed)
        trainer = Trainer(
            images,
            facts,
            PriorTraining(steps=steps, batch=batch, adversarial=adversarial),
            resolve_device(device),
            checkpoint=out_file.with_name(out_file.name + ".checkpoint"),
            labels=labels,
        )
        with show_progress_bar() as bar:
            task = bar.add_task(kind, total=steps, words="")
            network = trainer.run(lambda done, total, words: bar.update(task, completed=done, words=escape(words)))
        digest = write_prior(out_file, network, trainer.facts)
        trainer.clean_up()
        err.print(f"{kind} trained on {trainer.facts.images} images of {escape(data.name)}, {steps} steps; hash {digest[:12]}")
        if as_json:
            print_json(
                {"file": str(out_file), "hash": digest, "images": trainer.facts.images, "data_hash": trainer.facts.data_hash}
            )
            return
        out.print(str(out_file), soft_wrap=True)
