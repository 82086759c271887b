"""Defenses that round each coordinate of an update to one of a limited number of values per tensor.

The tensors still hold floats afterwards. A codec packs them into fewer bits for sending, see `fedsim.recording.packing`.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from defenses.base import Defense, Update, stateless
from defenses.combinators import add_feedback
from defenses.noise import draw_uniform

Rounding = Callable[[Tensor], Tensor]
"""Maps real positions in [0, number of steps] to whole positions."""
SignScale = Literal["none", "mean"]
Norm = Literal["l2", "linf"]

MAX_BITS = 24
"""Largest number of bits: a float32 significand has 24."""
MAX_LEVELS = 2 ** (MAX_BITS - 1) - 1


def sign(scale: SignScale = "none", *, error_feedback: bool = False) -> Defense:
    """Send the sign of every coordinate; a zero counts as positive.

    Returns this defense, a `Defense`.
    scale:          "none": +1 and -1; "mean": multiplied by the tensor's mean magnitude.
    error_feedback: add the compression error to the next update; with scale="mean" this is EF-signSGD.
    Source: Bernstein et al. 2018, algorithm 1; EF-signSGD Karimireddy et al. 2019, algorithm 1.
    """
    if scale not in get_args(SignScale):
        raise ValueError(f"sign: scale must be 'none' or 'mean', got {scale!r}")

    def take_signs(update: Update, rng: Generator) -> Update:
        return {name: _take_sign(t, scale) for name, t in update.items()}

    return add_feedback(stateless(take_signs)) if error_feedback else stateless(take_signs)


def _take_sign(values: Tensor, scale: SignScale) -> Tensor:
    one = torch.ones_like(values)
    size = values.abs().mean() if scale == "mean" else one
    return torch.where(values >= 0, one, -one) * size


def qsgd(levels: int, *, norm: Norm = "l2", kappa: float = 1.0) -> Defense:
    """Round every coordinate stochastically to one of 2 * levels + 1 values of each tensor.

    Returns this defense, a `Defense`.
    levels: s, 1 to 8388607. The values are k * L / s for whole k from -s to s. levels=3 means 7 values: 3 bits.
    norm:   norm of each tensor that determines L: "l2" or "linf" (the largest magnitude).
    kappa:  L as a share of that norm, in (0, 1]; larger magnitudes are cut off. With 1 the rounding is unbiased.
    Source: Alistarh et al. 2017, section 3.1, with norm="l2"; Yue et al. 2022, equations 6 and 7, whose code has norm="linf".
    """
    if not (isinstance(levels, int) and 1 <= levels <= MAX_LEVELS):
        raise ValueError(f"qsgd: levels must be a whole number from 1 to {MAX_LEVELS}, got {levels}")
    if norm not in get_args(Norm):
        raise ValueError(f"qsgd: norm must be 'l2' or 'linf', got {norm!r}")
    if not 0 < kappa <= 1:
        raise ValueError(f"qsgd: kappa must be in (0, 1], got {kappa}")
    return stateless(lambda update, rng: _round_at_random(update, levels, norm, kappa, rng))


def uniform(bits: int, *, stochastic: bool = False) -> Defense:
    """Round every coordinate to the nearest of 2 ** bits - 1 equally spaced values of each tensor.

    Returns this defense, a `Defense`.
    bits:       2 to 24. The values are k * M / s with the tensor's largest magnitude M, s = 2 ** (bits - 1) - 1 and whole k
                from -s to s: one value less than the bits could hold, so that zero is included.
    stochastic: round up or down at random without bias; equal to qsgd(s, norm="linf").
    Source: Yue et al. 2022, equation 6, uniform quantiser; ties round to the even k, as in the paper's code.
    """
    if not (isinstance(bits, int) and 2 <= bits <= MAX_BITS):
        raise ValueError(f"uniform: bits must be a whole number from 2 to {MAX_BITS}, got {bits}")
    levels = count_steps(bits)
    if stochastic:
        return stateless(lambda update, rng: _round_at_random(update, levels, "linf", 1.0, rng))

    def round_to_nearest(update: Update, rng: Generator) -> Update:
        return {name: _quantise(t, levels, compute_size(t, "linf"), torch.round) for name, t in update.items()}

    return stateless(round_to_nearest)


def count_steps(bits: int) -> int:
    """Return 2 ** (bits - 1) - 1, the number of positive values if at most 2 ** bits values are symmetric and include zero."""
    return int(2 ** (bits - 1) - 1)


def compute_size(values: Tensor, norm: Norm) -> Tensor:
    """Return the norm of one tensor as a 0-d tensor in float32 or higher precision; zero for an empty tensor.

    norm: "l2" for the Euclidean norm, "linf" for the largest magnitude.
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if values.numel() == 0:
        return values.new_zeros(())
    size: Tensor = torch.linalg.vector_norm(values) if norm == "l2" else values.abs().amax()
    return size


def _round_at_random(update: Update, levels: int, norm: Norm, kappa: float, rng: Generator) -> Update:
    drawn = {name: draw_uniform(update[name], rng) for name in sorted(update)}

    def quantise(name: str, values: Tensor) -> Tensor:
        def round_up_or_down(positions: Tensor) -> Tensor:
            below = positions.floor()
            return below + (drawn[name] < positions - below)

        return _quantise(values, levels, kappa * compute_size(values, norm), round_up_or_down)

    return {name: quantise(name, t) for name, t in update.items()}


def _quantise(values: Tensor, levels: int, largest: Tensor, rounded: Rounding) -> Tensor:
    """Round values to whole multiples of `largest` / `levels`, at most 2 * levels + 1 distinct ones; zero becomes +0.0.

    largest: 0-d; values of larger magnitude are cut off there. rounded: rounds magnitudes, which are given in units of
    `largest` / `levels`, to whole numbers.
    """
    safe = torch.where(largest > 0, largest, 1)
    positions = (values.abs().to(largest.dtype) / safe).clamp(max=1) * levels
    whole = rounded(positions) * values.sign().to(largest.dtype)
    return (whole / levels * largest).to(values.dtype) + 0.0
