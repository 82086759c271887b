"""Tests of the order of a client's batches over epochs and rounds, against a simple generator of all batches."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsim.recording import Training
from fedsim.training.batches import Cursor, draw_batches


def order_of(size: int):
    """Return a function that gives a different order of examples for every epoch."""
    return lambda epoch: np.random.default_rng([9, epoch]).permutation(size)


def list_batches_naively(size: int, batch: int, drop_last: bool) -> Iterator[list[int]]:
    """Yield all batches of a client, epoch after epoch."""
    epoch = 0
    while True:
        deck = order_of(size)(epoch).tolist()
        while deck and not (drop_last and len(deck) < batch):
            yield deck[:batch]
            deck = deck[batch:]
        epoch += 1


@settings(deadline=None, max_examples=150)
@given(
    size=st.integers(1, 12),
    batch=st.integers(1, 15),
    length=st.integers(1, 7),
    by_epochs=st.booleans(),
    drop_last=st.booleans(),
    rounds=st.integers(1, 6),
)
def test_rounds_draw_the_batches_of_the_simple_generator(
    size: int, batch: int, length: int, by_epochs: bool, drop_last: bool, rounds: int
) -> None:
    length = min(length, 3) if by_epochs else length
    training = Training(learning_rate=1, batch_size=batch, drop_last=drop_last, **{"epochs" if by_epochs else "steps": length})
    if drop_last and size < batch:
        with pytest.raises(ValueError, match=f"{size} examples do not fill one batch of {batch}"):
            draw_batches(Cursor(), size, training, order_of(size))
        return
    expected, cursor = list_batches_naively(size, batch, drop_last), Cursor()
    an_epoch = size // batch if drop_last else -(-size // batch)
    for _ in range(rounds):
        chosen, cursor = draw_batches(cursor, size, training, order_of(size))
        steps = length * an_epoch if by_epochs else length
        assert [step.tolist() for step in chosen] == [next(expected) for _ in range(steps)]


def test_steps_of_later_rounds_continue_the_epoch_which_ends_with_a_short_batch() -> None:
    training, cursor, seen = Training(learning_rate=1, batch_size=2, steps=1), Cursor(), []
    for _ in range(6):
        chosen, cursor = draw_batches(cursor, 5, training, lambda epoch: np.arange(5) + 10 * epoch)
        seen += [step.tolist() for step in chosen]
    assert seen == [[0, 1], [2, 3], [4], [10, 11], [12, 13], [14]]


def test_a_round_can_end_one_epoch_and_begin_the_next() -> None:
    training = Training(learning_rate=1, batch_size=2, steps=4)
    chosen, cursor = draw_batches(Cursor(), 5, training, lambda epoch: np.arange(5) + 10 * epoch)
    assert [step.tolist() for step in chosen] == [[0, 1], [2, 3], [4], [10, 11]]
    assert cursor == Cursor(epoch=1, position=2)


def test_dropping_leaves_out_other_examples_in_every_epoch() -> None:
    training, cursor = Training(learning_rate=1, batch_size=2, steps=1, drop_last=True), Cursor()
    used: Counter[int] = Counter()
    for _ in range(40):
        chosen, cursor = draw_batches(cursor, 5, training, order_of(5))
        assert [len(step) for step in chosen] == [2]
        used.update(chosen[0].tolist())
    assert set(used) == set(range(5))  # 20 epochs of four out of five


def test_rounds_of_whole_epochs_use_every_example_equally_often() -> None:
    training, cursor = Training(learning_rate=1, batch_size=3, epochs=2), Cursor()
    orders = []
    for _ in range(3):
        chosen, cursor = draw_batches(cursor, 7, training, order_of(7))
        assert [len(step) for step in chosen] == [3, 3, 1, 3, 3, 1]
        flat = np.concatenate(chosen).tolist()
        assert sorted(flat[:7]) == sorted(flat[7:]) == list(range(7))
        orders += [tuple(flat[:7]), tuple(flat[7:])]
        assert cursor.position == 0
    assert len(set(orders)) == 6  # a new order in each epoch


def test_whole_epochs_start_from_the_beginning_of_an_interrupted_epoch() -> None:
    chosen, cursor = draw_batches(Cursor(4, 3), 5, Training(learning_rate=1, batch_size=5, epochs=1), order_of(5))
    assert [step.tolist() for step in chosen] == [order_of(5)(4).tolist()]
    assert cursor == Cursor(5, 0)
