"""Rows of the table of batches.py: what the attack `exact` recovers, by a closed form, from one client's update."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks import AttackSpec, Case
from attacker.reconstruction import Reconstruction
from attacker.scoring.metrics import psnr
from fedsim.recording import Training
from support.contract import Options, ResultRow, measure_cpu
from support.rounds.federation import RecordedNetwork, make_network, make_update, observe, train_network
from support.splits import Part, load_images

EXACT_DB = 60.0
"""PSNR above which an image counts as exact."""
CERTAIN = 0.9
"""Confidence above which an answer counts as certified."""
TRAINING_IMAGES, TRAINING_STEPS = 512, 300


@dataclass(frozen=True, kw_only=True)
class LargeBatch:
    """The settings of one row of the table.

    batch: number of examples of a step. width: of the hidden layer. state: "untrained" or "trained". steps: local steps of the
    client, each on a batch of its own. defense: specification such as "clip(4)"; "" for none. rate: learning rate.
    """

    batch: int
    width: int
    state: str = "untrained"
    steps: int = 1
    defense: str = ""
    rate: float = 0.01


def list_batch_settings(*, quick: bool) -> list[LargeBatch]:
    """Return the settings of all rows: several batch sizes, widths, trained networks and defenses."""
    if quick:
        return [LargeBatch(batch=32, width=256), LargeBatch(batch=32, width=256, defense="gaussian(snr_db=20)")]
    grid = [(16, 512), (32, 512), (64, 512), (64, 1024), (128, 1024), (128, 2048)]
    rows = [LargeBatch(batch=batch, width=width) for batch, width in grid]
    rows += [LargeBatch(batch=batch, width=512, state="trained") for batch in (8, 16, 32)]
    rows += [LargeBatch(batch=64, width=512, defense=f"gaussian(snr_db={db})") for db in (60, 40, 20)]
    rows += [LargeBatch(batch=64, width=512, defense="clip(max_norm=0.01)")]
    return [*rows, LargeBatch(batch=32, width=512, steps=2)]


def make_batch_row(asked: Options, setting: LargeBatch, part: Part = "report") -> ResultRow:
    """Return one row. Its column `exact` is the share of images recovered with a PSNR above `EXACT_DB`.

    null: the same share for grey images. certified: number of answers with a confidence above `CERTAIN`. false_certificates:
    number of these without such a PSNR. part: split of the data that the images are from.
    """
    count = setting.batch * setting.steps
    images = load_images(asked, "cifar10", count, part=part)
    training = Training(learning_rate=setting.rate, batch_size=setting.batch, steps=setting.steps)
    network = make_network(images.data, training, hidden=setting.width, seed=asked.seed)
    if setting.state == "trained":
        others = load_images(asked, "cifar10", TRAINING_IMAGES, part="tuning")
        network = train_network(network, others, steps=TRAINING_STEPS, seed=asked.seed)
    x = images.x.split(setting.batch)
    case = _make_case(network, list(zip(x, images.y.split(setting.batch), strict=True)), setting, count)
    with measure_cpu() as clock:
        found = _attack(case, asked, null=False)
    null = _attack(case, asked, null=True)
    best = _measure_best(found, images.x)
    sure = torch.zeros(0, dtype=torch.bool) if found is None else found.confidence > CERTAIN
    return {
        "batch": setting.batch,
        "width": setting.width,
        "network": setting.state,
        "steps": setting.steps,
        "defense": setting.defense or "none",
        "accuracy": network.measure_accuracy(images),
        "exact": _count_exact(best) / count,
        "certified": int(sure.sum()),
        "false_certificates": int((sure & (best.amax(dim=1) <= EXACT_DB)).sum()) if len(sure) else 0,
        "null": _count_exact(_measure_best(null, images.x)) / count,
        "cpu_seconds": clock.seconds,
        "part": images.part,
    }


def _make_case(network: RecordedNetwork, batches: list[tuple[Tensor, Tensor]], setting: LargeBatch, count: int) -> Case:
    update = make_update(network, network.weights, batches)
    return Case((observe(network, network.weights, update, 1, "c0", ("c0",), count, setting.defense),))


def _attack(case: Case, asked: Options, *, null: bool) -> Reconstruction | None:
    """Return the answer of `exact` by its closed form for a first linear layer, or of its null; None if it does not apply."""
    attack = AttackSpec(name="exact", arguments={"fallback": "none", "route": "linear"}, null=null).build(device=asked.device)
    try:
        return attack([case], rng=Generator().manual_seed(asked.seed))[0]
    except ValueError:
        return None


def _measure_best(found: Reconstruction | None, x: Tensor) -> Tensor:
    """Return the PSNR (M, N) of each of M reconstructions to each of the N originals `x`; M is 0 if `found` is None."""
    if found is None or not len(found.x):
        return torch.zeros(0, len(x))
    return torch.stack([psnr(one.expand_as(x), x) for one in found.x.clamp(0, 1)])


def _count_exact(best: Tensor) -> int:
    return int((best.amax(dim=0) > EXACT_DB).sum()) if len(best) else 0
