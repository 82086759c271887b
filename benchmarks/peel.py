"""Layer by layer through the sigmoid LeNets of DLG and CPL, beside L-BFGS on some of the same pairs of image and weights.

Each pair has an image and weights of its own, the gradient is that of one example in float32, and pairs are attacked one at a
time. Recovered means a mean squared error of at most 1e-6 for the closed form; for L-BFGS the project's own, far milder measure
of success. `over_lbfgs` is CPU time per recovered image of CPL's search with one start over that of the closed form. `--quick` is
six pairs, two of them for L-BFGS.
"""

from dataclasses import replace

import torch
from cases import case_of, images
from contract import Options, cpu_seconds, options, told
from torch import Tensor

from attacker.attacks import Case, cpl, rgap
from attacker.scoring.metrics import mse, succeeded
from fedsim.wire import DataSpec, ModelSpec

RECOVERED = 1e-6
NETWORKS = ("lenet_dlg", "lenet_cpl")


def main() -> None:
    """Run the benchmark."""
    asked = options(__doc__ or "")
    count, searched = (6, 2) if asked.quick else (200, 20)
    name, x = images(asked, "cifar10/test.npz", "photos", count, size=32)
    x = x[torch.arange(count) % len(x)]
    pairs = {network: list(range(i, count, 2)) for i, network in enumerate(NETWORKS)}
    rows, ours, theirs = [], [], []
    for network, at in pairs.items():
        cases = [_case(network, x[i], i, asked) for i in at]
        ours.append(_closed(name, network, cases, x[at], asked))
        some = slice(0, searched // len(NETWORKS))
        theirs.append(_search(name, network, cases[some], x[at][some], asked))
        rows += [ours[-1], theirs[-1]]
    per_image = [sum(r["cpu_seconds"] for r in side) / max(1, sum(r["recovered"] for r in side)) for side in (ours, theirs)]
    summary = {
        "success": sum(r["recovered"] for r in ours) / sum(r["pairs"] for r in ours),
        "mse_max": max(r["mse_max"] for r in ours),
        "cpu_seconds": sum(r["cpu_seconds"] for r in ours) / sum(r["pairs"] for r in ours),
        "over_lbfgs": per_image[1] / per_image[0],
        "lbfgs_success": sum(r["recovered"] for r in theirs) / sum(r["pairs"] for r in theirs),
    }
    told("peel", rows, summary, asked)


def _case(network: str, x: Tensor, index: int, asked: Options) -> Case:
    data = DataSpec(shape=tuple(x.shape), num_classes=10)
    batch = x[None], torch.tensor([index % 10])
    return case_of(ModelSpec(name=network), data, batch, seed=1000 * asked.seed + index, name=f"pair-{index}")


def _closed(name: str, network: str, cases: list[Case], x: Tensor, asked: Options) -> dict[str, object]:
    attack, found, seconds = replace(rgap(), device=asked.device), [], []
    for case in cases:
        with cpu_seconds() as clock:
            found += attack([case], rng=torch.Generator().manual_seed(asked.seed))
        seconds.append(clock.seconds)
    off = torch.cat([(f.x - one).square().mean().reshape(1) for f, one in zip(found, x, strict=True)])
    return {
        "data": name,
        "network": network,
        "attack": "rgap",
        "pairs": len(cases),
        "recovered": int((off <= RECOVERED).sum()),
        "mse_median": float(off.median()),
        "mse_max": float(off.max()),
        "cpu_seconds": sum(seconds),
        "slowest": max(seconds),
    }


def _search(name: str, network: str, cases: list[Case], x: Tensor, asked: Options) -> dict[str, object]:
    with cpu_seconds() as clock:
        found = replace(cpl(), device=asked.device)(cases, rng=torch.Generator().manual_seed(asked.seed))
    guesses = torch.cat([f.x for f in found]).nan_to_num().clamp(0, 1)
    off = mse(guesses, x)
    return {
        "data": name,
        "network": network,
        "attack": "cpl (L-BFGS)",
        "pairs": len(cases),
        "recovered": int(succeeded(guesses, x).sum()),
        "mse_median": float(off.median()),
        "mse_max": float(off.max()),
        "cpu_seconds": clock.seconds,
    }


if __name__ == "__main__":
    main()
