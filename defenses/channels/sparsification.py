"""Channels of sparsifiers: of the simulated update, only the coordinates that the client sent remain.

Coordinates received as nonzero count as sent; for `top_k`, zeros do too if fewer than k values are nonzero. If a sparsifier sends
a known number k of coordinates, and more than k are received as nonzero, because a later defense such as noise changed the zeros,
only those with at least the k-th largest received magnitude count as sent.

Over all rounds of a client, the attacker simulates what the client keeps back (the residual) and its momentum, as if the client
had trained on the examples that the attacker tries. For defenses that send the largest coordinates, the magnitude of an unsent
coordinate is at most the smallest magnitude of a sent coordinate.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from defenses.base import Mask, Scope, Update, choose_masks, compute_magnitudes, find_kth_largest
from defenses.channel import Channel, ChannelFacts, ChannelState, Follow
from defenses.clipping import scale_to
from defenses.dgc import correct_momentum, is_dense
from defenses.sparsification import count_kept, count_unpruned, find_factors, mask_update

THRESHOLD = "threshold/"
"""Prefix of the names of thresholds among the tensors that a channel's `learn` returns."""


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


def learn_thresholds(received: Update, sent: Mask, scope: Scope) -> dict[str, Tensor]:
    """Return for each tensor the smallest magnitude that was sent in it or, with scope "global", in the whole update.

    The result maps `THRESHOLD` + parameter name to a 0-d tensor, which is infinity if nothing was sent.
    received: the received update. sent: which coordinates of `received` were sent.
    """
    each = {
        name: torch.where(sent[name], t.abs(), torch.inf).amin() if t.numel() else t.new_full((), torch.inf)
        for name, t in received.items()
    }
    if scope == "global" and each:
        each = dict.fromkeys(each, torch.stack(list(each.values())).amin())
    return {THRESHOLD + name: least for name, least in each.items()}


def follow_largest(*, error_feedback: bool) -> Follow:
    """Return the attacker's simulation of a round for a defense that sends the largest coordinates (`Channel.follow`).

    error_feedback: whether the client adds what it did not send (the residual) to its next update.
    The expected update has the simulated values (update plus residual) of sent coordinates. For an unsent coordinate, it has the
    amount by which the simulated magnitude exceeds the smallest sent magnitude, with the simulated sign; zero if the simulated
    magnitude is not larger.
    """

    def follow(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        due = _add_residual(update, state)
        expected = {name: _expect_largest(t, known[name], known[THRESHOLD + name]) for name, t in due.items()}
        return expected, _keep_unsent(due, known) if error_feedback else {}

    return follow


def follow_selected(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
    """Simulate a round of error feedback with randomly chosen coordinates; return the expected update and the next state.

    This is a channel's function `follow`. Unsent coordinates reveal nothing here, and are zero in the expected update.
    """
    due = _add_residual(update, state)
    return {name: torch.where(known[name], t, torch.zeros_like(t)) for name, t in due.items()}, _keep_unsent(due, known)


def follow_dgc(
    bound: Callable[[Update], Update], momentum: float, *, masking: bool, nesterov: bool, dense_vectors: bool
) -> Follow:
    """Return the attacker's simulation of a round of `dgc` (`Channel.follow`), with the client's momentum and residual.

    bound: function that clips an update as the client does. The other arguments are those of `dgc`.
    """

    def follow(update: Update, state: ChannelState, known: ChannelFacts) -> tuple[Update, ChannelState]:
        expected: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for name, d in bound(update).items():
            gathered, unsent = (state.get(f"{what}/{name}", torch.zeros_like(d)) for what in ("momentum", "residual"))
            u, step = correct_momentum(gathered, d, momentum, nesterov)
            if is_dense(d, dense_vectors):
                expected[name], after[f"momentum/{name}"] = step, u
                continue
            v, sent, nothing = unsent + step, known[name], torch.zeros_like(d)
            expected[name] = _expect_largest(v, sent, known[THRESHOLD + name])
            after[f"residual/{name}"] = torch.where(sent, nothing, v)
            after[f"momentum/{name}"] = torch.where(sent, nothing, u) if masking else u
        return expected, after

    return follow


def _expect_largest(values: Tensor, sent: Tensor, threshold: Tensor) -> Tensor:
    """Return the simulated value of each sent coordinate; of an unsent one, its signed excess over the threshold, or 0."""
    return torch.where(sent, values, values - values.maximum(-threshold).minimum(threshold))


def _add_residual(update: Update, residual: ChannelState) -> dict[str, Tensor]:
    return {name: t + residual[name] if name in residual else t for name, t in update.items()}


def _keep_unsent(due: Update, sent: ChannelFacts) -> dict[str, Tensor]:
    return {name: torch.where(sent[name], torch.zeros_like(t), t) for name, t in due.items()}
