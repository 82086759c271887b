"""Tests of the LRU cache of the service: it is bounded, and computes a value once for concurrent calls."""

import random
import threading
from contextlib import suppress

import pytest

from attacker.service.index.cache import LRUCache


def test_shelf_is_bounded_and_keeps_the_last_used() -> None:
    shelf: LRUCache[bytes] = LRUCache(100, len)
    for number in range(20):
        shelf.get(number, 0, lambda before: b"x" * 30)
        shelf.get(0, 0, lambda before: b"y" * 30)
    assert shelf.weight <= 100
    assert shelf.peek(0, 0) == b"x" * 30
    assert shelf.peek(1, 0) is None
    assert shelf.peek(0, 1) is None


def test_weight_of_a_shelf_is_the_sum_of_its_values() -> None:
    draw, shelf = random.Random(0), LRUCache[bytes](100, len)

    def refuse(before: bytes | None) -> bytes:
        raise ValueError

    for number in range(500):
        key, version = draw.randrange(12), draw.randrange(3)
        if draw.random() < 0.2:
            with suppress(ValueError):
                shelf.get(key, number, refuse)
        else:
            shelf.get(key, version, lambda before: b"x" * draw.randrange(60))
        kept = [one for key in range(12) for version in range(3) if (one := shelf.peek(key, version)) is not None]
        assert shelf.weight == sum(map(len, kept)) <= 100


def test_shelf_stores_nothing_for_a_failed_call() -> None:
    shelf: LRUCache[int] = LRUCache(10)

    def fail(before: int | None) -> int:
        raise ValueError("no")

    for number in range(100):
        with pytest.raises(ValueError, match="no"):
            shelf.get(number, 0, fail)
    assert len(shelf) == 0


def test_shelf_computes_a_value_once_for_concurrent_calls() -> None:
    shelf: LRUCache[int] = LRUCache(10)
    made, begun, go = [], threading.Event(), threading.Event()

    def make(before: int | None) -> int:
        made.append(1)
        begun.set()
        go.wait(5)
        return 7

    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(shelf.get("a", 0, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait(5)
    go.set()
    for thread in threads:
        thread.join(5)
    assert (found, len(made)) == ([7] * 8, 1)
