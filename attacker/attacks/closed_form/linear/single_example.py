"""The input of one example: the ratio of the gradients of weights and bias (Aono et al. 2017; Phong et al. 2018)."""

from dataclasses import replace

import torch
from torch import Tensor

from attacker.attacks.closed_form.linear.layer_gradient import (
    UNSCALED,
    LayerGradient,
    LinearAnswer,
    build_empty_answer,
    join_notes,
)

MIN_ALONE_NEURONS = 3
"""Smallest number of neurons whose parallel gradients are evidence that a batch's gradient is that of one example."""

ZERO_BIAS = "the gradient of the bias, by which the weight gradient is divided, is zero"

SINGLE_NEURON_CERTAINTY = 0.25
"""Certainty of an example that is computed from a single neuron."""


def recover_single(gradient: LayerGradient, note: str = "") -> LinearAnswer:
    """Return the input of one example by `divide_rows`; if the gradient of the bias is zero, the answer has no example.

    Without a bias, see `_fit_rank_one`. note: copied to the answer.
    """
    scale = gradient.rows.abs().amax()
    rows = gradient.rows / scale
    if not gradient.biased:
        return _fit_rank_one(gradient, note)
    if not bool((rows[:, -1] != 0).any()):
        return build_empty_answer(gradient.layer, ZERO_BIAS, rank=1)
    x, certainty, remark = divide_rows(rows)
    d = scale * rows[None, :, -1]
    return LinearAnswer(x=x[None], d=d, certainty=certainty[None], rank=1, how="ratio", note=join_notes(note, remark))


def divide_rows(rows: Tensor) -> tuple[Tensor, Tensor, str]:
    """Return the input of one example, x = sum_j gb_j gW_j / sum_j gb_j^2, the least-squares solution of dL/dW = gb x^T.

    rows: (width, F + 1), the gradients gW of a layer's weight, with that of its bias, gb, in the last column; gb is not zero.
    Entries of gW that are zero are left out of both sums, since they may not have been sent.
    Returns x (F,), its certainty in [0, 1], and a remark on values that are unknown; "" if there are none.
    """
    weight, d = rows[:, :-1], rows[:, -1]
    seen = weight != 0
    power = d.square() @ seen.to(d.dtype)
    x = torch.where(power > 0, d @ weight / power.clamp(min=torch.finfo(d.dtype).tiny), 0)
    missed = ((weight - torch.outer(d, x)) * seen).square().sum() / weight.square().sum().clamp(min=1e-300)
    unsent = seen.any(dim=0)[None] & seen.any(dim=1)[:, None] & ~seen
    lost = int((power <= 0).sum()) if bool(unsent.any()) else 0
    remark = f"{lost:,} of the example's {len(x):,} values are unknown: their gradient is zero or was not sent" if lost else ""
    return x, (1 - lost / len(x)) * (1 - missed).clamp(0, 1), remark


def _fit_rank_one(gradient: LayerGradient, note: str) -> LinearAnswer:
    """Return the unit vector x of the best rank-one fit of dL/dW, for a layer without a bias.

    If a ReLU follows, its sign is chosen so that x turns on the neurons with a gradient.
    """
    scale = gradient.rows.abs().amax()
    left, value, right = torch.linalg.svd(gradient.rows / scale, full_matrices=False)
    x, d = right[:1], (left[:, :1] * value[0] * scale).T
    side = 1.0 if float((gradient.weight @ x[0]) @ d[0].abs()) >= 0 else -1.0  # neurons with a gradient are on
    x, d = (side * x, side * d) if gradient.layer.activation.name == "relu" else (x, d)
    explained = value[:1].square() / value.square().sum()
    return LinearAnswer(x=x, d=d, certainty=explained, rank=1, how="ratio", note=join_notes(note, UNSCALED), scaled=False)


def recover_rank_one(gradient: LayerGradient, note: str) -> LinearAnswer:
    """Return the input of one example that seems to make up the whole gradient of a batch, which has rank one.

    Fewer than `MIN_ALONE_NEURONS` neurons with a gradient are no evidence of a single example: one row always has rank one.
    """
    answer = recover_single(gradient, note)
    few = int((gradient.rows.norm(dim=1) > 0).sum()) < MIN_ALONE_NEURONS
    return replace(answer, certainty=answer.certainty.clamp(max=SINGLE_NEURON_CERTAINTY)) if few else answer
