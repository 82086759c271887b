"""Shamir's secret sharing (Shamir 1979): `threshold` shares determine the secret, fewer reveal nothing."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fedsim.secagg.protocol.keys import Draw

FIELD_ORDER = 2**521 - 1
"""Order of the field. Secrets are far smaller, so that inconsistent shares are detected: they combine to a larger number."""
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, threshold: int, points: Sequence[int], draw: Draw) -> dict[int, bytes]:
    """Return a dict from each point to its share of `secret`.

    A share is the value, at its point, of a random polynomial of degree `threshold - 1` over a prime field, whose value at 0 is
    the secret; it has SHARE_BYTES bytes.

    secret: 32 bytes. threshold: from 1 to the number of points. points: distinct integers of at least 1. draw: returns random
    bytes of a given length. Raises ValueError for other arguments.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold must be from 1 to the {len(points)} shares, got {threshold}")
    if len(set(points)) != len(points) or min(points) < 1:
        raise ValueError(f"points must be distinct and at least 1, got {list(points)}")
    polynomial = [int.from_bytes(secret, "big"), *(_draw_element(draw) for _ in range(threshold - 1))]
    return {point: _evaluate(polynomial, point).to_bytes(SHARE_BYTES, "big") for point in points}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret (32 bytes) from at least `threshold` of its shares, a dict from point to share.

    threshold: as given to `split`. Raises ValueError if the shares are too few, have a wrong length, or have a point below 1.
    Usually, but not always, it also raises ValueError if they are shares of different secrets.
    """
    if len(shares) < threshold:
        raise ValueError(f"only {len(shares)} shares were given, and {threshold} are needed")
    if min(shares) < 1:
        raise ValueError(f"a share has point {min(shares)}, but points are at least 1")
    if misfits := [point for point, share in shares.items() if len(share) != SHARE_BYTES]:
        raise ValueError(f"the share at point {misfits[0]} has {len(shares[misfits[0]])} bytes, but a share has {SHARE_BYTES}")
    points = sorted(shares)
    values = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    secrets = {_interpolate_at_zero(tuple(chosen), values) for chosen in (points[:threshold], points[-threshold:])}
    secret = secrets.pop()
    if secrets or secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError(f"the shares at points {points} belong to different secrets, so at least one of them is wrong")
    return secret.to_bytes(SECRET_BYTES, "big")


def _draw_element(draw: Draw) -> int:
    """Return a uniformly random element of the field, an integer from 0 to FIELD_ORDER - 1."""
    while True:
        drawn = int.from_bytes(draw(SHARE_BYTES), "big") >> (8 * SHARE_BYTES - 521)
        if drawn < FIELD_ORDER:
            return drawn


def _evaluate(polynomial: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % FIELD_ORDER
    return value


def _interpolate_at_zero(points: tuple[int, ...], values: Mapping[int, int]) -> int:
    """Return the value at 0 of the polynomial that has the given values at `points`, in the field of FIELD_ORDER elements."""
    return sum(weight * values[point] for weight, point in zip(_compute_weights(points), points, strict=True)) % FIELD_ORDER


@lru_cache(maxsize=256)
def _compute_weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the Lagrange coefficients at 0, one per point, in the field of FIELD_ORDER elements."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % FIELD_ORDER
                below = below * (other - point) % FIELD_ORDER
        weights.append(above * pow(below, -1, FIELD_ORDER) % FIELD_ORDER)
    return tuple(weights)
