"""Tests of Shamir's secret sharing: hand examples, secrecy below the threshold, and wrong shares."""

import itertools
import random
import secrets

import pytest

from fedsim.secagg.protocol.keys import draw_bytes
from fedsim.secagg.protocol.shamir import FIELD_ORDER, SHARE_BYTES, combine, split


def number(value: int) -> bytes:
    return value.to_bytes(32, "big")


def test_two_shares_of_a_line_give_its_constant() -> None:
    """f(x) = 5 + 7 x: two shares of threshold 2."""
    shares = {1: (12).to_bytes(SHARE_BYTES, "big"), 3: (26).to_bytes(SHARE_BYTES, "big")}
    assert combine(shares, 2) == number(5)


def test_shares_are_the_values_of_a_polynomial_whose_coefficients_are_drawn() -> None:
    """A coefficient is drawn as 66 bytes, of which the last 7 bits are dropped."""
    drawn = iter([(2 << 7).to_bytes(SHARE_BYTES, "big"), (3 << 7).to_bytes(SHARE_BYTES, "big")])
    shares = split(number(11), 3, [1, 2, 5], lambda count: next(drawn))
    assert {x: int.from_bytes(share, "big") for x, share in shares.items()} == {x: 11 + 2 * x + 3 * x * x for x in (1, 2, 5)}


@pytest.mark.parametrize(("threshold", "points"), [(1, (1, 2)), (2, (1, 2)), (3, (2, 5, 6, 9, 11)), (5, (1, 2, 3, 4, 5))])
def test_any_set_of_enough_shares_gives_the_secret(threshold: int, points: tuple[int, ...]) -> None:
    for secret in (secrets.token_bytes(32), bytes(32), b"\xff" * 32):
        shares = split(secret, threshold, points, draw_bytes)
        for count in range(threshold, len(points) + 1):
            for some in itertools.combinations(points, count):
                assert combine({point: shares[point] for point in some}, threshold) == secret


def test_one_share_less_fits_every_secret() -> None:
    """Any other secret fits exactly one polynomial through the same shares, which is as likely as the true one."""
    threshold, known = 3, (1, 4)
    shares = split(number(1), threshold, [1, 2, 4], draw_bytes)
    values = {point: int.from_bytes(shares[point], "big") for point in known}
    for other in (0, 2, 2**255):
        # the polynomial through (0, other) and the two shares, in Newton's form, has a coefficient for each choice of `other`
        points = {0: other, **values}
        slope = {(a, b): (points[b] - points[a]) * pow(b - a, -1, FIELD_ORDER) for a, b in itertools.combinations(points, 2)}
        second = (slope[1, 4] - slope[0, 1]) * pow(4, -1, FIELD_ORDER) % FIELD_ORDER
        at_2 = (other + slope[0, 1] * 2 + second * 2 * 1) % FIELD_ORDER
        forged = {**{point: shares[point] for point in known}, 2: at_2.to_bytes(SHARE_BYTES, "big")}
        assert combine(forged, threshold) == number(other)


def test_coefficients_are_drawn_over_the_whole_field() -> None:
    """Then each single share is uniform for any secret; the test checks its top byte."""
    draw = random.Random("shares").randbytes
    tops = [int.from_bytes(split(bytes(32), 2, [1, 2], draw)[1], "big") >> 513 for _ in range(4000)]
    assert len(set(tops)) == 256
    expected = len(tops) / 256
    assert sum((tops.count(value) - expected) ** 2 / expected for value in range(256)) < 340  # chi-square, 255 degrees, p 0.0003


@pytest.mark.parametrize("count", [3, 4])
def test_a_share_of_another_polynomial_is_detected(count: int) -> None:
    """Also with no more shares than needed, since the combined number is then no 32-byte secret."""
    one, other = (split(number(7), 3, [1, 2, 3, 4], draw_bytes) for _ in range(2))
    for wrong in range(1, count + 1):
        mixed = {point: (other if point == wrong else one)[point] for point in range(1, count + 1)}
        with pytest.raises(ValueError, match="belong to different secrets"):
            combine(mixed, 3)


def test_invalid_secrets_points_and_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 31"):
        split(bytes(31), 2, [1, 2], draw_bytes)
    for threshold in (0, 3):
        with pytest.raises(ValueError, match=f"from 1 to the 2 shares, got {threshold}"):
            split(bytes(32), threshold, [1, 2], draw_bytes)
    for points in ([0, 1], [2, 2]):
        with pytest.raises(ValueError, match="distinct and at least 1"):
            split(bytes(32), 2, points, draw_bytes)
    shares = split(bytes(32), 3, [1, 2, 3], draw_bytes)
    with pytest.raises(ValueError, match="only 2 shares were given, and 3 are needed"):
        combine({point: shares[point] for point in (1, 2)}, 3)
    with pytest.raises(ValueError, match=r"share at point 2 has .* bytes, but a share has 66"):
        combine({**shares, 2: b"short"}, 3)
