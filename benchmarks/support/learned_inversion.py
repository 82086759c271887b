"""Rows of the table `learned` of batches.py: Learning to Invert and Inverting Gradients, both knowing the clients' defense."""

from pathlib import Path

import numpy as np
import torch
from torch import Generator, Tensor

from attacker.attacks import AttackSpec, Case
from attacker.attacks.presets import get_arguments
from support.cocktail import measure_assigned
from support.contract import Options, ResultRow, measure_cpu
from support.single_cases import make_client
from support.splits import load_images

PUBLIC_IMAGES, ATTACKED = 2000, 8
"""Number of public images, which are of the tuning part, and of attacked images, in batches of one client each."""
DEFENSES = ("", "sign", "qsgd(levels=1)", "gaussian(snr_db=0)", "prune(ratio=0.99)")
BATCHES = (2, 4)
"""Batch sizes of further rows, without a defense and with the last two of `DEFENSES`."""
SETTINGS = {"simulations": 2000, "epochs": 10}
MODEL = "lenet_cpl"


def list_learned_settings(*, quick: bool) -> list[tuple[str, int]]:
    """Return the defense, as in an experiment ("" for none), and the batch size of each row. With `quick`, two rows."""
    alone = [(defense, 1) for defense in DEFENSES]
    return alone[:2] if quick else [*alone, *((defense, batch) for defense in ("", *DEFENSES[-2:]) for batch in BATCHES)]


def make_learned_row(options: Options, defense: str, batch: int, folder: Path) -> ResultRow:
    """Return one row: mean PSNR in dB of Learning to Invert, Inverting Gradients and their nulls on clients with one step each.

    better: number of images that Learning to Invert recovers with a higher PSNR than its null, the mean public image.
    batch: number of images of a client; the answers for a client are assigned to its images. folder: for the archive of public
    images.
    """
    few = options.quick
    count, public = (2, 200) if few else (ATTACKED, PUBLIC_IMAGES)
    archive = _write_public(options, public, folder)
    images = load_images(options, "cifar10", count)
    client = make_client(MODEL, images.data, seed=options.seed)
    batches = zip(images.x.split(batch), images.y.split(batch), strict=True)
    cases = [client.make_case([one], f"c{i}", defense, noise_seed=i) for i, one in enumerate(batches)]
    settings = {**SETTINGS, **({"simulations": 200, "epochs": 2} if few else {}), "images": str(archive)}
    tuned = get_arguments("inverting_gradients", "tuned", client.model, client.data) | ({"steps": 50} if few else {})
    with measure_cpu() as learned_clock:
        learned = _attack(AttackSpec(name="learning_to_invert", arguments=settings), cases, options, images.x)
    mean = _attack(AttackSpec(name="learning_to_invert", arguments=settings, null=True), cases, options, images.x)
    with measure_cpu() as search_clock:
        search = _attack(AttackSpec(name="inverting_gradients", arguments=tuned), cases, options, images.x)
    blind = _attack(AttackSpec(name="inverting_gradients", arguments=tuned, null=True), cases, options, images.x)
    return {
        "defense": defense or "none",
        "batch": batch,
        "n": count,
        "learned": float(learned.mean()),
        "learned_null": float(mean.mean()),
        "better": int((learned > mean).sum()),
        "inverting_gradients": float(search.mean()),
        "its_null": float(blind.mean()),
        "learned_cpu_seconds": learned_clock.seconds,
        "search_cpu_seconds": search_clock.seconds,
        "part": images.part,
    }


def _write_public(options: Options, count: int, folder: Path) -> Path:
    """Write the public images, which are of the tuning part, into an archive, and return its path."""
    path = folder / "public.npz"
    if not path.exists():
        public = load_images(options, "cifar10", count, part="tuning")
        values = (public.x * 255).round().byte().permute(0, 2, 3, 1).numpy()
        np.savez(path, images=values, labels=public.y.numpy())
    return path


def _attack(spec: AttackSpec, cases: list[Case], options: Options, x: Tensor) -> Tensor:
    """Return the PSNR (N,) in dB of the answers to the images x (N, *shape) of all cases, each with the answer assigned to it."""
    found = {
        one.case: one.x.clamp(0, 1) for one in spec.build(device=options.device)(cases, rng=Generator().manual_seed(options.seed))
    }
    own = zip(cases, x.split(len(x) // len(cases)), strict=True)
    return torch.cat([measure_assigned(found[case.key], batch) for case, batch in own])
