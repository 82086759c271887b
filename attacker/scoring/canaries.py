"""Guesses about canaries: which one of two known examples a client used, from all its recorded updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attacker.attacks.simulation.client import build_network, convert_to_gradient, find_schedule
from attacker.attacks.simulation.gradients import build_gradient
from attacker.scoring.score import Scorer
from defenses.privacy.empirical import choose_guesses
from fedsim.recording import Observation, Recording
from fedsim.recording.masked_vectors import SUM_CLIENT

CHUNK_EXAMPLES = 64
"""Number of examples whose gradients are computed at once."""


@dataclass(frozen=True, kw_only=True)
class CanaryGuesses:
    """Numbers of canaries, of those that were guessed (the surest ones), and of right guesses."""

    canaries: int
    guesses: int
    right: int


def guess_canaries(scorer: Scorer, recording: Recording) -> CanaryGuesses | None:
    """Guess which version of each canary was used, and compare with truth. None if no client has canaries or sent an update.

    The score of a pair (a, b) is the logarithm of the likelihood ratio under Gaussian noise, added over all rounds: the inner
    product of the observed mean gradient, less the mean of both versions, with their difference, divided by its length. Server
    and auditor know the pairs; only the comparison at the end reads truth.
    """
    scores: list[float] = []
    first_used: list[bool] = []
    complete = [row for row in recording.read_rows(on_damage=lambda error: None) if row.status == "complete"]
    for client in dict.fromkeys(row.client for row in complete):
        pairs = scorer.read_canaries(client)
        rows = [row for row in complete if row.client == client]
        if not pairs or client == SUM_CLIENT:
            continue
        used = {index for row in rows for step in scorer.read_used(row.round, row.attempt, client).steps for index in step}
        total, length = torch.zeros(len(pairs)), torch.zeros(len(pairs))
        for row in rows:
            score, power = _score_pairs(scorer, recording.read_observation(row), pairs)
            total, length = total + score, length + power
        for (a, b), score in zip(pairs, (total / length.sqrt().clamp(min=1e-30)).tolist(), strict=True):
            if (a in used) != (b in used):  # otherwise the client has not trained on this pair yet
                scores.append(score)
                first_used.append(a in used)
    if not scores:
        return None
    guesses = choose_guesses(len(scores))
    surest = sorted(range(len(scores)), key=lambda i: -abs(scores[i]))[:guesses]
    return CanaryGuesses(canaries=len(scores), guesses=guesses, right=sum((scores[i] > 0) == first_used[i] for i in surest))


def _score_pairs(scorer: Scorer, seen: Observation, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return for each pair the score of one round, and the squared length of the difference of both gradients."""
    model = build_network(seen)
    simulate = build_gradient(model, seen.data, seen.training.loss, seen.gradient.build())
    weights = {name: seen.weights[name] for name, _ in model.named_parameters()}
    received = convert_to_gradient({name: seen.update[name] for name in weights}, weights, seen.training, find_schedule(seen)[1])
    count = max(1, seen.num_examples or 1)
    x, y = scorer.data.train[[index for pair in pairs for index in pair]]
    each = torch.func.vmap(simulate, in_dims=(None, 0, 0), chunk_size=CHUNK_EXAMPLES)(weights, x[:, None], y[:, None])
    flat = torch.cat([each[name].detach().flatten(1) for name in sorted(each)], dim=1)
    first, second = flat[0::2], flat[1::2]
    difference, middle = first - second, (first + second) / (2 * count)
    target = torch.cat([received[name].flatten() for name in sorted(each)])
    return ((target - middle) * difference).sum(1), difference.square().sum(1)
