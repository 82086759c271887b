"""The table `limits` of rgap.py: success of closed forms on updates with noise, with defenses, and of several local steps."""

import sys
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from support.contract import Options, TableAndSummary, measure_cpu
from support.matches import run_if_applicable
from support.rgap.linear import MAX_SUCCESS_MSE
from support.single_cases import LocalClient, make_client
from support.splits import Images, load_images
from torch import Generator, Tensor

from attacker.attacks import Attack, exact, rgap
from fedsim.recording.codec import encode

NOISE_LEVELS = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
"""Standard deviations of the noise, relative to the root mean square of each tensor."""
DEFENSES = (
    "clip(1e-3)",
    "gaussian(snr_db=60)",
    "gaussian(snr_db=20)",
    "uniform(16)",
    "uniform(8)",
    "qsgd(levels=127)",
    "qsgd(levels=7)",
    "top_k(0.99)",
    "top_k(0.9)",
    "top_k(0.5)",
    "sign(scale='mean')",
)
LOCAL_STEPS = (1, 2, 4, 8)
MAX_REPORTED_MSE = 1.0
"""Largest MSE that is reported."""


@dataclass(frozen=True)
class Form:
    """A closed form (attack without a search), with a network to which it applies.

    words: the closed form in the table. network, data, loss: names. attack: the closed form.
    """

    words: str
    network: str
    data: str
    loss: str
    attack: Attack


CLOSED_FORMS = (
    Form("layers, LeakyReLU, no bias", "cnn6", "cifar10", "logistic", rgap()),
    Form("layers, sigmoid, biases", "lenet_dlg", "cifar10", "cross_entropy", rgap()),
    Form("layers, sigmoid, biases", "lenet_cpl", "cifar10", "cross_entropy", rgap()),
    Form("peeled", "cnn6_d", "cifar10", "logistic", exact(route="peeled", fallback="none")),
    Form("linear, ReLU, biases", "mlp", "mnist", "cross_entropy", exact(route="linear", fallback="none")),
)


def measure_limits(options: Options) -> TableAndSummary:
    """Return a row for each closed form and disturbance (noise, a defense, or local steps), and a summary.

    The summary's key "NETWORK_noise" holds the largest of `NOISE_LEVELS` at which the closed form for this network recovers all
    images, None if there is no such level.
    """
    rows, summary = [], {}
    for form in CLOSED_FORMS[:1] if options.quick else CLOSED_FORMS:
        count = 2 if options.quick or form.words == "peeled" else 3
        images = load_images(options, form.data, count)
        images = images.of_two_classes() if form.loss == "logistic" else images
        _measure_form(form, images.take_first(1), options)  # the first call loads code
        own = [
            _measure_form(form, images, options, noise=noise) for noise in (NOISE_LEVELS[::4] if options.quick else NOISE_LEVELS)
        ]
        own += [_measure_form(form, images, options, defense=text) for text in (DEFENSES[::5] if options.quick else DEFENSES)]
        own += [
            _measure_form(form, images, options, steps=steps) for steps in (LOCAL_STEPS[::2] if options.quick else LOCAL_STEPS)
        ]
        bearable = [row["noise"] for row in own if row["noise"] is not None and row["success"] == 1]
        summary[f"{form.network}_noise"] = max(bearable, default=None)
        rows += [{key: value for key, value in row.items() if key != "noise"} for row in own]
    return rows, summary


def _measure_form(
    form: Form, images: Images, options: Options, *, noise: float | None = None, defense: str = "", steps: int = 1
) -> dict[str, Any]:
    one = make_client(form.network, images.data, loss=form.loss, seed=options.seed, steps=steps)
    words = f"noise {noise:g}" if noise is not None else defense or f"{steps} local steps"
    errors, seconds, failed = [], 0.0, 0
    for i, (x, y) in enumerate(zip(images.x, images.y, strict=True)):
        error, took = _attack_one(form.attack, one, x, y, options, i, noise or 0.0, defense, steps)
        errors.append(error)
        seconds += took
        failed += error >= MAX_REPORTED_MSE
    print(f"{form.network} {words}: {median(errors):.2g}", file=sys.stderr)
    return {
        "closed form": form.words,
        "network": form.network,
        "disturbance": words,
        "images": len(images),
        "mse_median": median(errors),
        "mse_max": max(errors),
        "success": sum(error <= MAX_SUCCESS_MSE for error in errors) / len(errors),
        "nothing": failed / len(errors),
        "cpu_seconds": seconds / len(errors),
        "noise": noise,
    }


def _attack_one(
    attack: Attack, one: LocalClient, x: Tensor, y: Tensor, options: Options, i: int, noise: float, defense: str, steps: int
) -> tuple[float, float]:
    case = one.make_case([(x[None], y[None])] * steps, f"{i}", defense)
    observation = case.observations[0]
    if noise:
        update = _add_noise(observation.update, noise, Generator().manual_seed(options.seed + i))
        observation = replace(observation, payload=encode(update))
    observation = replace(observation, num_examples=1)
    with measure_cpu() as clock:
        answer = run_if_applicable(attack, replace(case, observations=(observation,)), options)
    if answer is None or not len(answer.x):
        return MAX_REPORTED_MSE, clock.seconds
    error = float((answer.x[0] - x).double().square().mean().nan_to_num(nan=MAX_REPORTED_MSE))
    return min(error, MAX_REPORTED_MSE), clock.seconds


def _add_noise(update: Any, noise: float, rng: Generator) -> dict[str, Tensor]:
    def add_noise(t: Tensor) -> Tensor:
        exactly = t.double()
        level = noise * exactly.square().mean().sqrt()
        return (exactly + level * torch.randn(t.shape, generator=rng, dtype=torch.float64)).float()

    return {name: add_noise(t) for name, t in update.items()}
