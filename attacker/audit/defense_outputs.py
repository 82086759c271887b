"""Properties of the output of a declared defense, measured by applying the defense to updates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from defenses.base import Update
from defenses.spec import DefenseSpec

NUM_RANDOM_UPDATES = 3
"""Number of random updates that a defense is applied to."""
MAX_UNCHANGED_DIFFERENCE = 1e-4
"""Largest relative change, in Euclidean norm, of an update that counts as unchanged."""
MAX_LEVEL_SHARE = 0.25
"""Largest number of distinct values of a quantised tensor, relative to its number of values other than zero."""
MIN_COORDINATES = 64
"""Smallest number of values other than zero of a tensor whose distinct values are counted."""


@dataclass(frozen=True)
class Signature:
    """Properties of the outputs of a defense, measured on a few random updates.

    idempotent: whether the defense leaves its own output (nearly) unchanged, as clipping, top-k, pruning and sending only signs
    do.
    zeros:      share of coordinates that are exactly zero, the smallest over the outputs measured.
    levels:     from tensor name to the number of distinct values other than zero, the largest over the outputs measured; only
                quantised tensors are included.
    additive:   whether two outputs of the last step for one input differ in every coordinate, `zeros` is 0 and `levels` is empty,
                as for a defense that ends with additive noise.
    """

    idempotent: bool
    zeros: float
    levels: Mapping[str, int]
    additive: bool


def measure_signature(spec: DefenseSpec, like: Update) -> Signature:
    """Return the signature of a defense, measured on random updates with the shapes and sizes of `like`, see `draw_like`."""
    idempotent, additive, zeros, last = True, True, 1.0, _take_last_step(spec)
    levels, sizes = dict[str, int](), dict[str, int]()
    for draw in range(NUM_RANDOM_UPDATES):
        before = draw_like(like, draw)
        after = apply(spec, before, 10 + draw)
        idempotent &= measure_change(apply(spec, after, 30 + draw), after) < MAX_UNCHANGED_DIFFERENCE
        zeros = min(zeros, measure_zero_share(after))
        first, other = apply(last, after, 20 + draw), apply(last, after, 30 + draw)
        additive &= all(bool((first[name] != other[name]).all()) for name in after)
        for name, count in count_levels(after).items():
            levels[name], sizes[name] = max(levels.get(name, 0), count), int((after[name] != 0).sum())
    few = {name: count for name, count in levels.items() if count <= MAX_LEVEL_SHARE * sizes[name]}
    return Signature(idempotent, zeros, few, additive and zeros == 0 and not few)


def _take_last_step(spec: DefenseSpec) -> DefenseSpec:
    """Return the last step of a defense alone; a defense that is an argument of this step is reduced to its last step, too."""
    if not spec.steps:
        return spec
    last = spec.steps[-1]
    inner = tuple((key, _take_last_step(value) if isinstance(value, DefenseSpec) else value) for key, value in last.arguments)
    return DefenseSpec((replace(last, arguments=inner),))


def apply(spec: DefenseSpec, update: Update, seed: int) -> Update:
    """Return the update after a defense in its initial state, with random numbers from `seed`, as in a first round."""
    defense = spec.build()
    return defense.apply(update, defense.init(update), Generator().manual_seed(seed))[0]


def measure_noise_deviations(spec: DefenseSpec, update: Update, *, seed: int) -> dict[str, float]:
    """Return the declared standard deviation of the noise on each coordinate of an observed update, by tensor name.

    Only noise of the last step of the defense counts; without such noise, all deviations are 0. The expected squared norm of this
    noise over all tensors comes from the channel of this step (the attacker's model of a defense), given the observed update,
    which already holds the noise. The share of each tensor is measured: the step is applied to the update twice, and the outputs
    differ only by their noise.
    seed: seed of these two draws. With different seeds for different updates, the errors of measurement are independent.
    """
    last = _take_last_step(spec)
    first, second = apply(last, update, 2 * seed), apply(last, update, 2 * seed + 1)
    power = {name: float((first[name] - second[name]).double().square().sum()) / 2 for name in update}
    total = sum(power.values())
    scale = float(last.build_channel().noise(update)) / total if total else 0.0
    return {name: (scale * power[name] / update[name].numel()) ** 0.5 for name in update}


def measure_change(first: Update, other: Update) -> float:
    """Return the Euclidean norm of the difference of two updates, divided by the norm of `other`; 0 if `other` is 0."""
    norm = sum(float(t.double().square().sum()) for t in other.values())
    change = sum(float((first[name].double() - t.double()).square().sum()) for name, t in other.items())
    return (change / norm) ** 0.5 if norm else 0.0


def measure_zero_share(update: Update) -> float:
    """Return the share of all coordinates of an update that are exactly zero, in [0, 1]."""
    return sum(int((t == 0).sum()) for t in update.values()) / max(1, sum(t.numel() for t in update.values()))


def count_levels(update: Update) -> dict[str, int]:
    """Return the number of distinct nonzero values of each tensor with `MIN_COORDINATES` nonzero values, by name."""
    sent = {name: t[t != 0] for name, t in update.items()}
    return {name: len(torch.unique(t)) for name, t in sent.items() if len(t) >= MIN_COORDINATES}


def draw_like(like: Update, seed: int) -> dict[str, Tensor]:
    """Return Gaussian random tensors with mean 0, by name, with the names and shapes of the tensors of `like`.

    The standard deviation of each tensor is the root mean square of the tensor of the same name in `like`, or 1 if all
    values of that tensor are 0.
    """
    rng = Generator().manual_seed(seed)
    drawn = {}
    for name, t in like.items():
        size = float(t.float().square().mean().sqrt()) or 1.0
        drawn[name] = size * torch.randn(t.shape, generator=rng).to(t.dtype)
    return drawn
