"""Channels of noise: the expected update is unchanged, and the power of the noise is known."""

from torch import Tensor

from defenses.base import Update
from defenses.channel import Channel, silent
from defenses.scopes import Scope


def gaussian(std: float | None = None, *, snr_db: float | None = None, scope: Scope = "global") -> Channel:
    """Return the channel of Gaussian noise: power n * std ** 2 for n coordinates.

    With a signal-to-noise ratio r, the power is estimated as the share 1 / (1 + r) of the received power, since the powers of
    uncorrelated signal and noise add up in expectation.
    """
    if std is not None:
        return _noisy(std**2)
    assert snr_db is not None
    share = 1 / (1 + 10 ** (snr_db / 10))

    def noise(seen: Update) -> Tensor:
        return silent(seen) + share * sum(t.square().sum() for t in seen.values())

    return Channel(lambda update, known: update, noise=noise)


def laplace(scale: float) -> Channel:
    """Return the channel of Laplace noise: power 2 * n * scale ** 2 for n coordinates."""
    return _noisy(2 * scale**2)


def _noisy(variance: float) -> Channel:
    def noise(seen: Update) -> Tensor:
        return silent(seen) + variance * sum(t.numel() for t in seen.values())

    return Channel(lambda update, known: update, noise=noise)
