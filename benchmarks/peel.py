"""Closed forms on the sigmoid LeNets of DLG and CPL, without any search, compared with CPL's search on some of the same pairs.

There are 200 pairs of an image and random weights, for DLG's and CPL's LeNet alternately; the loss is the cross-entropy of ten
classes. Half of the images are photographs, and half CIFAR-10 if --data has it. An attack gets the float32 gradient of one image
and the weights. `success` is the share of pairs with an MSE of at most 1e-6, on values in [0, 1]. `over_lbfgs` is CPL's CPU time
per recovered image (L-BFGS with one start) divided by that of the closed form, on the same pairs; recovered means an MSE of at
most 0.009. The closed form attacks one pair at a time; the search attacks all pairs of a network at once, which favours the
search. `--quick` is four pairs, and CPL attacks two of them with 10 iterations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from support.attacked import run_attack
from support.contract import Options, parse_options, print_results
from support.single_cases import make_client
from support.splits import Images, load_images
from torch import Tensor

from attacker.attacks import Attack, Case, cpl, rgap
from attacker.scoring.metrics import is_recovered

NETWORK_NAMES = ("lenet_dlg", "lenet_cpl")
MAX_EXACT_MSE = 1e-6


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    pairs, searched = (4, 1) if options.quick else (200, 10)
    sources = [load_images(replace(options, data=None), "cifar10", pairs // 2), load_images(options, "cifar10", pairs // 2)]
    _attack_pairs(rgap(), [_make_pair(0, sources, options)], options)  # the first call loads code
    rows, ours, searches = [], [], []
    for network in range(len(NETWORK_NAMES)):
        own = [_make_pair(i, sources, options) for i in range(network, pairs, len(NETWORK_NAMES))]
        found = [_attack_pairs(rgap(), [pair], options) for pair in own]
        every = len(own) // searched
        search = _attack_pairs(cpl(restarts=1, steps=10 if options.quick else 300), own[::every], options)
        same = _join_results(found[::every])
        ours.append(_join_results(found))
        searches.append((same, search))
        for name, one in (("rgap", ours[-1]), ("rgap", same), ("cpl", search)):
            rows.append(_make_row(NETWORK_NAMES[network], name, one))
    mse = torch.cat([one.mse for one in ours])
    seconds = [s for one in ours for s in one.seconds]
    summary = {
        "success": float((mse <= MAX_EXACT_MSE).double().mean()),
        "pairs": len(mse),
        "mse_max": float(mse.max()),
        "cpu_seconds": sum(seconds) / len(mse),
        "cpu_seconds_max": max(seconds),
        "over_lbfgs": _compute_ratio([one for one, _ in searches], [one for _, one in searches]),
    }
    print_results("peel", rows, summary, options)


@dataclass(frozen=True)
class PeelCase:
    """An image (C, H, W) with the case that is attacked, which holds its gradient."""

    x: Tensor
    case: Case


@dataclass(frozen=True)
class PeelResult:
    """The results of an attack. mse, recovered: one value per pair, (N,). seconds: CPU time of each call of the attack."""

    mse: Tensor
    recovered: Tensor
    seconds: list[float]


def _make_pair(i: int, sources: Sequence[Images], options: Options) -> PeelCase:
    """Return pair i; networks alternate, and weights are drawn with the seed plus i. sources: two data sets."""
    images = sources[(i // 2) % 2]
    x, y = images.x[(i // 4) % len(images)], images.y[(i // 4) % len(images)] % 10
    one = make_client(NETWORK_NAMES[i % 2], replace(images.data, num_classes=10), seed=options.seed + i)
    return PeelCase(x, one.make_case([(x[None], y[None])], f"{NETWORK_NAMES[i % 2]}-{i}"))


def _attack_pairs(attack: Attack, pairs: Sequence[PeelCase], options: Options) -> PeelResult:
    answers, seconds = run_attack(attack, [p.case for p in pairs], options)
    guesses, x = torch.cat([answer.x for answer in answers]).nan_to_num(), torch.stack([p.x for p in pairs])
    mse = (guesses - x).double().square().flatten(1).mean(dim=1)
    return PeelResult(mse, is_recovered(guesses.clamp(0, 1), x), [seconds])


def _join_results(results: Sequence[PeelResult]) -> PeelResult:
    seconds = [s for result in results for s in result.seconds]
    return PeelResult(torch.cat([result.mse for result in results]), torch.cat([result.recovered for result in results]), seconds)


def _make_row(network: str, attack: str, result: PeelResult) -> dict[str, Any]:
    return {
        "network": network,
        "attack": attack,
        "pairs": len(result.mse),
        "success": float((result.mse <= MAX_EXACT_MSE).double().mean()),
        "recovered": int(result.recovered.sum()),
        "mse_median": float(result.mse.median()),
        "mse_max": float(result.mse.max()),
        "cpu_seconds": sum(result.seconds) / len(result.mse),
        "cpu_max": max(result.seconds) if len(result.seconds) == len(result.mse) else None,
    }


def _compute_ratio(ours: Sequence[PeelResult], searches: Sequence[PeelResult]) -> float | None:
    """Return the search's CPU time per recovered image divided by the closed form's; None if either recovered no image."""
    sides = [(sum(sum(one.seconds) for one in side), sum(int(one.recovered.sum()) for one in side)) for side in (searches, ours)]
    if not all(recovered for _, recovered in sides):
        return None
    (theirs, their_images), (own, own_images) = sides
    return (theirs / their_images) / (own / own_images)


if __name__ == "__main__":
    main()
