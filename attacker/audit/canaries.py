"""Guesses about canaries, and the check of the accounted epsilon against them.

A canary is a pair of known examples of which a client used one. The guess which one it was is made from all recorded updates.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attacker.attacks.simulation.client import build_network, convert_to_gradient, find_schedule
from attacker.attacks.simulation.gradients import build_gradient
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from attacker.scoring import Scorer
from defenses.gradients import GradientSpec
from defenses.privacy.empirical import (
    CONFIDENCE_LEVEL,
    bound_epsilon,
    bound_epsilon_of_independent_guesses,
    bound_gaussian_epsilon,
    choose_guesses,
)
from defenses.privacy.sensitivity import find_gradient_noise, find_noise
from fedsim.recording import Observation, Recording
from fedsim.recording.masked_vectors import SUM_CLIENT

CHUNK_EXAMPLES = 64
"""Number of examples whose gradients are computed at once."""
MAX_SEPARATED = 2048
"""Largest number of a client's canaries that are guessed together, by a square matrix with a row for each of them."""
NOISE_STEPS = 100
"""Number of noise levels among which the most likely one is chosen."""
REFUTED_RULE = "epsilon-refuted"
ACCUSATION_LEVEL = 0.999
"""Confidence with which an accounted epsilon must be refuted to become a finding. At 95 %, up to one correct epsilon in 20 would
become a finding."""


@dataclass(frozen=True, kw_only=True)
class CanaryGuesses:
    """The number of canaries, and how many guesses about them are right.

    A canary is a pair of known examples of which a client used one. Its score is the estimate by `separate_canaries`.
    canaries:       number of all canaries.
    guesses, right: number of canaries guessed, those with the largest absolute scores, and how many of these guesses are right.
    right_of_all:   number of right guesses if every canary is guessed.
    overlap:        mean over canaries of the sum of squared correlations of the noise in its score with the noise in the
                    score of each other canary of the same client. If a client has more than `MAX_SEPARATED` canaries, the sum is
                    computed in groups of at most this size, and multiplied by the number of the client's canaries divided by the
                    number of the group's canaries.
    """

    canaries: int
    guesses: int
    right: int
    right_of_all: int
    overlap: float


def guess_canaries(
    scorer: Scorer, recording: Recording, *, epsilon: float | None = None, delta: float = 1e-5
) -> CanaryGuesses | None:
    """Guess which of the two examples of each canary its client used, and count right guesses; None without canaries.

    Canaries of which a client used neither or both are ignored. The records of which examples a client used serve only to find
    the ignored canaries and the right guesses, not to guess.
    The coin of a canary is +1 if the client used the first version and -1 if it used the second. Up to `MAX_SEPARATED` coins of a
    client are estimated together by `separate_canaries`, which accounts for the influence of these canaries on one another. The
    evidence on a canary is an inner product of two gradients, summed over rounds. One is the gradient of the canary's first
    version minus the gradient of its second version. The other is the observed gradient minus what all these canaries contribute
    to it on average, if each version is used with probability 1/2.
    epsilon, delta: declared privacy, by which `choose_guesses` chooses the number of guesses; None if no epsilon is declared.
    """
    scores: list[float] = []
    first_used: list[bool] = []
    overlaps: list[float] = []
    complete = [row for row in recording.read_rows(on_damage=lambda error: None) if row.status == "complete"]
    for client in dict.fromkeys(row.client for row in complete):
        pairs = scorer.truth.read_canaries(client)
        rows = [row for row in complete if row.client == client]
        if not pairs or client == SUM_CLIENT:
            continue
        used = {index for row in rows for step in scorer.truth.read_used(row.round, row.attempt, client).steps for index in step}
        trained = [(a, b) for a, b in pairs if (a in used) != (b in used)]  # the client has used no version of the others yet
        for start in range(0, len(trained), MAX_SEPARATED):
            group = trained[start : start + MAX_SEPARATED]
            of_rounds = [_compare_pairs(scorer, recording.read_observation(row), group) for row in rows]
            inner, products = (sum(each, torch.zeros((), dtype=torch.float64)) for each in zip(*of_rounds, strict=True))
            separated, overlap = separate_canaries(inner, products)
            scores += separated.tolist()
            first_used += [a in used for a, _ in group]
            overlaps += [overlap * len(trained) / len(group)] * len(group)
    if not scores:
        return None
    guesses = choose_guesses(len(scores), epsilon=epsilon, delta=delta)
    surest_first = sorted(range(len(scores)), key=lambda i: -abs(scores[i]))
    right = [(scores[i] > 0) == first_used[i] for i in surest_first]
    return CanaryGuesses(
        canaries=len(scores),
        guesses=guesses,
        right=sum(right[:guesses]),
        right_of_all=sum(right),
        overlap=sum(overlaps) / len(overlaps),
    )


def separate_canaries(inner: Tensor, products: Tensor) -> tuple[Tensor, float]:
    """Return estimates of the coins of canaries, and their overlap as in `CanaryGuesses`.

    A coin is +1 if the first of a canary's two versions was used, -1 if the second. A canary's difference is the gradient of its
    first version minus the gradient of its second version.
    inner: (canaries,) inner products of the differences with the observed gradient. products: (canaries, canaries) inner products
    of the differences with one another. Both are summed over rounds.
    `inner` is modelled as `products @ coins` times a scale plus noise of covariance `products` times another scale; the likeliest
    scales are taken, and then the linear estimate of least mean squared error. The estimates, (canaries,), are divided by the
    standard deviations of their noise, up to a factor that is the same for all canaries. Estimates and overlap are zero if a
    value is not finite, as after a run that diverged, or if both versions of every canary have the same gradient.
    """
    if not bool(inner.isfinite().all() and products.isfinite().all() and products.any()):
        return torch.zeros_like(inner), 0.0
    roots, basis = torch.linalg.eigh(products)
    kept = roots > 1e-9 * roots.max()
    roots, basis = roots[kept], basis[:, kept]
    observed = basis.T @ inner
    share = torch.logspace(-6, 6, NOISE_STEPS, dtype=torch.float64)[:, None] * roots.mean()  # of noise, relative to the coins
    variance = roots * (roots + share)
    scale = (observed.square() / variance).mean(1, keepdim=True)
    best = int((variance.log().sum(1) + len(roots) * scale[:, 0].log()).argmin())
    weights = 1 / (roots + share[best])
    estimate = basis @ (weights * observed)
    noise = (basis * (weights.square() * roots)) @ basis.T
    deviations = noise.diagonal().sqrt().clamp(min=1e-30)
    correlation = (noise / deviations / deviations[:, None]).fill_diagonal_(0)
    return estimate / deviations, float(correlation.square().sum() / len(correlation))


def _compare_pairs(scorer: Scorer, observation: Observation, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return `inner` and `products` of one update of one client, as in `separate_canaries`.

    pairs: for each canary, the data set indices of its first and its second version. What the canaries contribute on average, if
    each version is used with probability 1/2, is subtracted from the observed gradient. If the update has fewer examples than
    there are canaries, this contribution is first multiplied by the number of examples divided by the number of canaries.
    """
    model = build_network(observation)
    simulate = build_gradient(model, observation.data, observation.training.loss, observation.gradient.build())
    weights = {name: observation.weights[name] for name, _ in model.named_parameters()}
    received = convert_to_gradient(
        {name: observation.update[name] for name in weights}, weights, observation.training, find_schedule(observation)[1]
    )
    count = max(1, observation.num_examples or 1)
    x, y = scorer.data.train[[index for pair in pairs for index in pair]]
    each = torch.func.vmap(simulate, in_dims=(None, 0, 0), chunk_size=CHUNK_EXAMPLES)(weights, x[:, None], y[:, None])
    flat = torch.cat([each[name].detach().flatten(1) for name in sorted(each)], dim=1)
    first, second = flat[0::2], flat[1::2]
    difference, middle = first - second, (first + second) / (2 * count)
    target = torch.cat([received[name].flatten() for name in sorted(each)])
    in_batch = min(1.0, count / len(pairs))  # a batch of fewer examples has only some of the canaries
    inner = ((target - in_batch * middle.sum(0)) * difference).sum(1).double()
    return inner, (difference @ difference.T).double()


def check_canaries(recording: Recording, scorer: Scorer | None, metrics: Sequence[Mapping[str, Any]]) -> Iterator[CheckResult]:
    """Yield one result: whether guesses about canaries refute the privacy accountant's epsilon after the last round.

    A canary is a pair of known examples of which a client used one. The result is `NotChecked` without canaries or true examples.
    scorer: reads the true examples; None if they are not given. metrics: rows of metrics.jsonl; the last has this epsilon.
    """
    privacy = metrics[-1].get("privacy", {}) if metrics else {}
    accounted, delta = privacy.get("epsilon"), float(privacy.get("delta", 1e-5))
    declared = None
    if scorer is not None and isinstance(accounted, int | float) and recording.list_rounds() and _has_gaussian_noise(recording):
        declared = float(accounted)
    guesses = None if scorer is None else guess_canaries(scorer, recording, epsilon=declared, delta=delta)
    if guesses is None:
        reason = "no client planted canaries, from which epsilon is bounded from below; plant them by clients.canaries"
        if any(row.client == SUM_CLIENT for row in recording.read_rows(on_damage=lambda error: None)):
            reason = "only secure sums are recorded, and canaries are evaluated on updates of single clients"
        if scorer is None:
            reason = "the clients' true examples, which say which canaries were used, are not given (--truth)"
        yield NotChecked(rule=REFUTED_RULE, reason=reason, kind="needs information")
        return
    gaussian = _has_gaussian_noise(recording)
    epsilon = _bound(guesses, delta, gaussian=gaussian)
    stated = "none, as no noise is accounted" if not isinstance(accounted, int | float) else f"{accounted:.3g}"
    evidence = (
        f"{guesses.right_of_all} of {guesses.canaries} guesses about canaries are right, and {guesses.right} of the "
        f"{guesses.guesses} surest: epsilon is at least {epsilon:.3g} with a confidence of {CONFIDENCE_LEVEL:.0%}. "
        f"The accountant's epsilon: {stated}."
    )
    refuted = _bound(guesses, delta, gaussian=gaussian, confidence=ACCUSATION_LEVEL)
    if isinstance(accounted, int | float) and math.isfinite(accounted) and refuted > accounted:
        yield Finding(
            rule=REFUTED_RULE,
            grade="serious",
            title="The server learns more about single examples than the reported epsilon allows.",
            evidence=evidence,
            advice="Check that every client applies clipping and noise as declared, and that every release is accounted.",
        )
    else:
        yield PassedCheck(rule=REFUTED_RULE, evidence=evidence)


def _bound(counts: CanaryGuesses, delta: float, *, gaussian: bool, confidence: float = CONFIDENCE_LEVEL) -> float:
    """Return a lower bound on epsilon that holds with a probability of at least `confidence`.

    For Gaussian noise (`gaussian`), the bound is the larger of `bound_gaussian_epsilon` and
    `bound_epsilon_of_independent_guesses`; each is computed with the error probability (1 - confidence) / 2, so that both hold
    together. If the noise is not Gaussian, the bound is `bound_epsilon`.
    """
    if not gaussian:
        return bound_epsilon(counts.right, counts.guesses, canaries=counts.canaries, delta=delta, confidence=confidence)
    each = (1 + confidence) / 2
    return max(
        bound_gaussian_epsilon(counts.right, counts.guesses, canaries=counts.canaries, delta=delta, confidence=each),
        bound_epsilon_of_independent_guesses(
            counts.right_of_all, counts.canaries, delta=delta, overlap=counts.overlap, confidence=each
        ),
    )


def _has_gaussian_noise(recording: Recording) -> bool:
    """Return whether the defense or the gradient rule declares Gaussian noise that hides a message or an example."""
    manifest, tensors = recording.manifest, len(recording.read_sent(recording.list_rounds()[0]).weights)
    declared = (
        find_noise(manifest.defense, tensors=tensors),
        find_gradient_noise(GradientSpec.parse(manifest.gradient), tensors=tensors),
    )
    return any(noise.multiplier > 0 and noise.family == "gaussian" for noise in declared)
