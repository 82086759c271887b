"""Channels of sparsifiers: of the simulated update, only the coordinates that the client sent remain.

Coordinates received as nonzero count as sent; for `top_k`, zeros do too if fewer than k values are nonzero. If a sparsifier sends
a known number k of coordinates, and more than k are received as nonzero, because a later defense such as noise changed the zeros,
only those with at least the k-th largest received magnitude count as sent.
"""

import math

import torch
from torch import Tensor

from defenses.base import Scope, Update, choose_masks, compute_magnitudes, find_kth_largest
from defenses.channel import Channel, ChannelFacts
from defenses.channels.residuals import follow_dgc, follow_largest, follow_selected, learn_thresholds
from defenses.clipping import scale_to
from defenses.dgc import is_dense
from defenses.sparsification import count_kept, count_unpruned, find_factors, mask_update


def top_k(keep: float, *, scope: Scope = "tensor", error_feedback: bool = False) -> Channel:
    """Return the attacker's model of `top_k`, which keeps of a simulated update those coordinates that the client sent.

    A coordinate counts as sent if its received magnitude is at least the k-th largest, where k = ceil(keep * n) is the number of
    coordinates that the client sends. If fewer than k received values are not zero, all coordinates count as sent.
    """

    def learn(received: Update) -> ChannelFacts:
        sent = choose_masks(received, scope, lambda values: _compare_with_kth(values, count_kept(keep, values.numel())))
        return {**sent, **learn_thresholds(received, sent, scope)}

    return Channel(mask_update, learn=learn, follow=follow_largest(error_feedback=error_feedback))


def random_k(keep: float, *, scope: Scope = "tensor", rescale: bool = False, error_feedback: bool = False) -> Channel:
    """Return the attacker's model of `random_k`, which keeps of a simulated update those coordinates that the client sent.

    The kept coordinates are multiplied by the client's factor n / k if `rescale` is set, with k = ceil(keep * n). A coordinate
    counts as sent if its received value is not zero, and its received magnitude is at least the k-th largest.
    """

    def expect(update: Update, known: ChannelFacts) -> Update:
        sent = mask_update(update, known)
        factors = find_factors(update, keep, scope)
        return {name: t * factors[name] for name, t in sent.items()} if rescale else sent

    return Channel(
        expect,
        learn=lambda received: choose_masks(received, scope, lambda values: _find_sent(values, count_kept(keep, values.numel()))),
        follow=follow_selected if error_feedback else None,
    )


def prune(ratio: float | None = None, *, threshold: float | None = None, error_feedback: bool = False) -> Channel:
    """Return the attacker's model of `prune`, which keeps of a simulated update those coordinates that the client sent.

    A coordinate counts as sent if its received value is not zero. With `ratio`, its received magnitude must also be at least the
    k-th largest, for k = `count_unpruned(ratio, n)`.
    """

    def find_sent(values: Tensor) -> Tensor:
        return _find_sent(values, count_unpruned(ratio or 0, values.numel()))

    def learn(received: Update) -> ChannelFacts:
        sent = choose_masks(received, "global", find_sent)
        return {**sent, **learn_thresholds(received, sent, "global")}

    return Channel(mask_update, learn=learn, follow=follow_largest(error_feedback=error_feedback))


def gradient_dropout(p: float, *, rescale: bool = False, error_feedback: bool = False) -> Channel:
    """Return the attacker's model of `gradient_dropout`, which keeps of a simulated update the coordinates received as nonzero.

    The kept coordinates are divided by 1 - p if `rescale` is set.
    """
    factor = 1 / (1 - p) if rescale else 1
    return Channel(
        lambda update, known: mask_update(update, known, factor),
        learn=lambda received: {n: t != 0 for n, t in received.items()},
        follow=follow_selected if error_feedback else None,
    )


def dgc(
    keep: float,
    *,
    momentum: float = 0.9,
    clip_norm: float | None = None,
    workers: int = 1,
    warm_up_rounds: int = 0,
    masking: bool = True,
    nesterov: bool = False,
    dense_vectors: bool = True,
) -> Channel:
    """Return the attacker's model of `dgc`: the sent coordinates of the simulated update, clipped before if `clip_norm` is set.

    Momentum and residual are simulated only by attacks on all rounds of a client. For a single round with `nesterov`, the update
    is multiplied by 1 + momentum. With a warm-up, every nonzero received entry counts as sent, since the attacker may not know
    the client's round number. With `dense_vectors`, tensors of fewer than two dimensions count as sent completely.
    """

    def find_sent(values: Tensor) -> Tensor:
        return values != 0 if warm_up_rounds else _find_sent(values, count_kept(keep, values.numel()))

    def learn(received: Update) -> ChannelFacts:
        dense = {name: torch.ones_like(t, dtype=torch.bool) for name, t in received.items() if is_dense(t, dense_vectors)}
        sent = {**choose_masks({name: t for name, t in received.items() if name not in dense}, "tensor", find_sent), **dense}
        return {**sent, **learn_thresholds(received, sent, "tensor")}

    def bound(update: Update) -> Update:
        return update if clip_norm is None else scale_to(update, clip_norm / math.sqrt(workers))

    def expect(update: Update, known: ChannelFacts) -> Update:
        return mask_update(bound(update), known, 1 + momentum if nesterov else 1)

    follow = follow_dgc(bound, momentum, masking=masking, nesterov=nesterov, dense_vectors=dense_vectors)
    return Channel(expect, learn=learn, follow=follow)


def _compare_with_kth(values: Tensor, k: int) -> Tensor:
    """Return booleans (n,): whether the magnitude of each value is at least the k-th largest; all true for k = 0."""
    magnitude = compute_magnitudes(values)
    return magnitude >= find_kth_largest(magnitude, k) if k else torch.ones_like(values, dtype=torch.bool)


def _find_sent(values: Tensor, k: int) -> Tensor:
    """Return booleans (n,): whether each value is not zero and, unless k = 0, its magnitude is at least the k-th largest."""
    return _compare_with_kth(values, k) & (values != 0)
