"""Sparsifiers: the attacker compares what was sent, and knows of the rest only that it was not.

Where more follows that fills the zeros, such as noise, the mask is a guess: the largest of what was received, as many as the
defense sends. For a message that is still sparse it is exact.
"""

import math

import torch
from torch import Tensor

from defenses.base import Update
from defenses.channel import Channel, ChannelFacts
from defenses.clipping import scale_to
from defenses.dgc import is_dense
from defenses.scopes import Scope, kth_largest, magnitudes, masks
from defenses.sparsification import kept, only, rescaling, unpruned


def top_k(keep: float, *, scope: Scope = "tensor", error_feedback: bool = False) -> Channel:
    """The update where it was sent. Where less than k is not zero, all was sent, and the zeros are known as well."""
    return Channel(only, learn=lambda seen: masks(seen, scope, lambda values: _at_least_kth(values, kept(keep, values.numel()))))


def random_k(keep: float, *, scope: Scope = "tensor", rescale: bool = False, error_feedback: bool = False) -> Channel:
    """The update where it was sent, times what it was rescaled by."""

    def expect(update: Update, known: ChannelFacts) -> Update:
        sent = only(update, known)
        factors = rescaling(update, keep, scope)
        return {name: t * factors[name] for name, t in sent.items()} if rescale else sent

    return Channel(expect, learn=lambda seen: masks(seen, scope, lambda values: _sent(values, kept(keep, values.numel()))))


def prune(ratio: float | None = None, *, threshold: float | None = None, error_feedback: bool = False) -> Channel:
    """The update where it was sent."""

    def sent(values: Tensor) -> Tensor:
        return _sent(values, unpruned(ratio or 0, values.numel()))

    return Channel(only, learn=lambda seen: masks(seen, "global", sent))


def gradient_dropout(p: float, *, rescale: bool = False, error_feedback: bool = False) -> Channel:
    """The update where it was sent, times what it was rescaled by."""
    factor = 1 / (1 - p) if rescale else 1
    return Channel(lambda update, known: only(update, known, factor), learn=lambda seen: {n: t != 0 for n, t in seen.items()})


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
    """The update where it was sent, clipped and with its share of the momentum: what is left of earlier rounds is not simulated.

    With `nesterov` a round's own update goes out 1 + momentum times. During a warm-up the attacker, who need not have seen all
    rounds of a client, takes every entry that is not zero as sent.
    """

    def sent(values: Tensor) -> Tensor:
        return values != 0 if warm_up_rounds else _sent(values, kept(keep, values.numel()))

    def learn(seen: Update) -> ChannelFacts:
        dense = {name: torch.ones_like(t, dtype=torch.bool) for name, t in seen.items() if is_dense(t, dense_vectors)}
        return {**masks({name: t for name, t in seen.items() if name not in dense}, "tensor", sent), **dense}

    def expect(update: Update, known: ChannelFacts) -> Update:
        bounded = update if clip_norm is None else scale_to(update, clip_norm / math.sqrt(workers))
        return only(bounded, known, 1 + momentum if nesterov else 1)

    return Channel(expect, learn=learn)


def _at_least_kth(values: Tensor, k: int) -> Tensor:
    """Truth values (n,): which are not below the k-th largest magnitude."""
    magnitude = magnitudes(values)
    return magnitude >= kth_largest(magnitude, k) if k else torch.ones_like(values, dtype=torch.bool)


def _sent(values: Tensor, k: int) -> Tensor:
    """As above, of those that are not zero."""
    return _at_least_kth(values, k) & (values != 0)
