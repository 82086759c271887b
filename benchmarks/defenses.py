"""What each defense costs and what it hides: accuracy, bytes and epsilon beside the leakage at three strengths.

Two federations for every setting. One measures accuracy: an MLP on digits, five clients, ten rounds of one epoch. The other is
attacked: one step of batch 1 on photographs of 16x16 pixels, the CPL LeNet, by CPL and by Inverting Gradients, each ignoring and
knowing the defense. What should become of the PSNR from no defense to the strongest setting is declared in `defense_grid.py`;
`as_declared` is the share of pairs of a defense and an attacker that do so, by the 95 % interval of the paired difference over
the same images: "falls" is an interval below 0, "flat" one that holds 0, or a mean of at most 1 dB.

Lengths of clips and noise are multiples of each federation's own undefended update. `--quick` is two photographs and the first
defenses; a name as argument runs that defense alone.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from contract import Options, options, told
from defense_grid import GRID, PAIRS, Entry, filled

from attacker.attacks import AttackSpec
from attacker.replay import Replay
from attacker.scoring import Scorer
from attacker.scoring.statistics import Estimate, mean
from defenses import global_norm
from fedsim import datasets, engine
from fedsim.experiment import validate
from fedsim.run import Run
from fedsim.wire import Recording
from fedsim.wire.files import read_json_lines

ATTACKED: dict[str, Any] = {
    "seed": 0,
    "rounds": 1,
    "model": "lenet_cpl",
    "training": {"learning_rate": 0.01, "batch_size": 1, "steps": 1},
}
TRAINED: dict[str, Any] = {
    "seed": 0,
    "rounds": 10,
    "model": {"name": "mlp", "hidden": [32]},
    "data": "digits",
    "clients": {"count": 5},
    "training": {"learning_rate": 0.3, "batch_size": 16, "epochs": 1},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "cpl": {"steps": 60, "restarts": 2},
    "inverting_gradients": {"steps": 800, "signed": False, "tv": 1e-3},
}
SHORT = {"cpl": "CPL", "inverting_gradients": "IG"}
STRENGTHS = ("mild", "middle", "strong")
FLAT_DB = 1.0
WORST_DB = 0.0
"""PSNR of an image of which an attack could make nothing at all."""
QUICK = ("clip", "top_k")


@dataclass(frozen=True)
class Job:
    """One setting. entry: None for no defense. attacked, trained: what its key is set to in each federation."""

    entry: Entry | None
    strength: str
    attacked: Any
    trained: Any
    folder: Path
    images: int
    device: str

    @property
    def name(self) -> str:
        return f"{self.entry.name}-{self.strength}" if self.entry else "none"


@dataclass(frozen=True)
class Found:
    """What one job measured. row: for the table. psnr: of each image, by attack and whether it knows the defense."""

    job: Job
    row: dict[str, Any]
    psnr: dict[tuple[str, bool], dict[str, float]]
    units: tuple[dict[str, float], dict[str, float]]


def main() -> None:
    """Run the benchmark."""
    asked = options(__doc__ or "", tables=[entry.name for entry in GRID])
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder, images = Path(name), 2 if asked.quick else 8
        _write_photos(folder, images)
        none = _measure(Job(None, "", "", "", folder, images, asked.device))
        jobs = list(_jobs(asked, none, folder))
        with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as workers:
            found = []
            for one in workers.map(_measure, jobs):
                found.append(one)
                print(f"{len(found)} of {len(jobs)}: {one.job.name}", file=sys.stderr)
    checks = [check for one in found if one.job.strength == "strong" for check in _checks(none, one)]
    losses = [none.row["accuracy"] - one.row["accuracy"] for one in found if one.job.strength == "mild"]
    told("defenses, PSNR from none to the strongest in dB", checks, {}, replace(asked, json=False))
    summary = {
        "as_declared": sum(check["holds"] for check in checks) / len(checks) if checks else None,
        "pairs": len(checks),
        "worst_accuracy_loss": max(losses, default=None),
        "differs": "; ".join(_words(check) for check in checks if not check["holds"]) or "none",
    }
    told("defenses", [one.row for one in (none, *found)], summary, asked)


def _words(check: dict[str, Any]) -> str:
    knows = "knowing" if check["knows"] else "ignoring"
    change = f"{check['difference']:+.1f} ({check['low']:+.1f} to {check['high']:+.1f}) dB"
    return f"{check['defense']} against {check['attack']} {knows}: declared {check['declared']}, measured {change}"


def _write_photos(folder: Path, images: int) -> None:
    """The embedded photographs at half their size: `private.npz` is attacked, `public.npz` is for those who mix it in."""
    photos = datasets.load("photos", size=32)
    x, y = photos.train[:]
    small = torch.nn.functional.avg_pool2d(x, 2).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    chosen = np.linspace(0, len(small) - 1, images).round().astype(int)
    rest = np.setdiff1d(np.arange(len(small)), chosen)
    for name, where in (("private", chosen), ("public", rest)):
        np.savez(folder / f"{name}.npz", images=small[where], labels=y.numpy()[where])


def _jobs(asked: Options, none: Found, folder: Path) -> Iterator[Job]:
    public = f"npz:{folder / 'public.npz'}"
    for entry in GRID:
        if asked.table not in (None, entry.name) or (asked.quick and asked.table is None and entry.name not in QUICK):
            continue
        trained = entry.trained or entry.settings
        names = STRENGTHS if len(entry.settings) > 1 else STRENGTHS[-1:]
        for strength, attacked, own in zip(names, entry.settings, trained, strict=True):
            values = [filled(text, public=public, **units) for text, units in zip((attacked, own), none.units, strict=True)]
            if entry.key == "secure_aggregation":
                values = [True, True]
            yield Job(entry, strength, *values, folder, none.job.images, asked.device)


def _measure(job: Job) -> Found:
    """Both federations of one setting, and all attacks on the one that is attacked."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    key = job.entry.key if job.entry else "defense"
    photos = {"data": {"name": "npz", "train": str(job.folder / "private.npz"), "test": str(job.folder / "public.npz")}}
    trained = _federate({**TRAINED, key: job.trained}, job, "trained")
    if job.entry is not None and set(job.entry.expected) == {"n/a"}:
        attacked, pairs = trained, ()
    else:
        settings = {**ATTACKED, **photos, "clients": {"count": job.images}, key: job.attacked}
        attacked, pairs = _federate(settings, job, "attacked"), PAIRS
    name = job.entry.name if job.entry else "none"
    row: dict[str, Any] = {"defense": name, "strength": job.strength, "setting": str(job.attacked)}
    last, first = (read_json_lines(run.out / "metrics.jsonl")[-1] for run in (trained, attacked))
    row |= {"accuracy": last["accuracy"], "bytes_up": first["bytes_up"], "epsilon": last.get("privacy", {}).get("epsilon")}
    psnr = {}
    for attack, knows in pairs:
        if job.entry is None and knows:  # there is nothing to know
            psnr[attack, knows] = psnr[attack, False]
            continue
        scores = _attack(attacked, attack, knows, job.device)
        psnr[attack, knows] = {score["index"]: WORST_DB if score["psnr"] is None else score["psnr"] for score in scores}
        words = f"{SHORT[attack]} {'knowing' if knows else 'ignoring'}" if job.entry else SHORT[attack]
        row |= {f"{words} dB": sum(psnr[attack, knows].values()) / len(scores)}
        row |= {f"{words} success": sum(score["success"] for score in scores) / len(scores)}
    return Found(job, row, psnr, (_units(attacked), _units(trained)))


def _federate(settings: dict[str, Any], job: Job, purpose: str) -> Run:
    experiment = validate(settings, source=f"{job.name} ({purpose})")
    run = Run(experiment=experiment, out=job.folder / job.name / purpose, device=job.device, client_seed=0)
    engine.run(run, engine="local")
    return run


def _attack(run: Run, attack: str, knows: bool, device: str) -> list[dict[str, Any]]:
    """One row for each image."""
    recording = Recording(run.out / "recording")
    spec = AttackSpec(name=attack, arguments={**ARGUMENTS[attack], "knows_defense": knows})
    replayed = Replay(recording=recording, spec=spec, out=run.out / "reconstructions", device=device).run()
    return Scorer(run.out, [run.out / "truth"]).score(replayed.folder)


def _units(run: Run) -> dict[str, float]:
    """The median length of a federation's updates, and the root of their mean square."""
    norm = median(float(global_norm(o.update)) for o in Recording(run.out / "recording").observations())
    coordinates = sum(t.numel() for t in Recording(run.out / "recording").sent(1).weights.values())
    return {"norm": norm, "rms": norm / coordinates**0.5}


def _checks(none: Found, strong: Found) -> Iterator[dict[str, Any]]:
    """Each attacker's paired difference between the strongest setting and no defense, beside what was declared."""
    assert strong.job.entry is not None
    for pair, declared in zip(PAIRS, strong.job.entry.expected, strict=True):
        if declared == "n/a":
            continue
        before, after = none.psnr[pair], strong.psnr[pair]
        difference = mean([after[index] - before[index] for index in before])
        yield {
            "defense": strong.job.entry.name,
            "attack": SHORT[pair[0]],
            "knows": pair[1],
            "declared": declared,
            "difference": difference.value,
            "low": difference.low,
            "high": difference.high,
            "holds": _holds(declared, difference),
        }


def _holds(declared: str, difference: Estimate) -> bool:
    if declared == "falls":
        return difference.high < 0
    return difference.low <= 0 <= difference.high or abs(difference.value) <= FLAT_DB


if __name__ == "__main__":
    main()
