"""Defenses that send some coordinates only; the others arrive as zeros."""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from defenses.base import (
    Defense,
    Mask,
    Scope,
    Update,
    check_scope,
    choose_masks,
    compute_magnitudes,
    compute_share,
    find_kth_largest,
    stateless,
)
from defenses.combinators import add_feedback
from defenses.noise import draw_uniform


def count_kept(keep: float, count: int) -> int:
    """Return how many of `count` coordinates are sent if the share `keep` is sent: keep * count, rounded up."""
    return math.ceil(compute_share(keep, count))


def find_largest(values: Tensor, k: int) -> Tensor:
    """Return booleans (n,) that are true at the k entries of largest magnitude of (n,) values, or at all if k > n.

    Of equal magnitudes, the first are chosen. NaN counts as infinity.
    """
    if not 0 < k < values.numel():
        return torch.full_like(values, k > 0, dtype=torch.bool)
    magnitude = compute_magnitudes(values)
    threshold = find_kth_largest(magnitude, k)
    above, tied = magnitude > threshold, magnitude == threshold
    return above | (tied & (tied.cumsum(0) <= k - above.sum()))


def mask_update(update: Update, mask: Mask, factor: float = 1.0) -> Update:
    """Return `update * factor` where `mask` is true, and +0.0 elsewhere. factor: positive."""
    sent = {name: torch.where(mask[name], t, torch.zeros_like(t)) for name, t in update.items()}
    return sent if factor == 1 else {name: t * factor for name, t in sent.items()}


def top_k(keep: float, *, scope: Scope = "tensor", error_feedback: bool = False) -> Defense:
    """Send the coordinates of largest magnitude.

    Returns this defense, a `Defense`.
    keep:           share in (0, 1] that is sent: ceil(keep * n) of n coordinates; of equal magnitudes, the first are sent.
    scope:          "tensor": `keep` is the share of each tensor; "global": of all tensors together.
    error_feedback: keep what is not sent, and add it to the client's next update before its coordinates are chosen.
    Source: Aji & Heafield 2017; Yue et al. 2022, example 3, whose code sends one coordinate less in every tensor.
    """
    _check_keep("top_k", keep)
    check_scope("top_k", scope)

    def select(update: Update, rng: Generator) -> Mask:
        return choose_masks(update, scope, lambda values: find_largest(values, count_kept(keep, values.numel())))

    return _make_sparsifier(select, error_feedback=error_feedback)


def random_k(keep: float, *, scope: Scope = "tensor", rescale: bool = False, error_feedback: bool = False) -> Defense:
    """Send a random subset of the coordinates.

    Returns this defense, a `Defense`.
    keep:           share in (0, 1] that is sent: ceil(keep * n) of n coordinates, drawn without replacement.
    scope:          "tensor": `keep` is the share of each tensor; "global": of all tensors together.
    rescale:        multiply the sent values by n / ceil(keep * n), so that the expected result is the update.
    error_feedback: keep what is not sent, and add it to the client's next update; not together with `rescale`.
    Source: Stich et al. 2018, section 2; rescaled: Wangni et al. 2018, with equal probabilities.
    """
    _check_keep("random_k", keep)
    check_scope("random_k", scope)
    _check_rescale("random_k", rescale, error_feedback)

    def choose(values: Tensor, rng: Generator) -> Tensor:
        n = values.numel()
        mask = torch.zeros(n, dtype=torch.bool, device=rng.device)
        mask[torch.randperm(n, generator=rng, device=rng.device)[: count_kept(keep, n)]] = True
        return mask.to(values.device)

    def send_random(update: Update, rng: Generator) -> Update:
        mask = choose_masks(update, scope, lambda values: choose(values, rng))
        sent = mask_update(update, mask)
        if not rescale:
            return sent
        factors = find_factors(update, keep, scope)
        return {name: t * factors[name] for name, t in sent.items()}

    return _make_compressor(send_random, error_feedback=error_feedback)


def find_factors(update: Update, keep: float, scope: Scope) -> dict[str, float]:
    """Return the factors n / ceil(keep * n) by which `random_k` with `rescale` multiplies sent values, by parameter name.

    n is the number of coordinates of the tensor or, for scope "global", of all tensors together; for n = 0 the factor is 1.
    """
    total = sum(t.numel() for t in update.values())
    sizes = {name: t.numel() if scope == "tensor" else total for name, t in update.items()}
    return {name: n / count_kept(keep, n) if n else 1.0 for name, n in sizes.items()}


def prune(ratio: float | None = None, *, threshold: float | None = None, error_feedback: bool = False) -> Defense:
    """Send the coordinates whose magnitude exceeds one threshold for all tensors.

    Returns this defense, a `Defense`.
    ratio:          share in [0, 1) of the n coordinates that is left out, CPL's theta: the floor(ratio * n) smallest magnitudes,
                    and all others equal to the largest of these. CPL's code leaves out one more coordinate.
    threshold:      the threshold itself instead of `ratio`, in the update's units; not negative.
    error_feedback: keep what is not sent, and add it to the client's next update before the threshold is applied.
    Source: Wei et al. 2020, table 7.
    """
    if (ratio is None) == (threshold is None):
        raise ValueError(f"prune: give either ratio or threshold, got ratio={ratio} and threshold={threshold}")
    if ratio is not None and not 0 <= ratio < 1:
        raise ValueError(f"prune: ratio must be in [0, 1), got {ratio}")
    if threshold is not None and not 0 <= threshold < math.inf:
        raise ValueError(f"prune: threshold must be finite and not negative, got {threshold}")

    def find_above(values: Tensor) -> Tensor:
        magnitude = compute_magnitudes(values)
        if threshold is not None:
            return magnitude > threshold
        remaining = count_unpruned(ratio or 0, values.numel())
        whole = remaining == values.numel()
        return torch.ones_like(values, dtype=torch.bool) if whole else magnitude > find_kth_largest(magnitude, remaining + 1)

    return _make_sparsifier(lambda update, rng: choose_masks(update, "global", find_above), error_feedback=error_feedback)


def count_unpruned(ratio: float, count: int) -> int:
    """Return the largest number of `count` coordinates that `prune(ratio)` sends: the exact number if all magnitudes differ."""
    return count - math.floor(compute_share(ratio, count))


def gradient_dropout(p: float, *, rescale: bool = False, error_feedback: bool = False) -> Defense:
    """Leave out each coordinate with the same probability, independently of the others.

    Returns this defense, a `Defense`.
    p:              probability in [0, 1) of being left out.
    rescale:        divide the sent values by 1 - p, so that the expected result is the update.
    error_feedback: keep what is not sent, and add it to the client's next update; not together with `rescale`.
    Source: Liu et al. 2024, table 4, which does not rescale.
    """
    if not 0 <= p < 1:
        raise ValueError(f"gradient_dropout: p must be in [0, 1), got {p}")
    _check_rescale("gradient_dropout", rescale, error_feedback)

    def select(update: Update, rng: Generator) -> Mask:
        return {name: draw_uniform(update[name], rng) >= p for name in sorted(update)}

    return _make_sparsifier(select, factor=1 / (1 - p) if rescale else 1, error_feedback=error_feedback)


def _make_sparsifier(select: Callable[[Update, Generator], Mask], *, factor: float = 1, error_feedback: bool) -> Defense:
    return _make_compressor(lambda update, rng: mask_update(update, select(update, rng), factor), error_feedback=error_feedback)


def _make_compressor(compress: Callable[[Update, Generator], Update], *, error_feedback: bool) -> Defense:
    return add_feedback(stateless(compress)) if error_feedback else stateless(compress)


def _check_keep(name: str, keep: float) -> None:
    if not 0 < keep <= 1:
        raise ValueError(f"{name}: keep must be in (0, 1], got {keep}")


def _check_rescale(name: str, rescale: bool, error_feedback: bool) -> None:
    if rescale and error_feedback:
        raise ValueError(
            f"{name}: rescale=True and error_feedback=True both compensate for unsent coordinates; use only one of them"
        )
