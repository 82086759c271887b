"""The share of a second epoch's examples that are linked to the right example of the first, by method (AGIC, table V)."""

from collections.abc import Sequence

import torch
from support.agic.clients import ResNetFederation
from support.attacked import PUBLISHED_SEARCH
from support.contract import Options, ResultRow, measure_cpu
from support.splits import Images, load_images

from attacker.attacks import Case
from attacker.attacks.linking import RoundDescription
from attacker.attacks.linking.links import Matching
from attacker.attacks.linking.matching import Filter, match_greedily, match_optimally
from attacker.attacks.linking.pair_costs import compute_pair_costs
from attacker.attacks.multi_round.agic import ComparedBy
from attacker.attacks.multi_round.descriptions import Describer
from attacker.attacks.papers.agic import agic

PAPER_MATCHES = {1: {"no labels": 0.873, "labels": 0.981}, 4: {"no labels": 0.547, "labels": 0.705}}
"""Share of right pairs in table V by batch size, for reconstructed images that are average-pooled before they are compared.

The paper uses 1,000 CIFAR-100 images, 2,000 iterations each.
"""


def measure_linking(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Link the examples of two shuffled epochs of one client by several methods; return the shares of right links.

    The learning rate is 1e-4. After each round, which is one step on one batch, the client's update is added to the global
    weights.
    """
    large = options.device != "cpu"
    rows: list[ResultRow] = []
    summary: ResultRow = {}
    for batch in (1, 4):
        count, few, pre_steps = (
            (batch, batch, 1) if options.quick else (1000, 1000, 2000) if large else (50 * batch, 4 + 4 * batch, 30)
        )
        images = load_images(options, "cifar100", count)
        by_features, seconds = _describe_rounds(options, images, batch, "features", 1)
        for matching in ("assignment", "greedy"):
            rate = _measure_rate(images, by_features, _draw_order(options, count, batch), matching, "own")
            rows.append(_make_row(images, batch, f"features, {matching}", rate, seconds))
        summary |= {f"matching_b{batch}": rows[-2]["matched"]}
        images = load_images(options, "cifar100", few)
        by_images, seconds = _describe_rounds(options, images, batch, "images", pre_steps)
        for matching, rule in (("greedy", "lists"), ("assignment", "own")):
            rate = _measure_rate(images, by_images, _draw_order(options, few, batch), matching, rule)
            method = "greedy as published" if matching == "greedy" else "assignment, own labels"
            rows.append(_make_row(images, batch, f"images of {pre_steps} iterations, {method}", rate, seconds))
        summary |= {f"matching_b{batch}_greedy": rows[-2]["matched"]}
        rows += [
            {"source": "AGIC, table V", "batch": batch, "by": by, "matched": value} for by, value in PAPER_MATCHES[batch].items()
        ]
    return rows, summary


def _draw_order(options: Options, count: int, batch: int) -> list[list[int]]:
    """Return the image indices of each batch of two shuffled epochs, in order."""
    rng = torch.Generator().manual_seed(options.seed + 2)
    return [rows.tolist() for _ in range(2) for rows in torch.randperm(count, generator=rng).split(batch)]


def _describe_rounds(
    options: Options, images: Images, batch: int, compare: ComparedBy, pre_steps: int
) -> tuple[list[RoundDescription], float]:
    """Return what the attack links rounds by: one description for each round; and CPU-seconds per round.

    batch: number of images per round. compare: what rounds are compared by: "features" (inputs of the last layer) or
    reconstructed "images". pre_steps: iterations of the search that reconstructs these images.
    """
    describer = Describer(agic(signed=True, tv=1e-4, **PUBLISHED_SEARCH).matching, compare, pre_steps, options.device)
    federation = ResNetFederation(options, images.data)
    described, spent = [], 0.0
    for number, rows in enumerate(_draw_order(options, len(images), batch), start=1):
        observation = federation.observe_client(images, rows, round=number)
        with measure_cpu() as clock:
            described += describer(Case((observation,)), torch.Generator().manual_seed(options.seed), None, None)
        spent += clock.seconds
        federation.client = federation.client.add(observation.update)
    return described, spent / len(described)


def _measure_rate(
    images: Images, described: Sequence[RoundDescription], order: Sequence[Sequence[int]], matching: Matching, rule: Filter
) -> float:
    """Return the share of the second epoch's examples that are paired with the same image in the first epoch.

    The attack is told which rounds belong to which epoch, as in the paper. order: indices of the images of each round. The
    attack's examples of a round, in the order of inferred labels, are taken for the round's images, in the order of true labels;
    an example with a wrong inferred label counts as a wrong pair. rule: which pairs of examples may be linked, by their inferred
    labels; see `compute_pair_costs`.
    """
    cost = compute_pair_costs(described, rule=rule).cost[len(images) :, : len(images)]
    pairs = match_greedily(cost) if matching == "greedy" else match_optimally(cost)
    held = [i for rows in order for i in sorted(rows, key=lambda i: int(images.y[i]))]
    read = [label for one in described for label in one.labels.tolist()]
    held = [i if int(images.y[i]) == label else -1 - at for at, (i, label) in enumerate(zip(held, read, strict=True))]
    return sum(held[len(images) + row] == held[column] for row, column in pairs) / len(images)


def _make_row(images: Images, batch: int, by: str, rate: float, seconds: float) -> ResultRow:
    data = {"source": "measured", "data": images.name, "images": len(images)}
    return {**data, "batch": batch, "by": by, "matched": rate, "cpu_seconds_a_round": seconds}
