"""Defenses that add noise to an update."""

import math

import torch
from torch import Generator, Tensor

from defenses.base import Defense, Scope, Update, check_scope, global_norm, stateless, tensor_norm


def draw_normal(tensor: Tensor, rng: Generator) -> Tensor:
    """Draw standard normal values with the shape, dtype and device of `tensor`; the generator may be on another device."""
    return torch.randn(tensor.shape, generator=rng, device=rng.device, dtype=tensor.dtype).to(tensor.device)


def draw_uniform(tensor: Tensor, rng: Generator) -> Tensor:
    """Draw uniform values in [0, 1) with the shape and device of `tensor`, in float32 or higher precision."""
    return torch.rand(tensor.shape, generator=rng, device=rng.device, dtype=_promote_dtype(tensor)).to(tensor.device)


def _draw_laplace(tensor: Tensor, rng: Generator) -> Tensor:
    """Draw Laplace values of scale 1 with the shape, dtype and device of `tensor`, as differences of two exponentials."""
    drawn = torch.empty((2, *tensor.shape), device=rng.device, dtype=_promote_dtype(tensor)).exponential_(generator=rng)
    return (drawn[0] - drawn[1]).to(tensor.device, tensor.dtype)


def _promote_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def gaussian(std: float | None = None, *, snr_db: float | None = None, scope: Scope = "global") -> Defense:
    """Add independent normal noise to every coordinate.

    Returns this defense, a `Defense`.
    std:    standard deviation in the update's units; finite and not negative.
    snr_db: signal-to-noise ratio in decibels, instead of `std`; finite. The standard deviation is
            norm / (sqrt(n) * 10 ** (snr_db / 20)). The noise then depends on the data and gives no differential privacy.
    scope:  what `norm` and its number n of coordinates refer to: "global": the whole update; "tensor": each tensor.
    Source: Dwork & Roth 2014, section 3.5.3; with snr_db Yue et al. 2022, equation 18.
    """
    _check_gaussian(std, snr_db, scope)

    def add_noise(update: Update, rng: Generator) -> Update:
        noise = {name: draw_normal(update[name], rng) for name in sorted(update)}
        if std is not None:
            return {name: t + std * noise[name] for name, t in update.items()}
        assert snr_db is not None
        root_mean_square = _compute_root_mean_square(update, scope)
        factor = 10 ** (-snr_db / 20)
        return {name: t + (factor * root_mean_square[name]).to(t.dtype) * noise[name] for name, t in update.items()}

    return stateless(add_noise)


def _check_gaussian(std: float | None, snr_db: float | None, scope: str) -> None:
    """Raise ValueError for arguments that `gaussian` does not accept.

    Exactly one of `std` (at least 0) and `snr_db` must be given, as a finite number; `scope` must be "tensor" or "global".
    """
    if (std is None) == (snr_db is None):
        raise ValueError(f"gaussian: give either std or snr_db, got std={std} and snr_db={snr_db}")
    if std is not None and not 0 <= std < math.inf:
        raise ValueError(f"gaussian: std must be finite and not negative, got {std}")
    if snr_db is not None and not -math.inf < snr_db < math.inf:
        raise ValueError(f"gaussian: snr_db must be finite, got {snr_db}")
    check_scope("gaussian", scope)


def _compute_root_mean_square(update: Update, scope: Scope) -> dict[str, Tensor]:
    """Return the root mean square of each tensor, or of the whole update, as 0-d tensors by parameter name."""
    if scope == "tensor":
        return {name: tensor_norm(t) / math.sqrt(max(t.numel(), 1)) for name, t in update.items()}
    return dict.fromkeys(update, global_norm(update) / math.sqrt(max(sum(t.numel() for t in update.values()), 1)))


def laplace(scale: float) -> Defense:
    """Add independent Laplace noise to every coordinate.

    Returns this defense, a `Defense`.
    scale: mean magnitude of the noise in the update's units, 1 / sqrt(2) of its standard deviation; finite and not negative.
    Source: Dwork & Roth 2014, definition 3.3.
    """
    if not 0 <= scale < math.inf:
        raise ValueError(f"laplace: scale must be finite and not negative, got {scale}")

    def add_noise(update: Update, rng: Generator) -> Update:
        noise = {name: _draw_laplace(update[name], rng) for name in sorted(update)}
        return {name: t + scale * noise[name] for name, t in update.items()}

    return stateless(add_noise)
