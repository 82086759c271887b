"""The rows of the table `cocktail` of batches.py, on images recovered from the gradient of a first linear layer.

The attack `cocktail_party` separates the images of a batch by independent component analysis.
"""

from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from attacker.attacks import AttackSpec
from attacker.scoring.metrics import psnr
from fedsim.recording import Training
from support.attacked import run_attack
from support.batches import TRAINING_IMAGES, TRAINING_STEPS
from support.contract import Options, ResultRow
from support.matches import EXACT_DB
from support.rounds.federation import make_mlp_client, pretrain
from support.splits import load_images

RATE = 0.01


@dataclass(frozen=True, kw_only=True)
class SeparatedBatch:
    """The settings of one row of the table: a batch, the network that trains on it, and the attack.

    batch: number of images. width: of the hidden layer. state: of the network, "untrained" or "trained".
    criterion: objective of the separation: "likelihood", or "published" for the loss of the attack's paper.
    refine:    whether the attack, starting from the separated images, solves for exact ones.
    steps:     number of iterations with criterion "published"; "likelihood" ignores it.
    """

    batch: int
    width: int = 256
    state: str = "trained"
    criterion: str = "likelihood"
    refine: bool = True
    steps: int = 25_000


def list_separated(*, quick: bool) -> list[SeparatedBatch]:
    """Return the settings of all rows, which differ in batch size, width, training, refinement and loss; `quick`: of two rows."""
    if quick:
        return [SeparatedBatch(batch=32), SeparatedBatch(batch=32, criterion="published", refine=False, steps=200)]
    rows = [SeparatedBatch(batch=batch, refine=refine) for batch in (32, 64, 128) for refine in (False, True)]
    rows += [SeparatedBatch(batch=batch, state="untrained") for batch in (32, 64, 128)]
    rows += [SeparatedBatch(batch=batch, width=512) for batch in (32, 64)]
    return [*rows, SeparatedBatch(batch=32, criterion="published", refine=False)]


def make_separated_row(options: Options, setting: SeparatedBatch) -> ResultRow:
    """Attack one batch, and return a row on the PSNR of its images, whose columns batches.py describes."""
    images = load_images(options, "cifar10", setting.batch)
    training = Training(learning_rate=RATE, batch_size=setting.batch, steps=1)
    client = make_mlp_client(images.data, training, hidden=setting.width, seed=options.seed)
    if setting.state == "trained":
        others = load_images(options, "cifar10", TRAINING_IMAGES, part="tuning")
        client = pretrain(client, others, steps=TRAINING_STEPS, seed=options.seed)
    case = client.make_case([(images.x, images.y)], "c0")
    arguments: dict[str, Any] = {"criterion": setting.criterion, "refine": setting.refine, "steps": setting.steps}
    attack = AttackSpec(name="cocktail_party", arguments=arguments).build()
    (answer,), seconds = run_attack(attack, [case], options)
    (grey,), _ = run_attack(attack.null(), [case], options)
    best = {name: measure_assigned(one.x.clamp(0, 1), images.x) for name, one in (("attack", answer), ("null", grey))}
    return {
        "batch": setting.batch,
        "width": setting.width,
        "network": setting.state,
        "criterion": setting.criterion,
        "refine": setting.refine,
        "psnr": float(best["attack"].mean()),
        "median_psnr": float(best["attack"].median()),
        "above_null": float((best["attack"] > best["null"]).double().mean()),
        "above_20": float((best["attack"] > 20).double().mean()),
        "exact": float((best["attack"] > EXACT_DB).double().mean()),
        "null": float(best["null"].mean()),
        "cpu_seconds": seconds,
        "part": images.part,
    }


def measure_assigned(found: Tensor, x: Tensor) -> Tensor:
    """Return the PSNR (N,) of each original to the answer assigned to it, at most 100 dB; 0 for an original without an answer.

    No answer is assigned to two originals. Of all assignments, the one with the largest sum of these PSNR values is taken.
    found: answers (M, *shape). x: originals (N, *shape).
    """
    pairs = torch.stack([psnr(one.expand_as(x), x) for one in found])
    answers, originals = (torch.as_tensor(one) for one in linear_sum_assignment(-pairs.clamp(max=100).numpy()))
    best = torch.zeros(len(x)).index_put((originals,), pairs[answers, originals].float())
    return best.clamp(max=100)
