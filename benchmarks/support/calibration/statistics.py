"""The tables `intervals` and `verdicts` of calibration.py: coverage of confidence intervals, and error rates of verdicts.

Intervals are of draws from known distributions. Verdicts say whether an attack leaks more than its null, the same attack without
the update. They are made on random scores and on real scores, of 1 to 16 clients with one image each, from the report part of
CIFAR-10, CIFAR-100 and LFW. A false leak is a verdict of a leak although the scores compared with the null are those of a second
null. A false "no leak" is a verdict that states no leak although the true gain of the attack is at least the smallest gain that
the verdict states to be detectable, or although the attack is a closed form that recovers all images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from support.contract import Options, ResultRow, measure_cpu
from support.single_cases import make_client
from support.splits import Images, load_images
from torch import Tensor

from attacker.attacks import ATTACKS
from attacker.scoring.assignment import assign_reconstructions
from attacker.scoring.comparison import match_labels
from attacker.scoring.gallery import Gallery
from attacker.scoring.measures import measure
from attacker.scoring.rows import ScoreRow
from attacker.scoring.statistics import MIN_INTERVAL_CLUSTERS, Estimate, estimate_share, mean
from attacker.scoring.verdict import Verdict, judge_attack
from fedsim.data import Dataset
from fedsim.data.base import Examples
from fedsim.recording import DataSpec

CLUSTER_COUNTS, CLUSTER_SIZES, CORRELATIONS = (4, 6, 8, 12, 20, 40), (1, 4, 8), (0.0, 0.3, 0.6, 1.0)
TRUE_SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)


# --- intervals ---


def measure_intervals(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Return rows on the coverage of nominal 95 % intervals, and a summary of them.

    For each sampling design (number, size and correlation of clusters) there is a row on the interval of a share. It holds the
    mean, the minimum and the maximum of the coverage over `TRUE_SHARES`. With at least `MIN_INTERVAL_CLUSTERS` clusters, two more
    rows follow: on the intervals of the mean of a normal and of a skewed distribution.
    """
    repetitions, clusters, sizes = (30, (4, 12), (1, 8)) if options.quick else (400, CLUSTER_COUNTS, CLUSTER_SIZES)
    rng, rows, every = np.random.default_rng(options.seed + 1), [], []
    for count, size, correlation in product(clusters, sizes, CORRELATIONS):
        if size == 1 and correlation:
            continue
        design = {"clusters": count, "size": size, "correlation": correlation}
        shape = repetitions, count, size
        held = [measure_coverage(draw_successes(rng, shape, correlation, value), value, estimate_share) for value in TRUE_SHARES]
        every += [(count, value, of) for value, of in zip(TRUE_SHARES, held, strict=True)]
        rows.append({"of": "share", **design, "coverage": float(np.mean(held)), "least": min(held), "most": max(held)})
        for name, draw in (("normal", rng.normal), ("skewed", rng.exponential)) if count >= MIN_INTERVAL_CLUSTERS else ():
            common, own = draw(size=(repetitions, count, 1)), draw(size=shape)
            samples = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * own
            true = float(np.sqrt(correlation) + np.sqrt(1 - correlation)) * (name == "skewed")
            rows.append({"of": f"mean, {name}", **design, "coverage": measure_coverage(samples, true, mean)})
    return rows, {**_summarise_coverage(rows), **_summarise_shares(every), "designs": len(rows), "repetitions": repetitions}


def _summarise_coverage(rows: Sequence[ResultRow]) -> ResultRow:
    """Return the mean, minimum and maximum of the rows' coverage, and how many are below 0.92 and above 0.98.

    Rows on shares and rows on means are summarised separately, under keys that contain "share" or "mean".
    """
    summary: ResultRow = {}
    for kind in ("share", "mean"):
        coverages = [row["coverage"] for row in rows if row["of"].startswith(kind)]
        low, high = sum(value < 0.92 for value in coverages), sum(value > 0.98 for value in coverages)
        summary |= {f"coverage_{kind}": float(np.mean(coverages)), f"coverage_{kind}_min": min(coverages)}
        summary |= {f"coverage_{kind}_max": max(coverages), f"{kind}_designs_below": low, f"{kind}_designs_above": high}
    return summary


def _summarise_shares(every: Sequence[tuple[int, float, float]]) -> ResultRow:
    """Return how many pairs of sampling design and true share have a coverage below 0.92 and above 0.98, and the minimum.

    every: number of clusters, true share and coverage of each pair. Keys that begin with "cells" are for all pairs, those with
    "usual_cells" for pairs with at least 8 clusters and a share from 0.1 to 0.9.
    """
    usual = [held for count, value, held in every if count >= 8 and 0.1 <= value <= 0.9]
    summary: ResultRow = {}
    for name, held in (("cells", [one[2] for one in every]), ("usual_cells", usual)):
        summary |= {name: len(held), f"{name}_below": sum(h < 0.92 for h in held), f"{name}_above": sum(h > 0.98 for h in held)}
        summary |= {f"{name}_min": min(held, default=None)}
    return summary


def draw_successes(rng: np.random.Generator, shape: tuple[int, int, int], correlation: float, value: float) -> NDArray[Any]:
    """Draw an array of 0 and 1 (successes) of the given `shape` (repetitions, clusters, size), with expected value `value`.

    Two entries of the same cluster have this `correlation`, from 0 to 1. For correlations between 0 and 1, the success
    probability of each cluster is drawn from a beta distribution.
    """
    if correlation == 1:
        own = (rng.random(shape[:2]) < value).astype(float)
    elif correlation == 0:
        own = np.full(shape[:2], value)
    else:
        total = (1 - correlation) / correlation
        own = rng.beta(value * total, (1 - value) * total, shape[:2])
    return (rng.random(shape) < own[..., None]).astype(float)


def measure_coverage(samples: NDArray[Any], true: float, estimate: Callable[..., Estimate]) -> float:
    """Return the share of repetitions for which the interval by `estimate` contains the true value.

    samples: (repetitions, clusters, size). estimate: function of the values and the cluster of each value.
    """
    clusters = np.repeat(np.arange(samples.shape[1]), samples.shape[2]).tolist()
    intervals = [estimate(sample.ravel(), clusters) for sample in samples]
    return float(np.mean([interval.low <= true <= interval.high for interval in intervals]))


# --- verdicts ---

DATA_SETS = ("cifar10", "cifar100", "lfw")
RUN_SIZES = (1, 3, 8, 16)
MODEL_NAMES = ("lenet_cpl", "mlp")
AttackCall = tuple[str, dict[str, Any]]
Answers = list[tuple[Tensor, Tensor]]
SEARCH_ATTACK: AttackCall = ("inverting_gradients", {"steps": 25, "restarts": 1})
EXACT_ATTACK: AttackCall = ("exact", {})
NOISE_DEFENSE = "clip(1) | gaussian(0.003)"
GALLERY_IMAGES = 500
"""Number of images of the tuning split that results are compared with, since an auditor has other examples of the same data."""


def measure_verdicts(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Return a row for each kind of cases (source, design and truth) with its number of wrong verdicts, and a summary.

    The summary holds the share of wrong verdicts where there is no leak ("false_leak") and where there is one ("false_no_leak").
    """
    with measure_cpu() as clock:
        judged = [*_judge_synthetic(options), *_judge_real(options)]
    rows = []
    for kind in dict.fromkeys((judgement.source, judgement.design, judgement.truth) for judgement in judged):
        own = [judgement for judgement in judged if (judgement.source, judgement.design, judgement.truth) == kind]
        wrong = sum(one.is_wrong for one in own)
        rows.append({"source": kind[0], "design": kind[1], "truth": kind[2], "cases": len(own), "wrong": wrong})
    summary: ResultRow = {}
    for truth, key in (("no leak", "false_leak"), ("leak", "false_no_leak")):
        own = [judgement for judgement in judged if judgement.truth == truth]
        for source in ("", "synthetic", "real"):
            some = [one for one in own if source in one.source]
            name = f"{key}_{source}" if source else key
            summary |= {name: sum(one.is_wrong for one in some) / max(1, len(some)), f"{name}_cases": len(some)}
    return rows, {**summary, "cases": len(judged), "cpu_seconds": clock.seconds}


@dataclass(frozen=True)
class JudgedVerdict:
    """A verdict on an attack, with the truth, which is "leak" or "no leak".

    source: "synthetic" if the scores were drawn at random, "real" if attacks were run. design: description of the cases, such as
    their number and the attack.
    """

    source: str
    design: str
    truth: str
    verdict: Verdict

    @property
    def is_wrong(self) -> bool:
        """Whether the verdict states a leak, even a partial one, and the truth is "no leak", or the reverse.

        A "no verdict" counts as a verdict that states no leak.
        """
        return self.verdict.leaks != (self.truth == "leak")


def _judge_synthetic(options: Options) -> Iterator[JudgedVerdict]:
    """Yield verdicts on random scores.

    First, scores of a null are compared with those of another null, so the truth is "no leak". If this verdict states the
    smallest detectable gain in PSNR, a verdict whose truth is "leak" is yielded as well: on new random scores whose PSNR is
    raised by that gain. The same is done for SSIM.
    """
    rng = np.random.default_rng(options.seed + 2)
    repetitions = 5 if options.quick else 40
    for clusters, size, correlation in ((3, 1, 0.0), (8, 1, 0.0), (8, 4, 0.5), (30, 1, 0.0)):
        design = f"{clusters} cases of {size}"
        for _ in range(repetitions):
            null, attack = (_draw_rows(rng, clusters, size, correlation) for _ in range(2))
            verdict = judge_attack(attack, null)
            yield JudgedVerdict("synthetic", design, "no leak", verdict)
            for score in ("psnr", "ssim"):
                if (least := verdict.detectable.get(score)) is None:
                    continue
                shifted = [
                    replace(row, **{score: getattr(row, score) + least}) for row in _draw_rows(rng, clusters, size, correlation)
                ]
                title = f"{design}, {score} raised by its detectable difference"
                yield JudgedVerdict("synthetic", title, "leak", judge_attack(shifted, null))


def _draw_rows(rng: np.random.Generator, clusters: int, size: int, correlation: float) -> list[ScoreRow]:
    """Draw score rows of an attack without information: PSNR about 10 dB, SSIM about 0.05, a tenth of the labels right.

    The rank of the original among 401 examples, by their distance to the reconstruction, is uniformly distributed.
    clusters, size: number of cases, and of examples in each. correlation: between the PSNR values of two examples of a case, and
    between their SSIM values.
    """
    rows = []
    for case in range(clusters):
        common = rng.normal(size=2)
        together = (1 + rng.integers(400)) / 401
        for position in range(size):
            own = np.sqrt(correlation) * common + np.sqrt(1 - correlation) * rng.normal(size=2)
            rank = int(rng.integers(401))
            rows.append(
                ScoreRow(
                    case=str(case),
                    index=case * size + position,
                    failure=None,
                    oracles=(),
                    psnr=10 + 2 * float(own[0]),
                    ssim=0.05 + 0.03 * float(own[1]),
                    success=bool(rng.random() < 0.01),
                    label_success=bool(rng.random() < 0.1),
                    rank=1 + rank,
                    gallery=401,
                    rank_share=rank / 400,
                    chance=min(1.0, size * (1 + rank) / 401),
                    case_chance=together,
                )
            )
    return rows


def _judge_real(options: Options) -> Iterator[JudgedVerdict]:
    """Yield verdicts on groups of clients: of nulls against nulls, whose truth is "no leak", and of attacks by `_judge_attack`.

    The attacks are a short search, on plain updates and on clipped ones with noise, and a closed form on the plain updates of an
    MLP. The nulls are the short search without the update, with several seeds. All attacks, also the closed form, are compared
    with the null of the first seed.
    """
    for name, model in product(DATA_SETS[:1] if options.quick else DATA_SETS, MODEL_NAMES[:1] if options.quick else MODEL_NAMES):
        gallery = _load_gallery(options, name)
        clients = _Clients(options, name, model, "", 8 if options.quick else 16)
        nulls = [clients.run_attack(SEARCH_ATTACK, null=True, seed=seed) for seed in range(2 if options.quick else 3)]
        for size in RUN_SIZES:
            for one, other in zip(nulls[1:], nulls, strict=False):
                for part in _split_clients(len(clients.x), size, 6):
                    rows, null = (clients.score_part(found, part, gallery) for found in (one, other))
                    yield JudgedVerdict(
                        "real", f"{name}, {model}, {size} clients, null of another seed", "no leak", judge_attack(rows, null)
                    )
        for attack, defense in (
            (SEARCH_ATTACK, ""),
            (SEARCH_ATTACK, NOISE_DEFENSE),
            *([(EXACT_ATTACK, "")] if model == "mlp" else []),
        ):
            defended = replace(clients, defense=defense)
            yield from _judge_attack(defended, attack, defended.run_attack(attack, null=False, seed=0), nulls[0], gallery)


def _judge_attack(
    clients: "_Clients", attack: AttackCall, answers: Answers, null: Answers, gallery: Gallery
) -> Iterator[JudgedVerdict]:
    """Yield verdicts of `attack` against a null on those groups of clients for which the truth is "leak".

    The true gain of the attack in a score is the size of its mean difference to the null over all clients, if the verdict on all
    clients finds a leak in this score, else 0. The truth is "leak" if, in at least one score, this gain is as large as the gain
    that the verdict on the group states to be detectable. For the closed form, which recovers the image of every client, the
    truth is "leak" in every group.
    answers, null: reconstructed images and labels of each client, by the attack and by the null.
    """
    everyone = range(len(clients.x))
    whole = judge_attack(clients.score_part(answers, everyone, gallery), clients.score_part(null, everyone, gallery))
    gains = {one.score: abs(one.difference.value) for one in whole.comparisons if one.difference and one.leaks}
    for size in RUN_SIZES:
        for part in _split_clients(len(everyone), size, 3):
            verdict = judge_attack(clients.score_part(answers, part, gallery), clients.score_part(null, part, gallery))
            seen = any(gains.get(score, 0.0) >= least for score, least in verdict.detectable.items())
            if seen or attack == EXACT_ATTACK:
                design = f"{clients.name}, {clients.model}, {size} clients, {attack[0]}{' behind noise' * bool(clients.defense)}"
                yield JudgedVerdict("real", design, "leak", verdict)


def _split_clients(count: int, size: int, most: int) -> list[range]:
    """Return at most `most` disjoint groups of `size` clients each, as ranges of their indices below `count`."""
    return [range(start, start + size) for start in range(0, count - size + 1, size)][:most]


@cache
def _load_gallery(options: Options, name: str) -> Gallery:
    """Return a gallery: images of the tuning part of a data set, with which scoring compares each reconstruction.

    Scoring counts how many gallery images are nearer to the reconstruction than the original is. No client has an image of this
    part, but embedded data, which replace a missing file, have no parts.
    """
    images = load_images(options, name, 60 if options.quick else GALLERY_IMAGES, part="tuning")
    examples = Examples(values=images.x.numpy(), labels=images.y.numpy())
    names = tuple(map(str, range(images.data.num_classes)))
    return Gallery.of(Dataset(name=name, spec=images.data, class_names=names, train=examples, test=examples))


@dataclass(frozen=True)
class _Clients:
    """Clients with one image each. All are attacked; verdicts are then made on groups of them.

    name: of the data set. model: name of the network. defense: as in an experiment, such as "clip(1)"; "" for none. count: number
    of clients.
    """

    options: Options
    name: str
    model: str
    defense: str
    count: int

    @property
    def images(self) -> Images:
        return load_images(self.options, self.name, self.count)

    @property
    def x(self) -> Tensor:
        return self.images.x

    def run_attack(self, attack: AttackCall, *, null: bool, seed: int) -> Answers:
        name, arguments = attack
        built = ATTACKS[name](**arguments)
        built.device = self.options.device
        built = built.null() if null else built
        network, own = make_client(self.model, self.images.data, seed=self.options.seed), self.images
        batches = [(own.x[i : i + 1], own.y[i : i + 1]) for i in range(self.count)]
        cases = [network.make_case([batch], f"{self.name}-{i}", self.defense) for i, batch in enumerate(batches)]
        answers = built(cases, rng=torch.Generator().manual_seed(1000 * self.options.seed + seed))
        return [(answer.x.nan_to_num().clamp(0, 1), answer.y) for answer in answers]

    def score_part(self, answers: Answers, part: range, gallery: Gallery) -> list[ScoreRow]:
        """Return a score row, with the fields that a verdict needs, for each client whose index is in `part`.

        answers: reconstructed images and labels of each of all clients.
        """
        own = self.images
        return [_make_row(answers[i], own.x[i : i + 1], int(own.y[i]), i, own.data, gallery) for i in part]


def _make_row(answer: tuple[Tensor, Tensor], truth: Tensor, label: int, i: int, data: DataSpec, gallery: Gallery) -> ScoreRow:
    x, y = answer
    (measured,) = measure(x, truth, data, "not measured")
    (nearest,) = gallery.compare(x, truth, assign_reconstructions(x, truth), [-1])
    read = match_labels([label], y.tolist())
    return ScoreRow(case=str(i), index=i, label_success=read[0], **measured, **nearest)
