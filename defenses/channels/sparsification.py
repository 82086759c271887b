"""Channels of sparsifiers: the attacker compares the coordinates that were sent.

For a sparse message the mask of sent coordinates is exact. If a later step fills the zeros, such as noise, the mask is estimated
as the largest received magnitudes, as many as the defense sends.
"""

import math

import torch
from torch import Tensor

from defenses.base import Scope, Update, kth_largest, magnitudes, masks
from defenses.channel import Channel, ChannelFacts
from defenses.clipping import scale_to
from defenses.dgc import is_dense
from defenses.sparsification import kept, only, rescaling, unpruned


def top_k(keep: float, *, scope: Scope = "tensor", error_feedback: bool = False) -> Channel:
    """Return the channel of `top_k`: the sent coordinates. With fewer than k nonzero values, zeros were sent as well."""
    return Channel(only, learn=lambda seen: masks(seen, scope, lambda values: _at_least_kth(values, kept(keep, values.numel()))))


def random_k(keep: float, *, scope: Scope = "tensor", rescale: bool = False, error_feedback: bool = False) -> Channel:
    """Return the channel of `random_k`: the sent coordinates, rescaled as the client does."""

    def expect(update: Update, known: ChannelFacts) -> Update:
        sent = only(update, known)
        factors = rescaling(update, keep, scope)
        return {name: t * factors[name] for name, t in sent.items()} if rescale else sent

    return Channel(expect, learn=lambda seen: masks(seen, scope, lambda values: _sent(values, kept(keep, values.numel()))))


def prune(ratio: float | None = None, *, threshold: float | None = None, error_feedback: bool = False) -> Channel:
    """Return the channel of `prune`: the sent coordinates."""

    def sent(values: Tensor) -> Tensor:
        return _sent(values, unpruned(ratio or 0, values.numel()))

    return Channel(only, learn=lambda seen: masks(seen, "global", sent))


def gradient_dropout(p: float, *, rescale: bool = False, error_feedback: bool = False) -> Channel:
    """Return the channel of `gradient_dropout`: the sent coordinates, rescaled as the client does."""
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
    """Return the channel of `dgc`: the sent coordinates of the clipped update. The residual of earlier rounds is not simulated.

    With `nesterov` the round's own update is multiplied by 1 + momentum. During a warm-up the attacker may not know the client's
    round number, and takes every nonzero entry as sent.
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
    """Return booleans (n,): magnitude at least the k-th largest one."""
    magnitude = magnitudes(values)
    return magnitude >= kth_largest(magnitude, k) if k else torch.ones_like(values, dtype=torch.bool)


def _sent(values: Tensor, k: int) -> Tensor:
    """Return booleans (n,): not zero, and magnitude at least the k-th largest one."""
    return _at_least_kth(values, k) & (values != 0)
