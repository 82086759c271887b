"""Shamir's secret sharing: any `threshold` shares give the secret, and fewer say nothing (Shamir 1979)."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

from fedsim.secagg.protocol.keys import Draw

PRIME = 2**521 - 1
"""Of the field. Secrets are far smaller, so shares that do not belong together are found out: what they give is no secret."""
SECRET_BYTES = 32
SHARE_BYTES = 66


def split(secret: bytes, threshold: int, points: Sequence[int], draw: Draw) -> dict[int, bytes]:
    """Shares of `secret`, by point: values of a random polynomial of degree `threshold - 1` that is the secret at 0.

    secret: 32 bytes. points: distinct, from 1. draw: randomness. Raises ValueError for anything else.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold must be from 1 to the {len(points)} shares, got {threshold}")
    if len(set(points)) != len(points) or min(points) < 1:
        raise ValueError(f"points must be distinct and at least 1, got {list(points)}")
    polynomial = [int.from_bytes(secret, "big"), *(_element(draw) for _ in range(threshold - 1))]
    return {point: _value(polynomial, point).to_bytes(SHARE_BYTES, "big") for point in points}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret from at least `threshold` of its shares, by point.

    Raises ValueError where they are too few, no shares at all, or not all of one secret.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares, and {threshold} are needed")
    if wrong := [point for point, share in shares.items() if len(share) != SHARE_BYTES or point < 1]:
        raise ValueError(f"what came as the share at {wrong[0]} is none")
    points = sorted(shares)
    values = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    found = {_at_zero(tuple(some), values) for some in (points[:threshold], points[-threshold:])}
    secret = found.pop()
    if found or secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares are not all of one secret")
    return secret.to_bytes(SECRET_BYTES, "big")


def _element(draw: Draw) -> int:
    """Uniform over the field."""
    while True:
        drawn = int.from_bytes(draw(SHARE_BYTES), "big") >> (8 * SHARE_BYTES - 521)
        if drawn < PRIME:
            return drawn


def _value(polynomial: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def _at_zero(points: tuple[int, ...], values: Mapping[int, int]) -> int:
    """The value at 0 of the polynomial through `points`."""
    return sum(weight * values[point] for weight, point in zip(_weights(points), points, strict=True)) % PRIME


@lru_cache(maxsize=256)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's coefficients at 0."""
    weights = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
