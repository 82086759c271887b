"""Noise: the attacker expects the update itself, and knows how far from zero its residual must end."""

from torch import Tensor

from defenses.base import Update
from defenses.channel import Channel, silent
from defenses.scopes import Scope


def gaussian(std: float | None = None, *, snr_db: float | None = None, scope: Scope = "global") -> Channel:
    """A power of n * std ** 2; for a ratio r of signal to noise, the share 1 / (1 + r) of the power that was received.

    The second is an estimate: signal and noise are uncorrelated, so that their powers add up in the mean.
    """
    if std is not None:
        return _noisy(std**2)
    assert snr_db is not None
    share = 1 / (1 + 10 ** (snr_db / 10))

    def noise(seen: Update) -> Tensor:
        return silent(seen) + share * sum(t.square().sum() for t in seen.values())

    return Channel(lambda update, known: update, noise=noise)


def laplace(scale: float) -> Channel:
    """A power of 2 * n * scale ** 2."""
    return _noisy(2 * scale**2)


def _noisy(variance: float) -> Channel:
    def noise(seen: Update) -> Tensor:
        return silent(seen) + variance * sum(t.numel() for t in seen.values())

    return Channel(lambda update, known: update, noise=noise)
