"""Measurement of an attack on cases whose true examples are known, as one row of a table."""

from collections.abc import Mapping, Sequence
from copy import copy
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from attacker.attacks import Attack, Case, GradientMatching
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.matching.decoders import BUILT_IN_DECODERS
from attacker.attacks.matching.names import DISTANCES
from attacker.attacks.matching.priors import colour_variation
from attacker.reconstruction import Reconstruction
from attacker.scoring.assignment import assign_reconstructions, keep_first
from attacker.scoring.metrics import is_recovered, mse, psnr, ssim
from attacker.scoring.statistics import estimate_share
from fedsim.recording import DataSpec
from support.contract import Options, measure_cpu
from support.splits import Images

PUBLISHED_SEARCH: dict[str, Any] = {"colour": False, "continuation": 1.0, "polish": 0.0, "local_steps": "one_batch"}
"""Arguments with which Inverting Gradients and AGIC search as in their papers: by Adam to the end, with a total variation of
constant weight along channels. Tables that were measured before the defaults changed have them."""
PAPER_TOLERANCE = 1e-4
"""Squared distance between gradients at which a search has converged, according to CPL."""


def run_attack(attack: Attack, cases: Sequence[Case], options: Options) -> tuple[list[Reconstruction], float]:
    """Run an attack on one thread, with the device and the seed of `options`; return its reconstructions and the CPU-seconds."""
    placed = copy(attack)
    placed.device = options.device
    with measure_cpu() as clock:
        answers = placed(cases, rng=torch.Generator().manual_seed(options.seed))
    return answers, clock.seconds


def describe_settings(attack: GradientMatching | ClosedForm) -> str:
    """Return the settings of an attack as text for its row, such as optimiser, distance, iterations and starts of a search.

    For closed forms, the text has their names, and the settings of the search that follows, if any.
    """
    if isinstance(attack, ClosedForm):
        routes = f"closed forms {', '.join(attack.routes)}"
        return f"{routes}; then {describe_settings(attack.fallback)}" if attack.fallback else routes
    search, chosen = attack.search, attack.search.optimiser
    optimiser = type(chosen).__name__
    optimiser += " with line search" * getattr(chosen, "line_search", False)
    optimiser += " by signs" * getattr(chosen, "signed", False)
    distance = next((name for name, one in DISTANCES.items() if one is attack.objective.distance), "its own distance")
    start = ", from a closed form" if attack.warm_start else ""
    layers = " in units of each tensor" * bool(attack.objective.unit)
    made = attack.parametrisation.decoder
    decoder = next((f", {name} decoder" for name, one in BUILT_IN_DECODERS.items() if one is made and name != "pixels"), "")
    variation = attack.prior.variation
    falls = f", from {variation.continuation:g} times it" * (variation.continuation > 1)
    tv = f"tv {attack.prior.tv:g}" + " of colours" * (variation.measure is colour_variation) + falls
    polish = f", the last {attack.polish.share:.0%} by L-BFGS" if attack.polish else ""
    return f"{optimiser}, {distance}{layers}, {tv}{decoder}, {search.steps} iterations{polish}, {search.restarts} starts{start}"


def match_examples(answer: Reconstruction, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the reconstructed examples, clamped to [0, 1], and labels in the order of the originals x (N, *shape).

    The attack's N best examples by its own ranking are used. An original without a reconstruction is left out.
    """
    answer = keep_first(answer, len(x))
    order = [i for i in assign_reconstructions(answer.x.nan_to_num(), x) if i is not None]
    return answer.x.nan_to_num().clamp(0, 1)[order], answer.y[order]


def match_images(answers: Sequence[Reconstruction], x: Sequence[Tensor]) -> Tensor:
    """Return the reconstructed examples of all cases in the order of their originals. x: originals of each case, (N, *shape)."""
    return torch.cat([match_examples(answer, originals)[0] for answer, originals in zip(answers, x, strict=True)])


def compare_attacks(
    attacks: Mapping[str, GradientMatching], cases: Sequence[Case], images: Images, batch: int, options: Options
) -> dict[str, Any]:
    """Return the mean PSNR in dB, the number of recovered images and the CPU-seconds of several attacks on the same cases.

    attacks: attacks by the label that ends the names of their entries. images: originals of all cases, `batch` of each case.
    """
    row: dict[str, Any] = {}
    for label, attack in attacks.items():
        answers, seconds = run_attack(attack, cases, options)
        guesses = match_images(answers, images.x.split(batch))
        row |= {
            f"psnr {label}": float(psnr(guesses, images.x).mean()),
            f"recovered {label}": int(is_recovered(guesses, images.x, images.data).sum()),
            f"cpu_seconds {label}": seconds,
        }
    return row


def make_row(
    answers: Sequence[Reconstruction], x: Sequence[Tensor], y: Sequence[Tensor], seconds: float, data: DataSpec
) -> dict[str, Any]:
    """Return one row of results. x, y: true examples of each case, (N, *shape) and (N,). seconds: CPU-seconds of the attack.

    asr_c: share of all examples whose content is recovered. asr_l: share of right labels. low, high: 95 % interval of asr_c, with
    cases as clusters. median_mse: of all examples. mse, ssim, iterations: means over examples with recovered content, None if
    there are none; iterations as in `count_iterations`. ssim is also None for rows of tables, and for images with a side below 11
    pixels. cpu_seconds: per example.
    """
    pairs = [match_examples(answer, originals) for answer, originals in zip(answers, x, strict=True)]
    guesses, truth = torch.cat([guess for guess, _ in pairs]), torch.cat(list(x))
    success = is_recovered(guesses, truth, data)
    labels = torch.cat([label for _, label in pairs]) == torch.cat(list(y))
    each = [count_iterations(answer) for answer, originals in zip(answers, x, strict=True) for _ in originals]
    taken = [count for count, ok in zip(each, success.tolist(), strict=True) if ok]
    similar = success.any() and data.is_image and min(data.shape[1:]) >= 11
    cases = [i for i, originals in enumerate(x) for _ in originals]
    estimate = estimate_share(success.double().tolist(), cases)
    return {
        "images": len(truth),
        "cases": len(x),
        "asr_c": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "asr_l": float(labels.float().mean()),
        "ssim": float(ssim(guesses, truth)[success].mean()) if similar else None,
        "mse": float(mse(guesses, truth)[success].mean()) if success.any() else None,
        "median_mse": float(mse(guesses, truth).median()),
        "iterations": mean(taken) if taken else None,
        "cpu_seconds": seconds / len(truth),
    }


def count_iterations(answer: Reconstruction) -> int:
    """Return the sum over starts of the number of iterations, where the kept start counts until its loss is at most 1e-4.

    1e-4 is `PAPER_TOLERANCE`. If the loss of the kept start never was that small, all its iterations count. For closed forms, the
    result is 0.
    """
    if not answer.iterations:
        return 0
    below = torch.nonzero(answer.loss <= PAPER_TOLERANCE)
    own = int(below[0]) + 1 if len(below) else len(answer.loss)
    return answer.iterations - len(answer.loss) + own
