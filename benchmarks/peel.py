"""The sigmoid LeNets of DLG and CPL opened layer by layer, without any search, beside CPL's search on the same pairs.

200 pairs of an image and weights, drawn anew for each: DLG's and CPL's LeNet in turn, ten classes, cross-entropy, half of the
images photographs and half CIFAR-10. What is attacked is the float32 gradient of one image; nothing but it and the weights is
known. `success` is the share of pairs with an MSE of at most 1e-6, on values in [0, 1]. `over_lbfgs` is the CPU time that CPL's
L-BFGS with one start takes per image that it recovers, over ours on the same pairs, in turn; for both, an image counts as
recovered by `attacker.scoring.metrics.succeeded`. `--quick` is four pairs, one of them searched.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from contract import Options, cpu_seconds, options, told
from single_cases import Images, client, images
from torch import Generator, Tensor

from attacker.attacks import Attack, Case, cpl, rgap
from attacker.scoring.metrics import succeeded

NETWORKS = ("lenet_dlg", "lenet_cpl")
EXACT = 1e-6


def main() -> None:
    """Run the benchmark."""
    asked = options(__doc__ or "")
    pairs, searched = (4, 1) if asked.quick else (200, 20)
    sources = [images(replace(asked, data=None), "cifar10", pairs // 2), images(asked, "cifar10", pairs // 2)]
    _pair(0, sources, asked, searches=False)  # the first call loads code
    found = [_pair(i, sources, asked, searches=i % (pairs // searched) == 0) for i in range(pairs)]
    rows = [row for network in NETWORKS for row in _rows(network, [one for one in found if one["network"] == network])]
    mse = [one["mse"] for one in found]
    summary = {
        "success": sum(e <= EXACT for e in mse) / len(mse),
        "pairs": len(mse),
        "mse_max": max(mse),
        "cpu_seconds": sum(one["seconds"] for one in found) / len(found),
        "cpu_seconds_max": max(one["seconds"] for one in found),
        "over_lbfgs": _ratio(found),
    }
    told("peel", rows, summary, asked)


def _pair(i: int, sources: Sequence[Images], asked: Options, *, searches: bool) -> dict[str, Any]:
    """Pair i, whose weights are drawn from seed + i; and, where asked for, what CPL's search makes of it."""
    found = sources[(i // 2) % 2]
    x, y = found.x[(i // 4) % len(found)], found.y[(i // 4) % len(found)]
    network = NETWORKS[i % 2]
    case = client(network, replace(found.data, num_classes=10), seed=asked.seed + i).case(
        [(x[None], y[None] % 10)], f"{network}-{i}"
    )
    result: dict[str, Any] = {"network": network, "source": found.name}
    result["mse"], result["seconds"], result["recovered"] = _attacked(rgap(), case, x, asked)
    if searches:
        result["searched"] = dict(zip(("mse", "seconds", "recovered"), _attacked(cpl(restarts=1), case, x, asked), strict=True))
        print(f"pair {i}: {result['mse']:.1g}, searched {result['searched']['mse']:.1g}", file=sys.stderr)
    return result


def _attacked(attack: Attack, case: Case, x: Tensor, asked: Options) -> tuple[float, float, bool]:
    """MSE, CPU-seconds, and whether the image is recognisable."""
    with cpu_seconds() as clock:
        found = replace(attack, device=asked.device)([case], rng=Generator().manual_seed(asked.seed))  # type: ignore[type-var]
    guess = found[0].x.nan_to_num()
    mse = float((guess[0] - x).double().square().mean())
    return mse, clock.seconds, bool(succeeded(guess.clamp(0, 1), x[None])[0])


def _rows(network: str, found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All pairs, then those that were searched, by both."""
    rows = [_row(network, "rgap", found)]
    both = [one for one in found if "searched" in one]
    if both:
        rows += [_row(network, "rgap", both), _row(network, "cpl", [one["searched"] for one in both])]
    return rows


def _row(network: str, attack: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mse = torch.tensor([one["mse"] for one in found], dtype=torch.float64)
    seconds = [one["seconds"] for one in found]
    return {
        "network": network,
        "attack": attack,
        "pairs": len(found),
        "success": float((mse <= EXACT).double().mean()),
        "recovered": sum(one["recovered"] for one in found),
        "mse_median": float(mse.median()),
        "mse_max": float(mse.max()),
        "cpu_seconds": sum(seconds) / len(seconds),
        "cpu_max": max(seconds),
    }


def _ratio(found: Sequence[dict[str, Any]]) -> float | None:
    """CPU time per recovered image of the search over ours; None where the search recovered none."""
    both = [one for one in found if "searched" in one]
    ours = sum(one["seconds"] for one in both) / max(1, sum(one["recovered"] for one in both))
    recovered = sum(one["searched"]["recovered"] for one in both)
    return sum(one["searched"]["seconds"] for one in both) / recovered / ours if recovered else None


if __name__ == "__main__":
    main()
