"""A folder of reconstructions, so that an interrupted benchmark continues, and measures of their similarity to the originals."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from support.attacked import describe_settings, run_attack
from support.contract import Options
from torch import Tensor

from attacker.attacks import Case, GradientMatching, rog
from attacker.attacks.labels.observed import read_labels
from attacker.attacks.labels.rules import infer_labels
from attacker.attacks.learned.perceptual import Lpips, explain_missing, load
from attacker.attacks.matching.case_batch import CaseBatch
from attacker.reconstruction import Reconstruction
from attacker.replay.identity import identify_version
from attacker.scoring.assignment import assign_reconstructions
from attacker.scoring.comparison import match_labels
from attacker.scoring.metrics import psnr, ssim, ssim_global

LPIPS_FILE = "lpips/alexnet_features.safetensors"
"""Backbone of LPIPS in the folder of --data."""


@dataclass(frozen=True)
class Answer:
    """The images x (N, *shape) in [0, 1] that one attack reconstructed from one update, in the order of the originals."""

    x: Tensor
    cpu_seconds: float


@dataclass(frozen=True)
class Similarity:
    """Measures of the similarity of images to their originals, each a mean over the images.

    psnr: in dB. ssim: over windows; ssim_global: over the whole image. lpips: a distance, lower is better; None if the weights of
    its network are missing or images are too small.
    """

    psnr: float
    ssim: float
    ssim_global: float
    lpips: float | None

    def is_better_than(self, other: "Similarity", *, or_equal: bool = False) -> bool:
        """Return whether LPIPS is lower than in `other` or, if either has no LPIPS, whether PSNR is higher.

        or_equal: whether equal values count as better.
        """
        if self.lpips is None or other.lpips is None:
            return self.psnr >= other.psnr if or_equal else self.psnr > other.psnr
        return self.lpips <= other.lpips if or_equal else self.lpips < other.lpips


class AnswerFolder:
    """A folder of reconstructions, in files named by a hash of their settings.

    fresh: whether to attack again, and overwrite reconstructions that were stored before this object was made.
    """

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path, self.fresh = path, fresh
        self.made: set[Path] = set()
        path.mkdir(parents=True, exist_ok=True)

    def make_path(self, attack: GradientMatching, case: Case, x: Tensor, options: Options) -> Path:
        """Return the path of an answer, named by a hash of what it depends on.

        That is the attack's settings, the settings of the case's observations (network, data, training and defenses), the known
        labels, the originals x, the name of the case, the seed of `options`, from which the initial weights are drawn, and the
        version of the code.
        """
        parts = [attack.objective, attack.simulation, attack.parametrisation, attack.prior, attack.labels, attack.search]
        own = [attack.name, describe_settings(attack), attack.sees_gradient, attack.enhancer, *parts]
        seen = [(o.model, o.data, o.training, o.defenses, o.gradient, o.inputs) for o in case.observations]
        labels = None if case.known_labels is None else case.known_labels.tolist()
        text = re.sub(
            " at 0x[0-9a-f]+", "", repr([own, seen, labels, case.key, tuple(x.shape), options.seed, identify_version()])
        )
        digest = hashlib.sha256(text.encode() + x.contiguous().numpy().tobytes()).hexdigest()[:16]
        return self.path / f"{digest}.safetensors"

    def attack(self, attack: GradientMatching, case: Case, x: Tensor, options: Options) -> Answer:
        """Return what `attack` reconstructs from `case`, in the order of the originals x (N, *shape).

        If this folder holds the answer, and `fresh` is not set or this object made it, that answer is returned. Otherwise the
        attack runs, and its answer is stored. Stored answers are distinguished as `make_path` says.
        attack: an attack, or its null (the same attack without the client's message).
        """
        file = self.make_path(attack, case, x, options)
        cost = file.with_suffix(".json")
        if (self.fresh and file not in self.made) or not cost.exists():
            (answer,), seconds = run_attack(attack, [case], options)
            answer.write(file)
            self.made.add(file)
            cost.write_text(json.dumps({"cpu_seconds": seconds}))
        answer = Reconstruction.read(file)
        return Answer(sort_like(answer.x.nan_to_num(), x).clamp(0, 1), json.loads(cost.read_text())["cpu_seconds"])


def sort_like(found: Tensor, originals: Tensor) -> Tensor:
    """Return the images `found`, (N, *shape), in the order of the originals (N, *shape) that they are assigned to."""
    return found[[i for i in assign_reconstructions(found, originals) if i is not None]]


def load_perceptual(options: Options, side: int) -> Lpips | None:
    """Return the measure LPIPS with AlexNet; None if --data has no weights of it, or images of side `side` are too small."""
    path = options.data / LPIPS_FILE if options.data else None
    if path is None or not path.exists() or explain_missing("alex", (3, side, side)):
        return None
    return load("alex", path)


def share_of_labels(case: Case, y: Tensor, options: Options) -> float:
    """Return the share of the labels y (N,), counting repetitions, that ROG infers from a case if no labels are given."""
    batch = CaseBatch(rog(), [replace(case, known_labels=None)])
    labels = read_labels(infer_labels, batch.views[0], 0, batch.model, torch.Generator().manual_seed(options.seed))
    return sum(match_labels(y.tolist(), labels.tolist())) / len(y)


def measure_similarity(x: Tensor, truth: Tensor, perceptual: Callable[[Tensor, Tensor], Tensor] | None) -> Similarity:
    """Return the mean similarity of images x to their originals `truth`, both (N, 3, H, W) in the same order.

    perceptual: the measure LPIPS; with None, the result's `lpips` is None.
    """
    return Similarity(
        float(psnr(x, truth).mean()),
        float(ssim(x, truth).mean()),
        float(ssim_global(x, truth).mean()),
        float(perceptual(x, truth).mean()) if perceptual else None,
    )


def average_similarities(similarities: Sequence[Similarity]) -> Similarity:
    """Return the mean of each measure over `similarities`; LPIPS is None if it is missing in one of them."""
    lpips = [similarity.lpips for similarity in similarities if similarity.lpips is not None]
    return Similarity(
        fmean(similarity.psnr for similarity in similarities),
        fmean(similarity.ssim for similarity in similarities),
        fmean(similarity.ssim_global for similarity in similarities),
        fmean(lpips) if len(lpips) == len(similarities) else None,
    )
