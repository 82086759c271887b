"""Thread-safe LRU cache of limited weight. A value that several threads request at the same time is made only once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class _CacheEntry(Generic[T]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: Hashable = None
    value: T | None = None
    weight: int = 0


class LRUCache(Generic[T]):
    """Cache of values, each with a key and a version; a key has one version at a time. The least recently used are dropped first.

    limit: sum of weights above which values are dropped, except the newest one. weight: function that returns the weight of a
    value; 1 by default, so that `limit` is a number of values.
    """

    def __init__(self, limit: int, weight: Callable[[T], int] = lambda value: 1) -> None:
        self.limit, self._weight = limit, weight
        self._places: OrderedDict[Hashable, _CacheEntry[T]] = OrderedDict()
        self._total = 0
        self._lock = threading.Lock()

    def peek(self, key: Hashable, version: Hashable) -> T | None:
        """Return the value of a key if it is cached in this version, else None. Does not wait for a value that is being made."""
        with self._lock:
            place = self._places.get(key)
            if place is None or place.version != version:
                return None
            self._places.move_to_end(key)
            return place.value

    def get(self, key: Hashable, version: Hashable, make: Callable[[T | None], T]) -> T:
        """Return the value of a key in this version; call `make` if it is not cached.

        make: returns the new value, given the value of another version of the key, or None if there is none. If another thread is
        making a value of the key, this call waits for it. If `make` raises an error, the old value of the key is dropped, and the
        error is raised.
        """
        with self._lock:
            place = self._places.setdefault(key, _CacheEntry())
            self._places.move_to_end(key)
        with place.lock:
            if place.value is not None and place.version == version:
                return place.value
            try:
                value = make(place.value)
            except BaseException:
                self._drop_old(key, place)
                raise
            with self._lock:
                place.value, place.version = value, version
                self._add_weight(key, place, self._weight(value))
                self._drop_surplus(key)
            return value

    def __len__(self) -> int:
        return len(self._places)

    @property
    def weight(self) -> int:
        """Sum of the weights of all cached values, by the function `weight` of the constructor; by default their number."""
        return self._total

    def _drop_old(self, key: Hashable, place: _CacheEntry[T]) -> None:
        """Drop `place`, whose new value could not be made, with its old value, if it is still the entry of `key`."""
        with self._lock:
            if self._places.get(key) is place:
                self._drop(key)

    def _add_weight(self, key: Hashable, place: _CacheEntry[T], weight: int) -> None:
        """Replace the weight of the old value in `place` by that of the new one, unless `place` was dropped meanwhile."""
        if self._places.get(key) is place:
            self._total += weight - place.weight
            place.weight = weight

    def _drop_surplus(self, kept: Hashable) -> None:
        """Drop the least recently used values until the sum of weights is at most `limit`, or nothing more can be dropped.

        The value of the key `kept` is not dropped, nor are values that are being made.
        """
        surplus, going = self._total - self.limit, list[Hashable]()
        for key, place in self._places.items():
            if surplus <= 0:
                break
            if key != kept and not place.lock.locked():
                surplus -= place.weight
                going.append(key)
        for key in going:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        self._total -= self._places.pop(key).weight
