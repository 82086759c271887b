"""CPL compared with DLG: success rate, iterations and cost, beside CPL's table 2.

Both attack the gradient of one image on the untrained four-convolution LeNet, by the same L-BFGS with the same stopping
rule, and with up to two restarts if a search got stuck; `one_start` is the share of images recovered without a restart. The
difference is what the CPL paper changed: the label is inferred from the gradient instead of optimised, and the search starts from
a repeated pattern instead of noise. Iterations are outer L-BFGS steps until the squared distance between the gradients
(D in the paper) is at most 1e-4, summed over the starts of an image, mean over recovered images; median_mse is over all images.
Images are embedded photographs, which were also used to choose settings, and CIFAR-10 of --data, of the report part, on which no
setting was chosen. `--quick` is one of the photographs, with 10 iterations and one start.
"""

from statistics import mean
from typing import Any

import torch
from support.attacked import count_iterations as until_tolerance
from support.attacked import match_examples, run_attack
from support.contract import Options, parse_options, print_results
from support.cpl.cases import Originals, make_paper_client, make_single_cases
from support.splits import Images, load_images

from attacker.attacks import GradientMatching, cpl, dlg
from attacker.scoring.metrics import is_recovered, mse, ssim

PAPER_RESULTS = {
    "cpl": {"iterations": 28.3, "success": 0.973, "labels": 1.0, "ssim": 0.9985, "mse": 2.2e-4},
    "dlg": {"iterations": 114.5, "success": 0.754, "labels": 0.965, "ssim": 0.9982, "mse": 2.5e-4},
}
"""CPL's table 2 for CIFAR-10, with the paper's own ResNet-20, which is not public."""
MAX_STARTS = 3


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__ or "")
    rows = [row for data in _load_data(options) for row in _compare_attacks(data, options)]
    ours = [row for row in rows if row["source"] == "measured"]
    by_attack = {name: [row for row in ours if row["attack"] == name] for name in ("cpl", "dlg")}
    ratio = (
        _average_iterations(by_attack["cpl"]) / _average_iterations(by_attack["dlg"])
        if _average_iterations(by_attack["dlg"])
        else None
    )
    summary = {
        "cpl_success": sum(row["successes"] for row in by_attack["cpl"]) / sum(row["images"] for row in by_attack["cpl"]),
        "cpl_one_start": mean(row["one_start"] for row in by_attack["cpl"]),
        "dlg_success": sum(row["successes"] for row in by_attack["dlg"]) / sum(row["images"] for row in by_attack["dlg"]),
        "iterations_ratio": ratio,
        "cpu_seconds_ratio": sum(r["cpu_seconds"] for r in by_attack["cpl"]) / sum(r["cpu_seconds"] for r in by_attack["dlg"]),
    }
    print_results("dlg", rows, summary, options)


def _average_iterations(rows: list[dict[str, Any]]) -> float:
    """Return the mean number of iterations over all recovered images; 0 if there are none. rows: one for each data set."""
    successes = sum(row["successes"] for row in rows)
    return sum((row["iterations"] or 0) * row["successes"] for row in rows) / successes if successes else 0.0


def _load_data(options: Options) -> list[Images]:
    count = 1 if options.quick else 20
    found = {data.name: data for data in (load_images(options, name, count) for name in ("photos", "cifar10"))}
    return list(found.values())[: 1 if options.quick else None]


def _compare_attacks(data: Images, options: Options) -> list[dict[str, Any]]:
    originals = make_single_cases(data, make_paper_client(data, options))
    effort = {"restarts": 1, "steps": 10} if options.quick else {"restarts": MAX_STARTS}
    rows = [_measure(data, originals, attack, options) for attack in (cpl(**effort), dlg(**effort))]
    if data.name == "cifar10":
        rows += [{"data": "cifar10", "attack": key, "source": "CPL table 2", **values} for key, values in PAPER_RESULTS.items()]
    return rows


def _measure(data: Images, originals: Originals, attack: GradientMatching, options: Options) -> dict[str, Any]:
    answers, seconds = run_attack(attack, originals.cases, options)
    guesses, labels = (torch.cat(parts) for parts in zip(*map(match_examples, answers, originals.x), strict=True))
    success = is_recovered(guesses, data.x)
    taken = [until_tolerance(answer) for answer, ok in zip(answers, success.tolist(), strict=True) if ok]
    one_start = [ok and answer.restarts == 1 for answer, ok in zip(answers, success.tolist(), strict=True)]
    return {
        "data": data.name,
        "part": data.part,
        "attack": attack.name,
        "settings": f"steps={attack.search.steps}, restarts={attack.search.restarts}",
        "source": "measured",
        "images": len(data),
        "successes": int(success.sum()),
        "success": float(success.float().mean()),
        "one_start": sum(one_start) / len(data),
        "labels": float((labels == data.y).float().mean()),
        "iterations": mean(taken) if taken else None,
        "median_mse": float(mse(guesses, data.x).median()),
        "mse": float(mse(guesses, data.x)[success].mean()) if success.any() else None,
        "ssim": float(ssim(guesses, data.x)[success].mean()) if success.any() else None,
        "cpu_seconds": seconds,
    }


if __name__ == "__main__":
    main()
