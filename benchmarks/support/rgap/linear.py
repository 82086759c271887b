"""The table `linear` of rgap.py: batches recovered from a first linear layer, and the mixture that R-GAP makes of a batch."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from support.contract import Options, TableAndSummary, measure_cpu
from support.matches import run_if_applicable
from support.single_cases import LocalClient, make_client
from support.splits import Images, load_images
from torch import Generator, Tensor

from attacker.attacks import exact
from attacker.attacks.closed_form.rgap.recursion import solve_last_layer, solve_layers
from attacker.attacks.networks.chain import read_chain
from attacker.reconstruction import Reconstruction
from fedsim import models
from fedsim.recording import Training

MAX_SUCCESS_MSE = 1e-3
BATCH_SIZES = (1, 2, 4, 8, 16)


def measure_linear(options: Options) -> TableAndSummary:
    """Return rows by batch size, and a summary: the attack `exact` on an MLP, and R-GAP on the network FCN3.

    The MLP is untrained, or trained for three epochs. FCN3 has three linear layers without biases, with LeakyReLU between them.
    """
    rows = []
    for name in ("mnist",) if options.quick else ("mnist", "cifar10"):
        for trained in (False, True):
            rows += [_measure_batches(name, size, trained, options) for size in ((1, 4) if options.quick else BATCH_SIZES)]
    found = {row["batch"]: row["success"] for row in rows if not row["trained"] and row["data"] == rows[0]["data"]}
    mixtures = [_measure_mixture(size, options) for size in ((2,) if options.quick else (1, 2, 5))]
    summary = {f"batch{size}": share for size, share in found.items()}
    return rows + mixtures, summary | {"mixture_in_span": max(row["off_span"] for row in mixtures)}


def _measure_batches(name: str, size: int, trained: bool, options: Options) -> dict[str, Any]:
    """Attack several batches of `size` examples of the data set `name`, and return a row with the share of examples recovered.

    trained: whether the weights are those after three epochs.
    """
    repeats = 1 if options.quick else 10
    images = load_images(options, name, 16 * repeats)
    one = make_client("mlp", images.data, seed=options.seed, batch=size)
    if trained:
        one = replace(one, weights=_train_weights(one, load_images(options, name, 512), options))
    errors, right, seconds = [], 0, 0.0
    for i in range(repeats):
        chosen = torch.randperm(len(images), generator=Generator().manual_seed(options.seed + i))[:size]
        x, y = images.x[chosen], images.y[chosen]
        case = one.make_case([(x, y)], f"{name}-{i}")
        with measure_cpu() as clock:
            answer = run_if_applicable(exact(route="linear", fallback="none"), case, options)
        seconds += clock.seconds
        own, labelled = _match_examples(answer, x, y)
        errors += own
        right += labelled
    print(f"{name} batch {size}: {sum(e <= MAX_SUCCESS_MSE for e in errors) / len(errors):.2f}", file=sys.stderr)
    return {
        "data": images.name,
        "network": "mlp",
        "trained": trained,
        "batch": size,
        "batches": repeats,
        "success": sum(error <= MAX_SUCCESS_MSE for error in errors) / len(errors),
        "labels": right / len(errors),
        "mse_median": sorted(errors)[len(errors) // 2],
        "cpu_seconds": seconds / repeats,
    }


def _match_examples(answer: Reconstruction | None, x: Tensor, y: Tensor) -> tuple[list[float], int]:
    """Match reconstructions with examples; return the MSE of each example, and how many are recovered with the right label.

    The MSE is capped at 1, and 1 for an example without a reconstruction. Recovered: an MSE of at most `MAX_SUCCESS_MSE`.
    x, y: examples (N, *shape) and their labels (N,).
    """
    errors, right = [1.0] * len(x), 0
    if answer is None:
        return errors, right
    distance = (answer.x[:, None] - x[None]).double().flatten(2).square().mean(dim=2).nan_to_num(nan=1e9)
    for i, j in zip(*linear_sum_assignment(distance.numpy()), strict=True):
        errors[j] = min(1.0, float(distance[i, j]))
        right += int(answer.y[i] == y[j] and errors[j] <= MAX_SUCCESS_MSE)
    return errors, right


def _train_weights(one: LocalClient, images: Images, options: Options) -> Mapping[str, Tensor]:
    """Return the weights of the client `one` after three epochs of SGD on the images, in batches of 16."""
    order = torch.randperm(len(images), generator=Generator().manual_seed(options.seed))
    batches = [(images.x[part], images.y[part]) for part in order.split(16)] * 3
    training = Training(learning_rate=0.1, batch_size=16, steps=len(batches))
    return one.add(replace(one, training=training).compute_update(batches)).weights


def _measure_mixture(size: int, options: Options) -> dict[str, Any]:
    """Run R-GAP, which assumes a single example, on the gradient of a batch of `size`, and return a row.

    Column mse_median: MSE of R-GAP's answer to the nearest example of this single batch. off_span: norm of the part of the answer
    that is no linear combination of the examples, relative to the norm of the answer.
    """
    images = load_images(options, "mnist", size).of_two_classes()
    one = make_client("fcn3", images.data, loss="logistic", seed=options.seed, batch=size)
    update = one.make_case([(images.x, images.y)], "mixture").observations[0].update
    gradient = {name: -t.double()[None] for name, t in update.items()}
    weights = {name: w.double()[None] for name, w in one.weights.items()}
    chain = read_chain(models.build_layout(one.model, one.data), one.data.shape)
    with measure_cpu() as clock:
        ends = [solve_layers(chain, weights, gradient, point) for point in solve_last_layer(chain, weights, gradient, "logistic")]
    end = min(ends, key=lambda end: float(end.residual))
    basis = torch.linalg.qr(images.x.double().flatten(1).T).Q
    answer = end.f.flatten()
    return {
        "data": images.name,
        "network": "fcn3",
        "attack": "rgap",
        "batch": size,
        "batches": 1,
        "mse_median": float((images.x.double().flatten(1) - answer).square().mean(dim=1).min()),
        "off_span": float((answer - basis @ (basis.T @ answer)).norm() / answer.norm()),
        "cpu_seconds": clock.seconds,
    }
