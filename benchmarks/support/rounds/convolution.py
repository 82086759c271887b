"""The table `convolution` of rounds.py: a client's batches over five epochs, attacked round by round, and all rounds together.

The client has eight images and trains on one batch of four in each round, so that an epoch takes two rounds. The network is CPL's
LeNet. An attack on all rounds together needs links: claims that certain examples of different rounds are the same image. In one
row of the table the attack finds them itself; in another it is given the true ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean

import torch
from support.contract import Options, ResultRow, measure_cpu
from support.rounds.accumulation import make_network
from support.rounds.federation import record_epochs
from support.splits import Images, load_images
from torch import Generator, Tensor

from attacker.attacks import Case, accumulate
from attacker.attacks.linking import Links
from attacker.attacks.multi_round.agic import Agic
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.metrics import psnr

BATCH, EXAMPLES, EPOCHS = 4, 8, 5
STEPS = 30
"""Iterations of the search, of up to 20 evaluations each; equal for single rounds and for all."""
LEARNING_RATE = 0.01


def make_convolution_rows(asked: Options) -> list[ResultRow]:
    """Return three rows with the PSNR of each image and their mean, for three ways to attack the same rounds.

    The first way attacks each round alone, and takes for each image the round with the highest PSNR. The second attacks all
    rounds together, and finds the links itself (which examples of different rounds are the same image). The third is given the
    true links and labels.
    """
    images = load_images(asked, "cifar10", EXAMPLES)
    network = make_network(images, asked.seed, BATCH, LEARNING_RATE)
    case, used = record_epochs(network, images, BATCH, 2 if asked.quick else EPOCHS, "c", seed=asked.seed)
    attack = replace(accumulate(compare="features", steps=2 if asked.quick else STEPS), device=asked.device)
    rng, rows = Generator().manual_seed(asked.seed), []
    with measure_cpu() as clock:
        alone = [attack([replace(case, observations=(one,))], rng=rng)[0] for one in case.observations]
    best = torch.full((len(images),), -torch.inf)
    for one, batch in zip(alone, used, strict=True):
        best[batch] = torch.maximum(best[batch], _measure_assigned(one, images.x[batch]))
    rows.append(_make_row("best single round", best, clock.seconds, case, images))
    with measure_cpu() as clock:
        (joint,) = attack([case], rng=rng)
    found = _make_row("all rounds, linked by features", _measure_assigned(joint, images.x), clock.seconds, case, images)
    rows.append(found | {"link_rate": _measure_links(joint, used, images), "candidates": len(joint.x)})
    told = Links(tuple(torch.tensor(batch) for batch in used), torch.ones(len(images)), images.y)
    with measure_cpu() as clock:
        (right,) = attack([replace(case, links=told)], rng=rng)
    rows.append(
        _make_row("all rounds, true links and labels given", _measure_assigned(right, images.x), clock.seconds, case, images)
    )
    return [row | {"null_psnr": _measure_null(attack, case, images)} for row in rows]


def _make_row(by: str, each: Tensor, seconds: float, case: Case, images: Images) -> ResultRow:
    return {
        "by": by,
        "rounds": len(case.observations),
        "batch": BATCH,
        "images": len(images),
        "psnr": mean(each.tolist()),
        "each": " ".join(f"{value:.1f}" for value in each.tolist()),
        "cpu_seconds": seconds,
        "part": images.part,
    }


def _measure_null(attack: Agic, case: Case, images: Images) -> float:
    (null,) = attack.null()([case], rng=Generator().manual_seed(0))
    return mean(_measure_assigned(null, images.x).tolist())


def _measure_assigned(found: Reconstruction, x: Tensor) -> Tensor:
    """Return the PSNR (N,) of the reconstruction assigned to each original; 0 for an original without one.

    Only the N reconstructions that the attack itself ranks best are assigned. x: originals (N, *shape).
    """
    guesses = keep_first(found, len(x)).x.nan_to_num().clamp(0, 1)
    chosen = assign_reconstructions(guesses, x)
    return torch.tensor([0.0 if i is None else float(psnr(guesses[[i]], x[[j]])[0]) for j, i in enumerate(chosen)])


def _measure_links(found: Reconstruction, used: Sequence[Sequence[int]], images: Images) -> float:
    """Estimate the share of pairs (one image used in two rounds) that the attack found to be the same image.

    The examples that the attack places in a round are matched with the round's images by label. If two images of a batch share a
    label, the match is arbitrary, so that right links may count as wrong. used: indices of the images of each round.
    """
    slots: dict[tuple[int, int], int] = {}
    rounds = sorted({slot.round for slot in found.slots})
    for number, batch in zip(rounds, used, strict=True):
        left = list(batch)
        for slot in (slot for slot in found.slots if slot.round == number):
            label = int(found.y[slot.example])
            image = next((i for i in left if int(images.y[i]) == label), None)
            if image is not None:
                left.remove(image)
                slots[number, image] = slot.example
    pairs = linked = 0
    for image in range(len(images)):
        held = [slots.get((number, image), -number) for number, batch in zip(rounds, used, strict=True) if image in batch]
        for one, other in combinations(held, 2):
            pairs, linked = pairs + 1, linked + (one == other)
    return linked / pairs
