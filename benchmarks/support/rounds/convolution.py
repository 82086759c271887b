"""The table `convolution` of rounds.py: a client's batches over five epochs, attacked round by round, and all rounds together.

The client has eight images and trains on one batch of four in each round, so that an epoch takes two rounds. The network is CPL's
LeNet. An attack on all rounds together needs links: claims that certain examples of different rounds are the same image. In one
row of the table the attack finds the links itself; in another it is given the true links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean

import torch
from scipy.optimize import linear_sum_assignment
from support.contract import Options, ResultRow, measure_cpu
from support.rounds.accumulation import make_lenet_client
from support.rounds.federation import record_epochs
from support.splits import Images, load_images
from torch import Generator, Tensor

from attacker.attacks import Case, accumulate
from attacker.attacks.labels.probes import compute_head_inputs
from attacker.attacks.linking import Links, RoundDescription, link
from attacker.attacks.multi_round.agic import Agic
from attacker.attacks.multi_round.descriptions import Describer
from attacker.attacks.simulation.client import build_network
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.metrics import psnr
from fedsim.recording import Observation

BATCH, EXAMPLES, EPOCHS = 4, 8, 5
CLIENTS = 20
"""Number of clients whose rounds are linked without a search."""
STEPS = 30
"""Iterations of the search, of up to 20 evaluations each; equal for single rounds and for all."""
LEARNING_RATE = 0.01


def make_convolution_rows(options: Options) -> list[ResultRow]:
    """Return three rows with the PSNR of each image, for three ways to attack the same rounds, and one of linking alone.

    The first way attacks each round alone, and takes for each image the round with the highest PSNR. The second attacks all
    rounds together, and finds the links itself (which examples of different rounds are the same image). The third is given the
    true links and labels.
    """
    images = load_images(options, "cifar10", EXAMPLES)
    client = make_lenet_client(images, options.seed, BATCH, LEARNING_RATE)
    case, used = record_epochs(client, images, (BATCH,) * (2 if options.quick else EPOCHS), "c", seed=options.seed)
    attack = replace(accumulate(compare="features", steps=2 if options.quick else STEPS), device=options.device)
    rng, rows = Generator().manual_seed(options.seed), []
    with measure_cpu() as clock:
        alone = [attack([replace(case, observations=(observation,))], rng=rng)[0] for observation in case.observations]
    best = torch.full((len(images),), -torch.inf)
    for one, batch in zip(alone, used, strict=True):
        best[batch] = torch.maximum(best[batch], _measure_assigned(one, images.x[batch]))
    rows.append(_make_row("best single round", best, clock.seconds, case, images))
    with measure_cpu() as clock:
        (joint,) = attack([case], rng=rng)
    found = _make_row("all rounds, linked by features", _measure_assigned(joint, images.x), clock.seconds, case, images)
    rows.append(found | {"link_rate": _measure_links(joint, used, images), "candidates": len(joint.x)})
    links = Links(tuple(torch.tensor(batch) for batch in used), torch.ones(len(images)), images.y)
    with measure_cpu() as clock:
        (right,) = attack([replace(case, links=links)], rng=rng)
    rows.append(
        _make_row("all rounds, true links and labels given", _measure_assigned(right, images.x), clock.seconds, case, images)
    )
    return [*(row | {"null_psnr": _measure_null(attack, case, images)} for row in rows), make_linking_row(options)]


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


def _measure_assigned(answer: Reconstruction, x: Tensor) -> Tensor:
    """Return the PSNR (N,) of the reconstruction assigned to each original; 0 for an original without one.

    Only the N reconstructions that the attack itself ranks best are assigned. x: originals (N, *shape).
    """
    guesses = keep_first(answer, len(x)).x.nan_to_num().clamp(0, 1)
    chosen = assign_reconstructions(guesses, x)
    return torch.tensor([0.0 if i is None else float(psnr(guesses[[i]], x[[j]])[0]) for j, i in enumerate(chosen)])


def _measure_links(answer: Reconstruction, used: Sequence[Sequence[int]], images: Images) -> float:
    """Return the share of pairs (one image used in two rounds) that the attack claims to be the same image.

    Positions within a batch have no meaning, so that first, in each round, the reconstructions that the attack places there are
    assigned to the round's images, by truth, with the smallest sum of squared differences. used: indices of the images of each
    round.
    """
    placed: list[dict[int, int]] = []
    for number, batch in zip(sorted({slot.round for slot in answer.slots}), used, strict=True):
        here = sorted({slot.example for slot in answer.slots if slot.round == number})
        cost = torch.cdist(answer.x[here].nan_to_num().flatten(1).double(), images.x[batch].flatten(1).double()).square()
        placed.append({batch[column]: here[row] for row, column in zip(*linear_sum_assignment(cost.numpy()), strict=True)})
    return count_links(placed)[0]


def count_links(placed: Sequence[Mapping[int, int]]) -> tuple[float, float]:
    """Return the share of pairs (one image in two rounds) that are linked, and the share of links that join different images.

    placed: for each round, a dict from the index of an image to the number of the example that the attack takes it for.
    """
    pairs = right = links = 0
    for one, other in combinations(placed, 2):
        pairs += len(one.keys() & other.keys())
        right += sum(one[image] == other[image] for image in one.keys() & other.keys())
        links += len(set(one.values()) & set(other.values()))
    return right / pairs, 1 - right / links if links else 0.0


def make_linking_row(options: Options) -> ResultRow:
    """Return the row of linking alone, for many clients of `EXAMPLES` images each: shares of linked pairs and of wrong links.

    The shares are those of `count_links`. To compute them, the features that the attack infers in each round are assigned to the
    true features of the round's images. Column least: the smallest share of linked pairs of a client.
    """
    clients, rates, spent = 2 if options.quick else CLIENTS, [], 0.0
    images = load_images(options, "cifar10", clients * EXAMPLES)
    for number, own in enumerate(images.split(EXAMPLES)):
        client = make_lenet_client(own, options.seed + number, BATCH, LEARNING_RATE)
        case, used = record_epochs(client, own, (BATCH,) * EPOCHS, "c", seed=options.seed + number)
        describer = Describer(accumulate(compare="features").matching, "features", 50, options.device)
        with measure_cpu() as clock:
            described = describer(case, Generator().manual_seed(options.seed), None, None)
            links = link(described, batch_size=BATCH)
        spent += clock.seconds
        places = zip(case.observations, described, used, links.places, strict=True)
        rates.append(count_links([_place_images(seen, one, own.of(batch), batch, at) for seen, one, batch, at in places]))
    return {
        "by": f"linking alone, {clients} clients",
        "rounds": 2 * EPOCHS,
        "batch": BATCH,
        "images": len(images),
        "link_rate": mean(rate for rate, _ in rates),
        "least": min(rate for rate, _ in rates),
        "wrong_links": mean(wrong for _, wrong in rates),
        "cpu_seconds": spent,
        "part": images.part,
    }


def _place_images(seen: Observation, one: RoundDescription, own: Images, batch: Sequence[int], places: Tensor) -> dict[int, int]:
    """Return a dict from the index of each image of a round to the number of the example that it is linked to.

    The features that the attack inferred in the round are assigned to the true features of its images.
    own, batch: the images and their indices. places: number, over all rounds, of the example with each of the inferred features.
    """
    model = build_network(seen)
    assert one.features is not None
    with torch.no_grad():
        true, _ = compute_head_inputs(model, seen.data, {**seen.buffers, **seen.weights}, seen.data.normalise(own.x))
    cost = torch.cdist(one.features.double(), true.double())
    return {batch[column]: int(places[row]) for row, column in zip(*linear_sum_assignment(cost.numpy()), strict=True)}
