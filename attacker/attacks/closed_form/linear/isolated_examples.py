"""The inputs of those examples of a batch that are the only ones to activate some neuron followed by a ReLU."""

from dataclasses import replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.isolation import (
    Groups,
    estimate_rounding,
    find_mixtures,
    group_parallel_rows,
    select_independent,
)
from attacker.attacks.closed_form.linear.layer_gradient import UNSCALED, LayerGradient, LinearAnswer, join_notes
from attacker.attacks.closed_form.linear.single_example import SINGLE_NEURON_CERTAINTY


def recover_isolated(gradient: LayerGradient, examples: int | None, note: str) -> LinearAnswer:
    """Recover the examples that are the only ones to activate some neuron. The gradient's rank need not be known.

    note: remark that is copied to the answer.
    """
    groups = group_parallel_rows(gradient.rows, estimate_rounding(gradient.rows), gradient.rows.norm(dim=1) > 0)
    groups = mark_mixtures(gradient, groups, groups.directions)
    return recover_groups(gradient, groups.directions, groups, rank=0, examples=examples, note=note)


def mark_mixtures(gradient: LayerGradient, groups: Groups, directions: Tensor) -> Groups:
    """Return the groups with `mixed` set, for confirmed ones whose input lies between the inputs of other confirmed groups.

    Groups whose input has the values of an 8-bit image are not marked.
    directions: directions of the groups as rows of the gradient, (K, F'). Without a bias nothing is marked, since the norm of an
    input is then not known.
    """
    x, fits = gradient.compute_inputs(directions)
    mixed = torch.zeros_like(fits)
    if gradient.biased:
        known = (groups.confirmed & fits).nonzero()[:, 0]
        mixed[known] = find_mixtures(torch.cat([x[known], torch.ones_like(x[known, :1])], dim=1))
        mixed &= ~gradient.is_eight_bit(x)
    return replace(groups, mixed=mixed)


def recover_groups(
    gradient: LayerGradient, directions: Tensor, groups: Groups, *, rank: int, examples: int | None, note: str
) -> LinearAnswer:
    """Recover examples from K groups of parallel rows; at most `rank` and `examples` of them, if these are known.

    Only possible inputs (`LayerGradient.compute_inputs`) of groups with linearly independent directions are used. Inputs whose
    values are those of an 8-bit image come first. Next come the groups in `Groups.confirmed`, which have more rows than chance
    explains; if `LayerGradient.uniform` is set, these groups count as others. Others are used only if their input lies within the
    known bounds of the data, if no other row is nearly parallel, and if the group is not known to be a mixture of examples
    (`Groups.mixed`).
    directions: directions of the groups as rows of the gradient, (K, F'). rank: rank of the gradient; 0 if unknown. note: remark
    that is copied to the answer.
    """
    x, fits = gradient.compute_inputs(directions)
    stored = fits & gradient.is_eight_bit(x)
    mixed = torch.zeros_like(stored) if groups.mixed is None else groups.mixed
    first = torch.argsort(stored.long() - mixed.long(), descending=True, stable=True)
    chosen = first[select_independent(directions[first])]
    x, fits, stored = x[chosen], fits[chosen], stored[chosen]
    several = groups.confirmed[chosen] & fits & ~stored & (not gradient.uniform)
    lone = ~stored & ~several & fits & gradient.is_within_bounds(x) & ~(groups.crowded | mixed)[chosen]
    most = min(rank or len(x), examples or len(x))
    order = torch.cat([mask.nonzero()[:, 0] for mask in (stored, several, lone)])[:most]
    agreeing = groups.count[chosen].clamp(min=2).double()
    certainty = torch.where(several, 1 - 0.1 ** (agreeing - 1), SINGLE_NEURON_CERTAINTY).masked_fill(stored, 1.0)[order]
    total = rank or examples or "unknown"
    text = "no neuron is known to be activated by a single example only"
    if len(order):
        text = f"{len(order)} of {total} examples were found, each alone in activating a neuron"
    return LinearAnswer(
        x=x[order], d=x.new_zeros(len(order), len(gradient.rows)), certainty=certainty, rank=rank,
        how="isolated" if len(order) else "", note=join_notes(note, text, "" if gradient.biased or not len(order) else UNSCALED),
        scaled=gradient.biased,
    )  # fmt: skip
