"""The effect of three options of gradient matching that are not in the AGIC attack (Xu et al. 2022).

surrogate:       if local training is treated as one step on one batch, compute the gradient at weights between the weights before
                 and the weights after the training.
order_invariant: simulate local epochs with separate candidate images in each epoch, and penalise the difference between the mean
                 images of the epochs.
robust:          if several rounds are attacked as rounds with the same images, let rounds count less whose gradient does not fit
                 the reconstruction, since they may have other images.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch
from support.agic.clients import ResNetFederation
from support.attacked import match_images, run_attack
from support.contract import Options, ResultRow
from support.single_cases import make_client
from support.splits import Images, load_images

from attacker.attacks import Case, cpl
from attacker.attacks.linking import Links
from attacker.scoring.metrics import is_recovered, psnr

TV_WEIGHT = 3e-5
"""Weight of the total variation, without which several examples per epoch are not determined."""
LOCAL_STEP_SETTINGS: dict[str, ResultRow] = {
    "one batch": {},
    "one batch at surrogate weights": {"surrogate": True},
    "simulated": {"local_steps": "simulated"},
    "simulated, order-invariant": {"local_steps": "simulated", "order_invariant": 1.0},
}


def measure_beyond(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Measure the three options as additions to the attack `cpl`, on CPL's LeNet.

    Returns the rows, and the gains of `surrogate` and `robust` in dB.
    """
    local, gain = _measure_local_epochs(options)
    wrong, mended = _measure_wrong_link(options)
    return [*local, *wrong], gain | mended


def _measure_local_epochs(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Attack clients with several local epochs on one image, or on two images in a new order in each epoch.

    Each client is attacked with each of `LOCAL_STEP_SETTINGS`. Returns the rows, and the gain of `surrogate` in dB for the first
    combination of images per client, epochs and learning rate.
    """
    steps, rows = (2 if options.quick else 300), []
    for passing, epochs, rate in [(1, 2, 0.003)] if options.quick else [(1, 5, 0.003), (1, 5, 0.01), (2, 2, 0.003)]:
        count = 1 if options.quick else 4
        images = load_images(options, "cifar10", passing * count)
        cases = _make_trained_cases(images, passing, epochs, rate, options.seed)
        for way, settings in LOCAL_STEP_SETTINGS.items():
            attack = cpl(tv=TV_WEIGHT, steps=steps).copy_with(**settings)
            columns = {"examples": passing, "local epochs": epochs, "learning rate": rate, "by": way}
            rows.append(columns | _make_row(attack, cases, images, passing, options))
    return rows, {"surrogate_gain_db": rows[1]["psnr"] - rows[0]["psnr"]}


def _make_trained_cases(images: Images, passing: int, epochs: int, rate: float, seed: int) -> list[Case]:
    """Return one case (a client's update to attack) for each group of `passing` images.

    The client trains on its group for `epochs` epochs with learning rate `rate`, in batches of one image, in a new order in each
    epoch.
    """
    of = make_client("lenet_cpl", images.data, seed=seed)
    of = replace(of, training=replace(of.training, learning_rate=rate, batch_size=1, steps=None, epochs=epochs))
    rng = torch.Generator().manual_seed(seed + 5)
    cases = []
    for first in range(0, len(images), passing):
        rows = [first + i for _ in range(epochs) for i in torch.randperm(passing, generator=rng).tolist()]
        cases.append(of.make_case([(images.x[i : i + 1], images.y[i : i + 1]) for i in rows], f"case-{first}"))
    return cases


def _measure_wrong_link(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Attack rounds as rounds with the same image, with several values of `robust`; return rows and a gain in dB.

    There are two rounds that have the same image, or three of which the second has another image. The gain is the PSNR
    with robust=0.001 minus the PSNR with robust=0, for three rounds.
    """
    count, steps = (1, 2) if options.quick else (4, 300)
    pool = load_images(options, "cifar10", count + 1)
    federation, rounds = ResNetFederation(options, pool.data, name="lenet_cpl"), []
    for number, shift in ((1, 0), (2, 1), (3, 0)):
        rounds.append([federation.observe_client(pool, [i + shift], round=number) for i in range(count)])
        federation.train(options, 2 if options.quick else 30, pool)
    found, rows = pool.take_first(count), []
    for name, chosen in (("two rounds, right", (0, 2)), ("three rounds, one wrong", (0, 1, 2))):
        links = Links((torch.tensor([0]),) * len(chosen), torch.ones(1), epochs=tuple(range(1, len(chosen) + 1)))
        cases = [Case(tuple(rounds[r][i] for r in chosen), links=links) for i in range(count)]
        for robust in (0.0, 0.1, 0.001):
            attack = cpl(steps=steps).copy_with(later=1.0, robust=robust)
            rows.append({"examples": 1, "links": name, "robust": robust} | _make_row(attack, cases, found, 1, options))
    return rows, {"robust_gain_db": rows[5]["psnr"] - rows[3]["psnr"]}


def _make_row(attack: Any, cases: Sequence[Case], images: Images, passing: int, options: Options) -> ResultRow:
    """Attack the cases; return mean PSNR, PSNR of each image, share of recovered images, and CPU-seconds per image.

    passing: number of images in each case. images: the original images of all cases.
    """
    answers, seconds = run_attack(attack, cases, options)
    guesses = match_images(answers, images.x.split(passing))
    values = psnr(guesses, images.x).tolist()
    each = " ".join(f"{value:.1f}" for value in values)
    success = float(is_recovered(guesses, images.x, images.data).float().mean())
    return {"psnr": mean(values), "each": each, "recovered": success, "cpu_seconds": seconds / len(images)}
