"""Channels of clipping, which clip the simulated update as clients do, and of noise, which leave the simulated update alone."""

from torch import Tensor

from defenses.base import Scope, Update
from defenses.channel import Channel, compute_no_noise
from defenses.clipping import scale_each_to, scale_to


def clip(max_norm: float) -> Channel:
    """Return the attacker's model of `clip`: a simulated update with a Euclidean norm above `max_norm` is scaled down to it."""
    return Channel(lambda update, known: scale_to(update, max_norm))


def clip_each(max_norm: float) -> Channel:
    """Return the attacker's model of `clip_each`: simulated tensors with a Euclidean norm above `max_norm` are scaled to it."""
    return Channel(lambda update, known: scale_each_to(update, max_norm))


def gaussian(std: float | None = None, *, snr_db: float | None = None, scope: Scope = "global") -> Channel:
    """Return the attacker's model of `gaussian`: the simulated update is unchanged, and the power of the noise is known.

    The power is the expected squared norm of the noise, n * std ** 2 for n coordinates. With `snr_db`, it is estimated as
    1 / (1 + r) of the squared norm of the received update, where r = 10 ** (snr_db / 10), since the powers of uncorrelated signal
    and noise add up in expectation. This holds for both values of `scope`.
    """
    if std is not None:
        return _make_noise_channel(std**2)
    assert snr_db is not None
    share = 1 / (1 + 10 ** (snr_db / 10))

    def compute_noise(received: Update) -> Tensor:
        return compute_no_noise(received) + share * sum(t.square().sum() for t in received.values())

    return Channel(lambda update, known: update, noise=compute_noise)


def laplace(scale: float) -> Channel:
    """Return the attacker's model of `laplace`: the simulated update is unchanged, and the power of the noise is known.

    The power is the expected squared norm of the noise, 2 * n * scale ** 2 for n coordinates.
    """
    return _make_noise_channel(2 * scale**2)


def _make_noise_channel(variance: float) -> Channel:
    def compute_noise(received: Update) -> Tensor:
        return compute_no_noise(received) + variance * sum(t.numel() for t in received.values())

    return Channel(lambda update, known: update, noise=compute_noise)
