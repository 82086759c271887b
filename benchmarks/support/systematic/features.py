"""The attacked clients of systematic.py, and the rows of its feature table.

Clients take one step, or several, on a batch, through a defense of the batch's gradient. The feature table holds features that
the paper's tensor method recovers, beside the paper's table 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from support.contract import Options, ResultRow, measure_cpu
from support.single_cases import make_client
from support.splits import Images, load_images
from support.systematic.paper import find_feature_error
from torch import Generator, Tensor

from attacker.attacks import Case
from attacker.attacks.gradients.observed import ObservedGradients
from attacker.attacks.labels.probes import compute_head_inputs
from attacker.attacks.matching.feature_matching import recover_case_features
from attacker.attacks.networks.gaussian_layer import find_wide_layer
from attacker.attacks.simulation.client import build_network
from fedsim.recording import Training

RATE, LOCAL_RATE = 1.0, 0.01
"""Learning rate of an attacked client with one step, whose update is the gradient up to its sign, on which defenses act as in the
paper; and learning rate with several steps."""
BATCHES = (1, 2, 4, 8)
IMAGES = 48
NETWORK = {"base": "lenet_cpl", "activation": "tanh", "features": 128, "neurons": 8192}
"""The paper's network, a ResNet-18, has 512 features; the copy of the paper that was used lacks its number of neurons."""


def count_local_steps(defense: str) -> int:
    """Return the number of local steps of a client: more than 1 if `defense` is, for example, "3 local steps"."""
    return int(defense.split()[0]) if defense.endswith("local steps") else 1


def get_defense(defense: str) -> str:
    """Return the specification of a defense as `DefenseSpec.parse` takes it; "" for none and for local steps."""
    return "" if defense == "none" or count_local_steps(defense) > 1 else defense


def make_cases(name: str, arguments: Mapping[str, Any], images: Images, defense: str, batch: int, *, seed: int = 0) -> list[Case]:
    """Return one case per batch of images, each with one update of a different client.

    name, arguments: of the network, whose weights are drawn with `seed`. batch: number of images in each batch.
    """
    steps = count_local_steps(defense)
    training = Training(learning_rate=RATE if steps == 1 else LOCAL_RATE, batch_size=batch, epochs=steps)
    client = replace(make_client(name, images.data, arguments=arguments, seed=seed), training=training)
    cases = []
    for i, (x, y) in enumerate(zip(images.x.split(batch), images.y.split(batch), strict=True)):
        update = client.compute_update([(x, y)] * steps)
        cases.append(Case((client.observe(update, i + 1, f"c{i}", (), len(y), get_defense(defense)),)))
    return cases


def make_feature_row(options: Options, defense: str, *, distinct: bool = True) -> ResultRow:
    """Return a row with the mean feature error (see `_measure_error`) and the paper's error for each batch size.

    The paper's error is None if not `distinct`.
    defense: one of `FEATURE_DEFENSES` or `PER_TENSOR`. distinct: whether the labels of a batch differ, as in stratified draws;
    if False, batches are drawn at random, and examples with equal labels share a span.
    """
    count = 16 if options.quick else IMAGES
    images = load_images(options, "cifar10", count)
    with measure_cpu() as clock:
        errors = {batch: _measure_error(options, _draw(images, batch, distinct=distinct), defense, batch) for batch in BATCHES}
    row: ResultRow = {"defense": defense, "labels": "distinct" if distinct else "random", "images": count}
    for batch, error in errors.items():
        row[f"b{batch}"] = error
        row[f"published_b{batch}"] = find_feature_error(defense, batch) if distinct else None
    return {**row, "flat": max(errors.values()) / min(errors.values()), "cpu_seconds": clock.seconds, "part": images.part}


def _draw(images: Images, batch: int, *, distinct: bool) -> Images:
    """Return the images in an order in which labels of a batch differ; unchanged if not `distinct`.

    Images that are left over and fill no batch are left out. batch: size of a batch.
    """
    if not distinct:
        return images
    left, chosen = list(range(len(images))), list[int]()
    while left:
        own: list[int] = []
        for i in left:
            if len(own) < batch and int(images.y[i]) not in images.y[own].tolist():
                own.append(i)
        if len(own) < batch:
            break
        chosen += own
        left = [i for i in left if i not in own]
    return images.of(chosen)


def _measure_error(options: Options, images: Images, defense: str, batch: int) -> float:
    """Return the mean norm of the part of an example's features, scaled to norm 1, outside the span of all recovered features."""
    cases = make_cases("wide_head", NETWORK, images, defense, batch, seed=options.seed)
    parts = [_measure_outside(case, x, y) for case, x, y in zip(cases, images.x.split(batch), images.y.split(batch), strict=True)]
    return float(torch.cat(parts).mean())


def _measure_outside(case: Case, x: Tensor, y: Tensor) -> Tensor:
    (first,) = case.observations
    seen = ObservedGradients([first], model=build_network(first), device="cpu")
    bases = recover_case_features(seen, y, Generator().manual_seed(0)).bases
    features, _ = compute_head_inputs(
        seen.model, seen.data, seen.get_state(0)["weights"], first.data.normalise(x), layer=find_wide_layer(seen.model)
    )
    u, s, _ = torch.linalg.svd(bases.permute(1, 0, 2).flatten(1), full_matrices=False)
    span, unit = u[:, s > 1e-6 * s[0].clamp(min=1e-12)], torch.nn.functional.normalize(features.detach().double(), dim=1)
    outside: Tensor = (unit - unit @ span @ span.T).norm(dim=1)
    return outside
