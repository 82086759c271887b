"""Checks of declared additive noise: present in every coordinate, of the declared size, and drawn anew for each message."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations

import torch
from scipy.stats import chi2, gamma
from torch import Tensor

from attacker.audit.defense_outputs import Signature, measure_noise_deviations
from attacker.audit.findings import CheckResult, Finding, NotChecked, PassedCheck
from defenses.base import Tensors
from fedsim.recording import Observation

MISSING_RULE, REUSED_RULE = "noise-missing", "noise-reused"
MAX_KURTOSIS = 6.0
"""Fourth moment of noise of unit variance that the thresholds allow for: 6, as for Laplace noise; Gaussian noise has 3."""
MISSING_SIGMAS = 7.0
"""Standard errors by which a mean of squares may fall short of the variance of the noise before it counts as missing."""
FALSE_ALARM_RATE = 1e-6
"""Probability of a false alarm of one tensor's mean square, and of the test of all single coordinates."""
MIN_OBSERVATIONS = 6
"""Smallest number of updates for the test of single coordinates."""
MAX_PAIRED = 24
"""Largest number of updates that are compared in pairs."""
MIN_TAIL = 8
"""Smallest number of singular values beyond the rank of the gradient for which a weight's update is tested for noise there."""
MIN_CORRELATION = 0.1
"""Smallest correlation of the noise of two updates that counts as shared noise."""
MIN_REUSED_SHARE = 0.05
"""Smallest share of pairs of updates with shared noise, among all pairs, that is reported as reused noise if single coordinates
also hardly vary over the updates. If fewer pairs share noise, missing noise is reported."""


def check_noise(observations: Sequence[Observation], signature: Signature | None) -> Iterator[CheckResult]:
    """Yield results: whether the noise that the manifest declares is in the updates, and drawn anew for each.

    The noise is independent of the gradient, so that on average the mean square of a tensor is at least the noise's variance, and
    the mean square of the difference of two updates is at least twice this variance, whatever the gradients. In a linear layer
    the rank of the gradient is at most the number of examples times the number of epochs; what lies beyond this rank is noise.

    There are two possible faults: missing noise, and reused noise (several updates share it).
    No fault: two `PassedCheck`, one per fault.
    One fault: one `Finding` on it.
    Both faults: one `Finding`. It is on reused noise if two conditions hold: the only sign of missing noise is that single
    coordinates hardly vary over the updates, and at least a share `MIN_REUSED_SHARE` of the pairs of updates share noise.
    Otherwise it is on missing noise.
    Nothing to check, since the run declares no defense (`signature` is None) or none that ends with noise (`signature.additive`
    is false): two `NotChecked`.
    """
    if signature is None or not signature.additive:
        reason = "the manifest declares no noise as the last step of the defense"
        yield NotChecked(rule=MISSING_RULE, reason=reason)
        yield NotChecked(rule=REUSED_RULE, reason=reason)
        return
    spec = observations[0].defenses
    sizes = [measure_noise_deviations(spec, observation.update, seed=i) for i, observation in enumerate(observations)]
    scaled = [
        {n: t.double() / s[n] for n, t in observation.update.items() if s[n]}
        for observation, s in zip(observations, sizes, strict=True)
    ]
    tails = [_compute_tails(observation, values) for observation, values in zip(observations, scaled, strict=True)]
    pairs = list(combinations(range(min(len(observations), MAX_PAIRED)), 2))
    alike = [(i, k) for i, k in pairs if _differ_too_little(scaled[i], scaled[k]) or _share_noise(tails[i], tails[k])]
    missing, quiet = _find_missing(scaled) or _find_small_tails(tails), _find_quiet(scaled)
    if alike and not missing and (not quiet or len(alike) >= MIN_REUSED_SHARE * len(pairs)):
        i, k = alike[0]
        yield Finding(
            rule=REUSED_RULE,
            grade="serious",
            title=f"Several messages hold the same noise of {spec}.",
            evidence=f"{len(alike)} of {len(pairs)} pairs of updates, first {observations[i].key} and {observations[k].key}. "
            "Whoever subtracts one update from the other removes the noise.",
            advice="Draw the noise of every client and round from a fresh random state; do not seed it with a constant.",
        )
        return
    if missing or quiet:
        yield Finding(
            rule=MISSING_RULE,
            grade="serious",
            title=f"The noise of {spec} is missing from part of the updates, or smaller than declared.",
            evidence=missing or quiet,
            advice="Add noise of the declared size to every coordinate. Until then, an epsilon computed from the declared noise "
            "does not hold.",
        )
        return
    yield PassedCheck(
        rule=MISSING_RULE,
        evidence=f"every part of {len(observations)} updates varies at least as much as the declared noise does; whether "
        "the noise is large enough, only attacks show",
    )
    yield PassedCheck(
        rule=REUSED_RULE, evidence=f"the noise is drawn anew for every update ({len(pairs)} pairs of updates compared)"
    )


def _find_missing(scaled: Sequence[Tensors]) -> str:
    """Return evidence, as text, of the first tensor that is smaller than the noise alone would be, or has zeros; "" if none.

    scaled: for each update, its tensors divided by the standard deviation of the declared noise. All updates are taken together.
    """
    for name in scaled[0]:
        squares = torch.stack([values[name].square() for values in scaled])
        minimum = max(1 - _compute_margin(squares.numel()), _bound_power(squares.numel(), FALSE_ALARM_RATE) / squares.numel())
        if float(squares.mean()) < minimum:
            size = float(squares.mean().sqrt())
            return f"{name}: root mean square {size:.2g} of the declared standard deviation of the noise"
        if exact := int((squares == 0).sum()):
            return f"{name}: {exact} values are exactly zero, which no value with noise is"
    return ""


def _find_quiet(scaled: Sequence[Tensors]) -> str:
    """Return, as text, how many coordinates hardly vary over the updates; "" if there are none, or if nothing is tested.

    A coordinate hardly varies if the sum of its squares over all updates is smaller than the noise alone would make it.
    scaled: as in `_find_missing`; with fewer than `MIN_OBSERVATIONS` updates nothing is tested.
    """
    if len(scaled) < MIN_OBSERVATIONS:
        return ""
    total = sum(t.numel() for t in scaled[0].values())
    threshold = _bound_power(len(scaled), FALSE_ALARM_RATE / total)
    powers = [torch.stack([values[name].square() for values in scaled]).sum(0) for name in scaled[0]]
    count = sum(int((power < threshold).sum()) for power in powers)
    return f"{count} of {total} coordinates hardly vary over {len(scaled)} updates" if count else ""


def _find_small_tails(tails: Sequence[Tensors]) -> str:
    """Return evidence, as text, of the first weight with less noise than declared beyond its gradient's rank; "" if none.

    tails: for each update, what `_compute_tails` returns. All updates are taken together.
    """
    for name in tails[0]:
        squares = torch.cat([values[name] for values in tails if name in values]).square()
        if float(squares.mean()) < 0.8 * (1 - _compute_margin(len(squares))):
            size = float(squares.mean().sqrt())
            return f"{name}: noise beyond the rank of the gradient has {size:.2g} of the declared standard deviation"
    return ""


def _differ_too_little(first: Tensors, other: Tensors) -> bool:
    """Return whether some tensor of two updates differs less than two independent draws of the noise would.

    first, other: the tensors of the two updates, divided by the standard deviation of the declared noise.
    """
    for name in first.keys() & other.keys():
        squares = (first[name] - other[name]).square() / 2
        if float(squares.mean()) < 1 - _compute_margin(squares.numel()):
            return True
    return False


def _share_noise(first: Tensors, other: Tensors) -> bool:
    """Return whether two updates share noise: whether their residuals in some weight are correlated more than chance explains.

    first, other: what `_compute_tails` returns for the two updates.
    """
    for name in first.keys() & other.keys():
        if len(first[name]) != len(other[name]):
            continue
        both = torch.stack([first[name], other[name]])
        correlation = float(torch.corrcoef(both)[0, 1])
        if correlation > max(MIN_CORRELATION, MISSING_SIGMAS / len(first[name]) ** 0.5):
            return True
    return False


def _bound_power(count: int, probability: float) -> float:
    """Return a number that the sum of squares of `count` noise values of variance 1 falls below with at most this probability.

    The noise is Gaussian or Laplace; the smaller of the numbers for the two distributions is returned. The absolute values of
    Laplace noise add up to a gamma variable, and the sum of squares is at least the square of this gamma variable, divided by
    `count`.
    """
    laplace = gamma.ppf(probability, count) ** 2 / (2 * count)
    return float(min(chi2.ppf(probability, count), laplace))


def _compute_margin(count: int) -> float:
    """Return how far, as a share, a mean of `count` squares may be below a variance measured on `count` values as well."""
    relative: float = (2 * (MAX_KURTOSIS - 1) / count) ** 0.5
    return MISSING_SIGMAS * relative


def _compute_tails(observation: Observation, scaled: Tensors) -> dict[str, Tensor]:
    """Return, for each weight matrix, what is left of its update without the singular components that can hold the gradient.

    These are the r largest components. Here r is the largest rank that the gradient can have: the number of examples times the
    number of epochs.
    scaled: tensors of the update, divided by the standard deviation of the declared noise. Returns a dict from names to flattened
    residuals, (rows * columns,), divided by the standard deviation that they have if only the declared noise is in the update.
    Weights with fewer than r + `MIN_TAIL` singular values are left out. The dict is empty if r is not known: without a number of
    examples, and if clients use Adam, clip gradients or decay weights.
    """
    training, examples = observation.training, observation.num_examples
    if examples is None or not training.is_linear or training.weight_decay:
        return {}
    rank = examples * (training.epochs or 1)
    tails = {}
    for name, values in scaled.items():
        if values.ndim != 2 or min(values.shape) < rank + MIN_TAIL:
            continue
        u, s, v = torch.linalg.svd(values, full_matrices=False)
        tail = (u[:, rank:] * s[rank:]) @ v[rank:]
        tails[name] = tail.flatten() / _measure_tail_power(values.shape, rank) ** 0.5
    return tails


@cache
def _measure_tail_power(shape: torch.Size, rank: int) -> float:
    """Return the share of squared singular values beyond the `rank` largest, measured on one matrix of Gaussian noise."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    power = torch.linalg.svdvals(noise).square()
    return float(power[rank:].sum() / power.sum())
