"""Simulation of residuals and momentum over all rounds of a client, and inference from the coordinates that were not sent.

The attacker simulates what the client keeps back (the residual), as if the client had trained on the examples that the attacker
tries. For defenses that send the largest coordinates, the magnitude of an unsent coordinate is at most the smallest magnitude of
a sent coordinate.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from defenses.base import Mask, Scope, Update
from defenses.channel import ChannelFacts, ChannelState, Follow
from defenses.dgc import correct_momentum, is_dense

THRESHOLD = "threshold/"
"""Prefix of the names of thresholds among the tensors that a channel's `learn` returns."""


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
