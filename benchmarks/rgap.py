"""Accuracy, speed and limits of R-GAP and other closed forms.

python benchmarks/rgap.py            CNN6, CNN6-d and FCN3 on images like CIFAR-10 and MNIST, beside the paper's table 1
python benchmarks/rgap.py linear     whole batches on networks that begin with a linear layer
python benchmarks/rgap.py limits     noise on the gradient, defenses, and updates of several local steps
python benchmarks/rgap.py imprint    a malicious server's imprint layer (Robbing the Fed), and the client's check of the model
python benchmarks/rgap.py many       10,000 images in one batched run, with --device cuda

In the first table and in `many`, each gradient is of one image, in float32, on an untrained network with logistic loss; the two
classes are odd and even labels. The MSE is on values in [0, 1], without clamping. `rgap` and `exact` infer the label from the
gradient. `rgap(paper_mode)` is given the label, as in the paper, weighs its linear equations as the authors' code does, and
passes float32 from layer to layer. `same` is the share of images with an MSE of at most 1e-4, which the paper calls visually
identical. The paper's table 1 is of 10,000 images and states no times. `--quick` uses a few images.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.attacked import run_attack
from support.contract import Options, TableAndSummary, run_selected_table
from support.rgap.imprint import measure_imprint
from support.rgap.limits import measure_limits
from support.rgap.linear import MAX_SUCCESS_MSE, measure_linear
from support.rgap.rank_trials import PAPER_NETWORKS, make_paper_network, measure_right_share
from support.single_cases import make_client
from support.splits import Images, load_images

from attacker.attacks import Attack, exact, hgap, rgap
from attacker.attacks.closed_form.rank.analysis import analyse_rank
from attacker.attacks.networks.chain import read_chain

MAX_IDENTICAL_MSE = 1e-4
PAPER_INDICES = (-484, 405, 405, -208, 316)
"""Rank analysis index of the five networks in the paper's table 2. The second and the third network have the same index."""
PAPER_RESULTS = {
    ("cifar10", "cnn6"): {"rgap": (0.010, 0.017), "dlg": (0.050, 1.4), "hgap": (6.9e-3, 7.9e-3)},
    ("cifar10", "cnn6_d"): {"rgap": (1.39, 0.73), "dlg": (0.053, 0.013), "hgap": (0.053, 0.013)},
    ("mnist", "cnn6"): {"rgap": (1.9e-4, 7.0e-4), "dlg": (4.2e-4, 4.8e-4), "hgap": (1.4e-4, 1.9e-4)},
    ("mnist", "cnn6_d"): {"rgap": (9.0e-3, 9.3e-3), "dlg": (1.2e-3, 1.5e-3), "hgap": (1.2e-3, 1.5e-3)},
}
"""Table 1: mean and standard deviation of the MSE."""


def measure_table1(options: Options) -> TableAndSummary:
    """Run R-GAP on CNN6, CNN6-d and FCN3, H-GAP on the first two, and `exact` on CNN6-d; return the rows and a summary.

    The published results of the R-GAP paper's table 1, also of DLG, are added as rows. DLG is not run here.
    """
    rows = [row for name in (("cifar10",) if options.quick else ("cifar10", "mnist")) for row in _measure_data(name, options)]
    ours = {
        (row["network"], row["attack"]): row for row in rows if row["data"] == rows[0]["data"] and row["source"] == "measured"
    }
    indices = [analyse_rank(read_chain(make_paper_network(PAPER_NETWORKS[i]), (3, 32, 32)), prove=0).index for i in PAPER_INDICES]
    summary = {
        "cnn6_mse_max": ours["cnn6", "rgap"]["mse_max"],
        "cnn6_cpu_seconds": ours["cnn6", "rgap"]["cpu_seconds"],
        "cnn6_cpu_seconds_max": ours["cnn6", "rgap"]["cpu_max"],
        "cnn6d_success": ours["cnn6_d", "exact"]["success"],
        "cnn6d_cpu_seconds": ours["cnn6_d", "exact"]["cpu_seconds"],
        "peak_mb": measure_peak_memory(options),
        "rank_indices": indices,
        "rank_right": measure_right_share(4 if options.quick else 30),
    }
    return rows, summary


def _measure_data(name: str, options: Options) -> list[dict[str, Any]]:
    many, few = (2, 1) if options.quick else (100 if name == "cifar10" else 50, 3)
    images = load_images(options, name, many).of_two_classes()
    jobs: list[tuple[str, str, Attack, int]] = [
        ("cnn6", "rgap", rgap(), many),
        ("cnn6", "rgap(paper_mode)", rgap(paper_mode=True), few),
        ("cnn6", "hgap", hgap(steps=60), few),
        ("cnn6_d", "exact", exact(route="peeled", fallback="none"), many),
        ("cnn6_d", "rgap", rgap(), few),
        ("cnn6_d", "rgap(paper_mode)", rgap(paper_mode=True), few),
        ("cnn6_d", "hgap", hgap(steps=60), few),
        ("fcn3", "rgap", rgap(), many),
        ("fcn3", "rgap(paper_mode)", rgap(paper_mode=True), few),
    ]
    rows = []
    for network, attack, run, count in jobs:
        if options.quick and (attack == "hgap" or (network, attack) == ("cnn6_d", "rgap(paper_mode)")):
            continue  # these take as long as all others together
        rows.append(_measure_attack(images.take_first(count), network, attack, run, options))
        print(f"{name} {network} {attack}: {rows[-1]['mse']:.2g}", file=sys.stderr)
    for network in ("cnn6", "cnn6_d"):
        for attack, (mean, deviation) in PAPER_RESULTS[name, network].items():
            rows.append(
                {"data": name, "network": network, "attack": attack, "source": "R-GAP table 1", "mse": mean, "sd": deviation}
            )
    return rows


def _measure_attack(images: Images, network: str, name: str, attack: Attack, options: Options) -> dict[str, Any]:
    """Run one attack on every image, one after the other, and return a row.

    name: of the attack in the row; if it contains "paper_mode", the attack is given the labels.
    """
    one = make_client(network, images.data, loss="logistic", seed=options.seed)
    errors, seconds = [], []
    for i, (x, y) in enumerate(zip(images.x, images.y, strict=True)):
        case = one.make_case([(x[None], y[None])], f"{network}-{i}")
        if "paper_mode" in name:
            case = replace(case, known_labels=y[None])
        (answer,), took = run_attack(attack, [case], options)
        errors.append(float((answer.x[0] - x).double().square().mean()))
        seconds.append(took)
    mse = torch.tensor(errors, dtype=torch.float64)
    return {
        "data": images.name,
        "network": network,
        "attack": name,
        "source": "measured",
        "images": len(images),
        "mse": float(mse.mean()),
        "sd": float(mse.std()) if len(mse) > 1 else 0.0,
        "mse_median": float(mse.median()),
        "mse_max": float(mse.max()),
        "same": float((mse <= MAX_IDENTICAL_MSE).double().mean()),
        "success": float((mse <= MAX_SUCCESS_MSE).double().mean()),
        "cpu_seconds": sum(seconds) / len(seconds),
        "cpu_max": max(seconds),
    }


MEMORY_PROGRAM = """
import sys, torch
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
before = peak()
sys.path.insert(0, {folder!r})
from rgap import attack_one_image
attack_one_image({seed})
print((peak() - before) / 1024)
"""


def measure_peak_memory(options: Options) -> float | None:
    """Return the peak memory in MB of an attack on one image of CNN6, beyond that of importing torch; None outside of Linux.

    The import of this project counts.
    """
    if not Path("/proc/self/status").exists():
        return None
    script = MEMORY_PROGRAM.format(folder=str(Path(__file__).parent), seed=options.seed)
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    return float(out.splitlines()[-1])


def attack_one_image(seed: int) -> None:
    """Run R-GAP on one image and CNN6, for `measure_peak_memory`."""
    options = Options(quick=True, json=False, data=None, device="cpu", seed=seed, table=None)
    _measure_attack(load_images(options, "cifar10", 1).of_two_classes(), "cnn6", "rgap", rgap(), options)


def measure_many(options: Options) -> TableAndSummary:
    """Run R-GAP on 10,000 images at once, enough to use a GPU fully; return one row and a summary.

    Each image is followed by itself mirrored, upside down and both, with the same label, so that a quarter as many images of the
    data set are needed: its report part has 3,194.
    Without --device cuda, or without a CUDA device, nothing is run: the reason is printed and returned in the summary, without
    rows. With --quick, the images are four, and any device does.
    """
    if not options.quick and (options.device == "cpu" or not torch.cuda.is_available()):
        reason = "there is no CUDA device" if options.device != "cpu" else "it was not asked for, with --device cuda"
        print(f"skipped: 10,000 images at once need a GPU, and {reason}")
        return [], {"many": f"skipped: {reason}"}
    count = 4 if options.quick else 10_000
    quarter = load_images(options, "cifar10", -(-count // 4)).of_two_classes()
    turned = [quarter.x, quarter.x.flip(-1), quarter.x.flip(-2), quarter.x.flip(-1, -2)]
    x = torch.stack(turned, dim=1).flatten(0, 1)[:count]
    y = quarter.y.repeat_interleave(4)[:count]
    one = make_client("cnn6", quarter.data, loss="logistic", seed=options.seed)
    cases = [one.make_case([(a[None], b[None])], f"cnn6-{i}") for i, (a, b) in enumerate(zip(x, y, strict=True))]
    print(f"{count} gradients are there", file=sys.stderr)
    answers, seconds = run_attack(rgap(), cases, options)
    mse = torch.stack([(answer.x[0] - a).double().square().mean() for answer, a in zip(answers, x, strict=True)])
    wall = sum(answer.seconds for answer in answers)
    row = {"images": count, "device": options.device, "wall_seconds": wall, "cpu_seconds": seconds}
    row |= {"mse": float(mse.mean()), "mse_max": float(mse.max()), "same": float((mse <= MAX_IDENTICAL_MSE).double().mean())}
    return [row], {"many_seconds": wall, "many_mse_max": row["mse_max"], "many_same": row["same"]}


TABLES = {
    "table1": measure_table1,
    "linear": measure_linear,
    "limits": measure_limits,
    "imprint": measure_imprint,
    "many": measure_many,
}


if __name__ == "__main__":
    run_selected_table("rgap", __doc__ or "", TABLES)
