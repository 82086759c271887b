"""Tests of updates as 32-bit words: accuracy of the mean, clipping, and overflow."""

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsim.recording.masked_vectors import HEADER_WORDS
from fedsim.secagg.protocol.quantisation import MAX_SUM, Quantiser

SHAPES: dict[str, tuple[int, ...]] = {"b": (), "a": (3, 4), "none": (0,)}
Update = dict[str, NDArray[np.floating]]


def draw(seed: int, scale: float = 0.3) -> Update:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, scale, shape).astype(np.float32).reshape(shape) for name, shape in SHAPES.items()}


def test_words_and_mean_are_those_of_a_hand_example() -> None:
    """Clip 2, range 4: a step is 0.5. Weight 3, tensors in order of their names."""
    quantiser = Quantiser(clip=2.0, target_range=4, clients=2, max_weight=3)
    words = quantiser.encode({"b": np.array(-0.5), "a": np.array([1.0, 0.1])}, {"b": (), "a": (2,)}, 3)
    assert words.dtype == np.uint32
    assert words.tolist() == [3, 0, 0, 6, 1, 2**32 - 3]  # 3 * 0.1 / 0.5 = 0.6 is rounded to 1
    total = words + quantiser.encode({"b": np.array(2.0), "a": np.array([-1.0, 9.0])}, {"b": (), "a": (2,)}, 1)
    revealed = quantiser.decode(total, {"b": (), "a": (2,)}, 2)
    assert (revealed.num_examples, revealed.clipped, revealed.clipped_clients) == (4, 1, 1)
    assert revealed.mean["a"].tolist() == [(6 - 2) * 0.5 / 4, (1 + 4) * 0.5 / 4]
    assert revealed.mean["b"] == (-3 + 4) * 0.5 / 4


@pytest.mark.parametrize("target_range", [1, 127, 2**20, MAX_SUM // 50])
def test_the_mean_is_within_half_a_step_of_the_weighted_mean(target_range: int) -> None:
    weights = [1, 10, 4, 2, 7]
    quantiser = Quantiser(clip=1.5, target_range=target_range, clients=5, max_weight=10)
    updates = [draw(seed) for seed in range(5)]
    total = np.zeros(quantiser.count_words(SHAPES), np.uint32)
    for update, weight in zip(updates, weights, strict=True):
        total += quantiser.encode(update, SHAPES, weight)
    revealed = quantiser.decode(total, SHAPES, 5)
    assert (revealed.num_examples, revealed.clipped) == (24, 0)
    for name, shape in SHAPES.items():
        plain = sum(w * u[name].astype(np.float64) for w, u in zip(weights, updates, strict=True)) / 24
        assert revealed.mean[name].shape == shape
        assert np.all(np.abs(revealed.mean[name] - plain) <= 0.5 * 1.5 / target_range + 1e-12)


def test_the_largest_sum_does_not_overflow_and_one_more_is_refused() -> None:
    largest = MAX_SUM // (7 * 30)
    quantiser = Quantiser(clip=1.0, target_range=largest, clients=7, max_weight=30)
    for sign in (1.0, -1.0):
        total = sum((quantiser.encode({"w": np.full(2, sign)}, {"w": (2,)}, 30) for _ in range(7)), np.zeros(5, np.uint32))
        assert quantiser.decode(total, {"w": (2,)}, 7).mean["w"].tolist() == pytest.approx([sign, sign])
    with pytest.raises(ValueError, match=rf"7 clients x a weight of up to 30 x scaled values of up to {largest + 1} add up to"):
        Quantiser(clip=1.0, target_range=largest + 1, clients=7, max_weight=30)


def test_values_outside_the_range_are_clipped_and_counted() -> None:
    quantiser = Quantiser(clip=0.5, target_range=100, clients=3, max_weight=1)
    beyond = {"a": np.array([0.5, -0.5, 0.51, -7.0, 1e30, 0.0])}
    shapes = {"a": (6,)}
    total = quantiser.encode(beyond, shapes, 1) + quantiser.encode({"a": np.zeros(6)}, shapes, 1)
    total += quantiser.encode({"a": np.full(6, 0.6)}, shapes, 1)
    revealed = quantiser.decode(total, shapes, 3)
    assert (revealed.clipped, revealed.clipped_clients) == (3 + 6, 2)
    assert revealed.mean["a"] == pytest.approx(np.array([0.5 + 0.5, 0, 0.5 + 0.5, 0, 0.5 + 0.5, 0.5]) / 3)


def test_a_tensor_that_is_withheld_counts_as_zero() -> None:
    quantiser = Quantiser(clip=1.0, target_range=100, clients=2, max_weight=1)
    words = quantiser.encode({"b": np.array(1.0)}, {"a": (2,), "b": ()}, 1)
    assert words[HEADER_WORDS:].tolist() == [0, 0, 100]


@pytest.mark.parametrize("weight", [0, -1, 11])
def test_a_weight_out_of_range_is_refused(weight: int) -> None:
    with pytest.raises(ValueError, match=r"no examples, or more than secure_aggregation\.max_weight = 10"):
        Quantiser(clip=1.0, target_range=100, clients=2, max_weight=10).encode(draw(0), SHAPES, weight)


def test_a_refused_weight_is_not_in_the_message() -> None:
    """The server gets the message in an error reply, and must not learn the number of examples."""
    with pytest.raises(ValueError, match="max_weight") as error:
        Quantiser(clip=1.0, target_range=100, clients=2, max_weight=10).encode(draw(0), SHAPES, 7351)
    assert "7351" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(value: float) -> None:
    update = {**draw(0), "b": np.array(value)}
    with pytest.raises(ValueError, match="1 values of the update's tensor 'b' are NaN or infinite"):
        Quantiser(clip=1.0, target_range=100, clients=2, max_weight=10).encode(update, SHAPES, 1)


def test_other_shapes_and_names_are_refused() -> None:
    quantiser = Quantiser(clip=1.0, target_range=100, clients=2, max_weight=10)
    for update in ({"a": np.zeros((4, 3))}, {"c": np.zeros(())}):
        with pytest.raises(ValueError, match="the update"):
            quantiser.encode(update, SHAPES, 1)


@pytest.mark.parametrize("header", [(1, 0, 0), (21, 0, 0), (5, 0, 3)])
def test_a_sum_with_an_invalid_header_is_refused(header: tuple[int, int, int]) -> None:
    """A sum with a remaining mask has a random header, which is valid with a probability of one in ten million."""
    quantiser = Quantiser(clip=1.0, target_range=100, clients=2, max_weight=10)
    total = np.array([*header, 1, 2], np.uint32)
    with pytest.raises(ValueError, match="which is impossible"):
        quantiser.decode(total, {"w": (2,)}, 2)
