"""Rows of the table `learned` of batches.py: Learning to Invert and Inverting Gradients, both knowing the clients' defense."""

from pathlib import Path

import torch
from torch import Tensor

from attacker.attacks import Attack, AttackSpec, Case
from attacker.attacks.presets import get_arguments
from support.attacked import run_attack
from support.batches import measure_assigned
from support.contract import Options, ResultRow
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
    archive = folder / "public.npz"
    load_images(options, "cifar10", public, part="tuning").write(archive)
    images = load_images(options, "cifar10", count)
    client = make_client(MODEL, images.data, seed=options.seed)
    batches = zip(images.x.split(batch), images.y.split(batch), strict=True)
    cases = [client.make_case([one], f"c{i}", defense, noise_seed=i) for i, one in enumerate(batches)]
    settings = {**SETTINGS, **({"simulations": 200, "epochs": 2} if few else {}), "images": str(archive)}
    tuned = get_arguments("inverting_gradients", "tuned", client.model, client.data) | ({"steps": 50} if few else {})
    psnr, seconds = dict[str, Tensor](), dict[str, float]()
    for name, arguments in (("learning_to_invert", settings), ("inverting_gradients", tuned)):
        attack = AttackSpec(name=name, arguments=arguments).build()
        psnr[name], seconds[name] = _measure_psnr(attack, cases, options, images.x)
        psnr[f"{name}, null"], _ = _measure_psnr(attack.null(), cases, options, images.x)
    learned, mean = psnr["learning_to_invert"], psnr["learning_to_invert, null"]
    return {
        "defense": defense or "none",
        "batch": batch,
        "n": count,
        "learned": float(learned.mean()),
        "learned_null": float(mean.mean()),
        "better": int((learned > mean).sum()),
        "inverting_gradients": float(psnr["inverting_gradients"].mean()),
        "its_null": float(psnr["inverting_gradients, null"].mean()),
        "learned_cpu_seconds": seconds["learning_to_invert"],
        "search_cpu_seconds": seconds["inverting_gradients"],
        "part": images.part,
    }


def _measure_psnr(attack: Attack, cases: list[Case], options: Options, x: Tensor) -> tuple[Tensor, float]:
    """Return the PSNR (N,) in dB of the images x of all cases, each with the answer assigned to it, and the CPU-seconds."""
    answers, seconds = run_attack(attack, cases, options)
    found = {answer.case: answer.x.clamp(0, 1) for answer in answers}
    own = zip(cases, x.split(len(x) // len(cases)), strict=True)
    return torch.cat([measure_assigned(found[case.key], batch) for case, batch in own]), seconds
