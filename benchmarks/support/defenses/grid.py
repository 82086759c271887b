"""The grid of defenses, each at three strengths, with the effect on attacks that was declared before it was measured.

Secure aggregation has several numbers of clients per sum instead of strengths. In settings, `{0.3 norm}` stands for three tenths
of the median L2 norm of the updates of the same federation without a defense, and `{10 rms}` for ten times the root mean square
of the coordinates of an update with this norm.
"""

import re
from dataclasses import dataclass

from support.defenses.outcomes import Declared

DECLARED_ATTACKS = ("CPL", "IG")
DECLARED_PAIRS = tuple((attack, knows) for attack in DECLARED_ATTACKS for knows in (False, True))
"""Pairs (attack, whether it knows the defense) for which the effect on the PSNR is declared."""


@dataclass(frozen=True)
class Entry:
    """One defense with its settings and its declared effect.

    settings: values of the experiment's key `key` that turn the defense on, from mild to strong.
    declared: effect of the strongest setting on the PSNR of CPL ignoring the defense, CPL knowing it, Inverting Gradients
              ignoring it, and Inverting Gradients knowing it, in this order.
    why:      reason for the declaration.
    batch:    number of examples per client step.
    cohorts:  for secure aggregation, numbers of clients per sum, which take the place of several settings; otherwise empty.
    """

    name: str
    settings: tuple[str, ...]
    declared: tuple[Declared, Declared, Declared, Declared]
    why: str
    key: str = "defense"
    batch: int = 1
    cohorts: tuple[int, ...] = ()


FALLS_FOR_ALL: tuple[Declared, Declared, Declared, Declared] = ("falls", "falls", "falls", "falls")

GRID = (
    Entry(
        "clip",
        ("clip({1 norm})", "clip({0.3 norm})", "clip({0.03 norm})"),
        ("falls", "flat", "flat", "flat"),
        "a cosine ignores norms, and an attacker that knows the bound clips the simulated update too",
    ),
    Entry(
        "clip_each",
        ("clip_each({1 norm})", "clip_each({0.1 norm})", "clip_each({0.003 norm})"),
        ("falls", "flat", "falls", "rises"),
        "tensors change their relative norms; clipping the simulation too gives layers equal weight, which helps a cosine",
    ),
    Entry(
        "gaussian",
        ("gaussian({0.1 rms})", "gaussian({1 rms})", "gaussian({10 rms})"),
        FALLS_FOR_ALL,
        "at the strongest, noise of ten times the update's root mean square hides nearly everything",
    ),
    Entry(
        "gaussian_snr",
        ("gaussian(snr_db=20)", "gaussian(snr_db=0)", "gaussian(snr_db=-20)"),
        FALLS_FOR_ALL,
        "as gaussian, with noise relative to each update",
    ),
    Entry("laplace", ("laplace({0.1 rms})", "laplace({1 rms})", "laplace({10 rms})"), FALLS_FOR_ALL, "as Gaussian noise"),
    Entry("top_k", ("top_k(0.5)", "top_k(0.1)", "top_k(0.003)"), FALLS_FOR_ALL, "at the strongest, fewer equations than pixels"),
    Entry(
        "random_k",
        ("random_k(0.9)", "random_k(0.3)", "random_k(0.003)"),
        FALLS_FOR_ALL,
        "at the strongest, fewer equations than pixels, chosen at random instead of the most informative",
    ),
    Entry("prune", ("prune(0.3)", "prune(0.8)", "prune(0.997)"), FALLS_FOR_ALL, "as top_k, by one threshold for all tensors"),
    Entry(
        "gradient_dropout",
        ("gradient_dropout(0.1)", "gradient_dropout(0.7)", "gradient_dropout(0.997)"),
        FALLS_FOR_ALL,
        "as random_k",
    ),
    Entry("dgc", ("dgc(0.5)", "dgc(0.1)", "dgc(0.003)"), FALLS_FOR_ALL, "as top_k; biases are sent whole, as published"),
    Entry(
        "sign",
        ("sign(scale='mean', error_feedback=True)", "sign(scale='mean')", "sign()"),
        FALLS_FOR_ALL,
        "only the signs of the coordinates are sent, not their magnitudes",
    ),
    Entry("qsgd", ("qsgd(levels=64)", "qsgd(levels=8)", "qsgd(levels=1)"), FALLS_FOR_ALL, "nearly all coordinates become zero"),
    Entry(
        "uniform", ("uniform(8)", "uniform(4)", "uniform(2)"), FALLS_FOR_ALL, "at the strongest, three distinct values per tensor"
    ),
    Entry(
        "withhold",
        ("withhold(['6.bias'])", "withhold(['0.*'])", "withhold(['2.*', '4.*', '6.*', '9.*'])"),
        FALLS_FOR_ALL,
        "at the strongest, only the first convolution is sent, and not the head, which reveals the label",
    ),
    Entry(
        "dp_sgd",
        ("dp_sgd(max_norm=1, noise=0.01)", "dp_sgd(max_norm=1, noise=0.1)", "dp_sgd(max_norm=1, noise=1)"),
        FALLS_FOR_ALL,
        "at the strongest, noise of the size of the whole gradient's norm in each coordinate",
        key="gradient",
    ),
    Entry(
        "fed_cdp",
        ("fed_cdp(max_norm=1, noise=0.01)", "fed_cdp(max_norm=1, noise=0.1)", "fed_cdp(max_norm=1, noise=1)"),
        FALLS_FOR_ALL,
        "at the strongest, noise of the size of a layer's gradient norm in each of its coordinates",
        key="gradient",
    ),
    Entry(
        "soteria",
        ("soteria(prune=0.01)", "soteria(prune=0.4)", "soteria(prune=0.8)"),
        ("falls", "flat", "falls", "rises"),
        "an attacker that knows the defense leaves out the pruned columns, so that a cosine weighs the intact convolutions more",
        key="gradient",
    ),
    Entry(
        "precode",
        ("precode(bottleneck=256, beta=0.001)", "precode(bottleneck=64, beta=0.01)", "precode(bottleneck=8, beta=0.1)"),
        FALLS_FOR_ALL,
        "a random bottleneck, drawn anew in every forward pass",
        key="network",
    ),
    Entry(
        "dropout",
        ("dropout(p=0.05)", "dropout(p=0.3)", "dropout(p=0.7)"),
        FALLS_FOR_ALL,
        "a random mask, which no server knows",
        key="network",
    ),
    Entry(
        "mixup",
        ("mixup(alpha=0.1)", "mixup(alpha=0.4)", "mixup(alpha=1.0)"),
        FALLS_FOR_ALL,
        "batches of two, of which an attack recovers mixtures",
        key="inputs",
        batch=2,
    ),
    Entry(
        "instahide",
        (
            "instahide(k=3, public='{public}', flips=0.02)",
            "instahide(k=3, public='{public}')",
            "instahide(k=6, public='{public}')",
        ),
        FALLS_FOR_ALL,
        "an attack recovers a mixture with random signs",
        key="inputs",
    ),
    Entry(
        "secure_aggregation",
        ("true",),
        FALLS_FOR_ALL,
        "only the sum over all clients is seen, like one large batch",
        key="secure_aggregation",
        cohorts=(2, 4, 6, 8),
    ),
)


def fill_template(template: str, *, norm: float, rms: float, public: str = "") -> str:
    """Return `template`, a setting of a defense, with each "{NUMBER norm}", "{NUMBER rms}" and "{public}" replaced.

    norm, rms: factors of NUMBER, as `measure_units` returns them for the updates of the federation without a defense.
    public: data set of public images, as named in an experiment.
    """
    units = {"norm": norm, "rms": rms}
    text = re.sub(r"\{([\d.]+) (norm|rms)\}", lambda found: f"{float(found[1]) * units[found[2]]:.6g}", template)
    return text.replace("{public}", public)
