"""CPL against plain DLG: how often each succeeds, after how many iterations, at what cost; CPL's table 2 beside them.

Both attack the gradient of one image on the untrained four-convolution LeNet, by the same L-BFGS with the same stopping
rule, and with up to two more starts where one got stuck; `one_start` is the share that needed none. What differs is
what the CPL paper changed: the label is read off the gradient instead of searched for, and the search starts from a repeated
pattern instead of noise. Iterations are outer L-BFGS steps until the paper's D < 1e-4, those of a stuck start included.
`--quick` is two of the photographs.
"""

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from attacked import iterations as until_tolerance
from contract import Options, cpu_seconds, options, told

from attacker.attacks import Case, GradientMatching, cpl, dlg
from attacker.scoring.metrics import mse, ssim, succeeded
from defenses import DefenseSpec
from fedsim import datasets, models
from fedsim.training import train
from fedsim.wire import ModelSpec, Observation, Training
from fedsim.wire.codec import encode

PAPER = {
    "cpl": {"iterations": 28.3, "success": 0.973, "labels": 1.0, "ssim": 0.9985, "mse": 2.2e-4},
    "dlg": {"iterations": 114.5, "success": 0.754, "labels": 0.965, "ssim": 0.9982, "mse": 2.5e-4},
}
"""CPL's table 2, CIFAR-10: on the paper's own ResNet-20, which is not public."""


def main() -> None:
    """Run the benchmark."""
    asked = options(__doc__ or "")
    rows = [row for name, data in _data(asked) for row in _compare(name, data, asked)]
    ours = [row for row in rows if row["source"] == "measured"]
    by_attack = {name: [row for row in ours if row["attack"] == name] for name in ("cpl", "dlg")}
    ratio = _iterations(by_attack["cpl"]) / _iterations(by_attack["dlg"]) if _iterations(by_attack["dlg"]) else None
    summary = {
        "cpl_success": sum(row["successes"] for row in by_attack["cpl"]) / sum(row["images"] for row in by_attack["cpl"]),
        "cpl_one_start": mean(row["one_start"] for row in by_attack["cpl"]),
        "dlg_success": sum(row["successes"] for row in by_attack["dlg"]) / sum(row["images"] for row in by_attack["dlg"]),
        "iterations_ratio": ratio,
        "cpu_seconds_ratio": sum(r["cpu_seconds"] for r in by_attack["cpl"]) / sum(r["cpu_seconds"] for r in by_attack["dlg"]),
    }
    told("dlg", rows, summary, asked)


def _iterations(rows: list[dict[str, Any]]) -> float:
    """Mean over all successes of both data sets."""
    successes = sum(row["successes"] for row in rows)
    return sum((row["iterations"] or 0) * row["successes"] for row in rows) / successes if successes else 0.0


def _data(asked: Options) -> list[tuple[str, datasets.Dataset]]:
    found = [("photos", datasets.load("photos", size=32))]
    cifar = asked.data / "cifar10" / "test.npz" if asked.data else None
    if asked.quick:
        return found
    if cifar is not None and cifar.exists():
        found.append(("cifar10", datasets.load(f"npz:{cifar}")))
    elif asked.data:
        print(f"{cifar} does not exist: photos only")
    return found


def _compare(name: str, data: datasets.Dataset, asked: Options) -> list[dict[str, Any]]:
    count = 2 if asked.quick else 20
    indices = np.linspace(0, len(data.train) - 1, count).round().astype(int)
    cases = [_case(data, int(index), asked) for index in indices]
    x, y = data.train[indices]
    attacks = {"cpl": cpl(restarts=3), "dlg": dlg(restarts=3)}
    rows = [_measure(name, key, attack, cases, x, y, asked) for key, attack in attacks.items()]
    if name == "cifar10":
        rows += [{"data": "cifar10", "attack": key, "source": "CPL table 2", **values} for key, values in PAPER.items()]
    return rows


def _case(data: datasets.Dataset, index: int, asked: Options) -> Case:
    """What the server would see of one client that takes one step on one image."""
    spec = ModelSpec(name="lenet_cpl")
    training = Training(learning_rate=1.0, batch_size=1, steps=1)
    model = models.build(spec, data.spec, seed=asked.seed)
    weights = _WEIGHTS.setdefault((data.name, asked.seed), {name: p.detach() for name, p in model.named_parameters()})
    trained = train(model, weights, [data.train[[index]]], training, data.spec)
    observation = Observation(
        round=1,
        client=f"{Path(data.name).name}-{index}",
        cohort=(),
        num_examples=1,
        model=spec,
        data=data.spec,
        training=training,
        defenses=DefenseSpec(),
        weights=weights,
        payload=encode(trained.update),
    )
    return Case((observation,))


_WEIGHTS: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
"""One object for each network: the attack batches over cases that share their weights."""


def _measure(
    name: str, key: str, attack: GradientMatching, cases: list[Case], x: torch.Tensor, y: torch.Tensor, asked: Options
) -> dict[str, Any]:
    with cpu_seconds() as clock:
        found = replace(attack, device=asked.device)(cases, rng=torch.Generator().manual_seed(asked.seed))
    guesses = torch.cat([f.x for f in found]).nan_to_num().clamp(0, 1)
    success = succeeded(guesses, x)
    iterations = [until_tolerance(f) for f, ok in zip(found, success.tolist(), strict=True) if ok]
    one_start = [ok and f.restarts == 1 for f, ok in zip(found, success.tolist(), strict=True)]
    return {
        "data": name,
        "attack": key,
        "source": "measured",
        "images": len(cases),
        "successes": int(success.sum()),
        "success": int(success.sum()) / len(cases),
        "one_start": sum(one_start) / len(cases),
        "labels": sum(int(f.y[0]) == int(label) for f, label in zip(found, y, strict=True)) / len(y),
        "iterations": mean(iterations) if iterations else None,
        "mse": float(mse(guesses, x)[success].mean()) if success.any() else None,
        "ssim": float(ssim(guesses, x)[success].mean()) if success.any() else None,
        "cpu_seconds": clock.seconds,
    }


if __name__ == "__main__":
    main()
