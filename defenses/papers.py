"""Defenses under the names of papers: functions that return a specification, such as "prune(ratio=0.5)", for a paper's settings.

Papers state some defenses for gradients. Their functions take the clients' learning rate, and return a specification that applies
the defense to update / (-learning_rate).
"""

import re
from fractions import Fraction

CPL_NOISE = re.compile(r"([GL])-10e-(\d+)")


def cpl_noise(name: str, learning_rate: float) -> str:
    """Add CPL's noise to the gradient: G-10e-2 is Gaussian of standard deviation 0.01, L-10e-2 Laplace of scale 0.01.

    Returns the specification of this defense; the gradient is update / (-learning_rate).
    name:          "G-10e-K" or "L-10e-K" for 10 ** -K (not 10 * 10 ** -K). This number is not a variance, although the paper's
                   text calls it one.
    learning_rate: learning rate of the clients' training; positive.
    Source: Wei et al. 2020, table 8, and its released code.
    """
    found = CPL_NOISE.fullmatch(name)
    if found is None:
        raise ValueError(f"cpl_noise: name must be 'G-10e-K' or 'L-10e-K' with a whole number K, got {name!r}")
    kind = {"G": "gaussian", "L": "laplace"}[found[1]]
    return f"in_gradient_units({kind}(1e-{found[2]}), {_format_number(learning_rate)})"


def cpl_prune(percent: float) -> str:
    """Leave out the smallest theta per cent of all entries, CPL's gradient compression.

    Returns the specification of this defense.
    percent: theta, in [0, 100). One threshold for all tensors, without the residual of deep gradient compression, which the paper
             cites.
    Source: Wei et al. 2020, table 7.
    """
    if not 0 <= percent < 100:
        raise ValueError(f"cpl_prune: percent must be in [0, 100), got {percent}")
    return f"prune(ratio={percent / 100!r})"


def signsgd(learning_rate: float) -> str:
    """Send the update of signSGD: a step of the size of the learning rate against the sign of the gradient.

    Returns the specification of this defense; the gradient is update / (-learning_rate).
    learning_rate: learning rate of the clients' training; positive.
    Source: Bernstein et al. 2018, algorithm 1; Yue et al. 2022, equation 5.
    """
    return f"in_gradient_units(sign(), {_format_number(learning_rate)})"


def ef_signsgd() -> str:
    """Send the update of EF-signSGD: signs times the mean magnitude of each tensor, with error feedback.

    Returns the specification of this defense.
    Source: Karimireddy et al. 2019, algorithm 1.
    """
    return "sign('mean', error_feedback=True)"


def rog_uniform(bits: int = 3) -> str:
    """Round to the nearest of 2 ** bits - 1 values of each tensor, ROG's uniform quantiser.

    Returns the specification of this defense.
    bits: 2 to 24. The paper uses 3; `quant_level` in its code is 2 ** (bits - 1).
    Source: Yue et al. 2022, equation 6.
    """
    return f"uniform({bits!r})"


def rog_qsgd(bits: int = 3) -> str:
    """Round stochastically to 2 ** bits - 1 values up to the largest magnitude of each tensor, ROG's QSGD.

    Returns the specification of this defense. With M the largest magnitude and s = 2 ** (bits - 1) - 1, the values are k * M / s
    for whole k from -s to s.
    bits: 2 to 24; the paper uses 3.
    Source: Yue et al. 2022, equations 6 and 7, with the largest magnitude as the norm, as in the paper's code.
    """
    return f"uniform({bits!r}, stochastic=True)"


def rog_top_k(sparsity: float = 0.95) -> str:
    """Send only the largest entries of each tensor, without error feedback, ROG's top-k.

    Returns the specification of this defense.
    sparsity: share in [0, 1) that is left out; the paper uses 0.95. Exactly ceil(n (1 - sparsity)) of n entries are sent; the
              released code sends one entry less.
    Source: Yue et al. 2022, example 3.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"rog_top_k: sparsity must be in [0, 1), got {sparsity}")
    return f"top_k({float(1 - Fraction(str(float(sparsity))))!r})"


def liu_clip(max_norm: float, learning_rate: float) -> str:
    """Clip the norm of the whole gradient, as Liu et al. do.

    Returns the specification of this defense; the gradient is update / (-learning_rate).
    max_norm:      C, largest norm of the gradient; 2, 4 and 8 in the paper.
    learning_rate: learning rate of the clients' training; positive.
    Source: Liu et al. 2024, table 4.
    """
    return f"in_gradient_units(clip({_format_number(max_norm)}), {_format_number(learning_rate)})"


def liu_noise(std: float, learning_rate: float) -> str:
    """Add Gaussian noise to every entry of the gradient, as Liu et al. do.

    Returns the specification of this defense; the gradient is update / (-learning_rate).
    std:           standard deviation in units of the gradient; 0.001, 0.01 and 0.1 in the paper.
    learning_rate: learning rate of the clients' training; positive.
    Source: Liu et al. 2024, table 4.
    """
    return f"in_gradient_units(gaussian({_format_number(std)}), {_format_number(learning_rate)})"


def _format_number(value: float) -> str:
    """Return a number as text for a specification; infinity becomes 1e999, which the parser accepts and range checks reject."""
    return repr(value).replace("inf", "1e999")
