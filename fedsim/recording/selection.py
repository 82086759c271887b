"""Selections of rounds and clients, parsed from what users write, such as "1-20" or "3f2a,77b0"."""

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain, pairwise

from fedsim.recording.safe_files import shorten
from fedsim.recording.writer import is_plain

COUNT_DIGITS = 6
"""A number with more digits is a client's name: Flower's node ids have about nineteen."""
ROUND_DIGITS = 15
"""Largest number of digits of a round's number."""


class Rounds(Set[int]):
    """A set of 1-based rounds, stored as ranges, so that `1-10000000000` takes no more memory than `1-2`."""

    def __init__(self, ranges: Iterable[range]) -> None:
        merged: list[range] = []
        for numbers in sorted(filter(len, ranges), key=lambda numbers: numbers.start):
            if merged and numbers.start <= merged[-1].stop:
                merged[-1] = range(merged[-1].start, max(merged[-1].stop, numbers.stop))
            else:
                merged.append(numbers)
        self.ranges = tuple(merged)

    @classmethod
    def of(cls, numbers: Iterable[int]) -> "Rounds":
        """Return the set of the given rounds."""
        return numbers if isinstance(numbers, cls) else cls(range(number, number + 1) for number in numbers)

    @classmethod
    def _from_iterable(cls, it: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        return frozenset(it)

    def __contains__(self, number: object) -> bool:
        return any(number in numbers for numbers in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __eq__(self, other: object) -> bool:
        return self.ranges == other.ranges if isinstance(other, Rounds) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.ranges)

    def __sub__(self, other: Iterable[int]) -> "Rounds":
        left = []
        removed = sorted({number for number in other if number in self})
        for numbers in self.ranges:
            borders = [numbers.start - 1, *(number for number in removed if number in numbers), numbers.stop]
            left += [range(first + 1, last) for first, last in pairwise(borders)]
        return Rounds(left)

    def __str__(self) -> str:
        return ",".join(
            str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}" for numbers in self.ranges
        )

    __repr__ = __str__


@dataclass(frozen=True, kw_only=True)
class RecordSelection:
    """The rounds and clients to record; None means all rounds or, for `clients`, all unless `at_most` is given.

    at_most: record only this number of clients, the same in all recorded rounds: the first that send an update in a recorded
             round. Of clients that send their first update in the same round, those with the alphabetically first names are
             taken. None for no limit.
    """

    rounds: Rounds | None = None
    clients: frozenset[str] | None = None
    at_most: int | None = None

    @classmethod
    def parse(cls, rounds: str, clients: str) -> "RecordSelection":
        """Parse the user's texts, such as "1-20" and "3f2a,77b0", by `parse_rounds` and `parse_clients`.

        Raises ValueError if they are invalid.
        """
        chosen = parse_clients(clients)
        if isinstance(chosen, int):
            return cls(rounds=parse_rounds(rounds), at_most=chosen)
        return cls(rounds=parse_rounds(rounds), clients=chosen)


def parse_rounds(text: str) -> Rounds | None:
    """Parse `"1-20"`, `"3"` or `"1-3,7"` into a set of 1-based rounds, both ends included, and `"all"` into None.

    Raises ValueError for other texts, for round 0, for a range whose end is below its start, and for over `ROUND_DIGITS` digits.
    """
    if text == "all":
        return None
    chosen: list[range] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        last = last if dash else first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            raise ValueError(f"cannot read rounds {shorten(text)}: write '1-20', '1-3,7' or 'all'")
        if max(len(first), len(last)) > ROUND_DIGITS:
            raise ValueError(f"rounds {shorten(part)}: the number of a round has at most {ROUND_DIGITS} digits")
        numbers = range(int(first), int(last) + 1)
        if not numbers or numbers[0] < 1:
            raise ValueError(f"rounds {part!r}: rounds are counted from 1, and a range names the lower round first, such as 3-5")
        chosen.append(numbers)
    return Rounds(chosen)


def parse_clients(text: str) -> int | frozenset[str] | None:
    """Parse `"5"` into a number of clients, `"3f2a,77b0"` into a set of names, and `"all"` into None.

    A text of digits only, with or without a sign, is a number if it has at most `COUNT_DIGITS` of them; a longer one is a node
    id, and so a name. Raises ValueError for numbers below 1 and for invalid names.
    """
    if text == "all":
        return None
    digits = text.removeprefix("-")
    if digits.isdigit() and len(digits) <= COUNT_DIGITS:
        if int(text) < 1:
            raise ValueError(f"{text} clients: give a number of clients, their names, or 'all'")
        return int(text)
    names = frozenset(part.strip() for part in text.split(","))
    if wrong := sorted(name for name in names if not is_plain(name)):
        raise ValueError(
            f"{wrong[0]!r} is not a valid client name (1 to 64 letters, digits, - and _, and not 'global' or 'sum'): give a "
            "number of clients, their names, or 'all'"
        )
    return names


def complete_names(given: Iterable[str], known: Collection[str]) -> frozenset[str]:
    """Return the full client names for the texts in `given`, each of which is a name or the beginning of one.

    A text that is itself in `known` stands for that client only, even if longer names begin with it. A text that no name begins
    with stays as it is. known: names of all clients.
    Raises ValueError if a text is no full name and the names of several clients begin with it.
    """
    chosen = set()
    for name in given:
        found = sorted(other for other in known if other.startswith(name)) if name and name not in known else []
        if len(found) > 1:
            shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
            raise ValueError(f"client {name!r} is the beginning of {len(found)} names; give more letters: {shown}")
        chosen.add(found[0] if found else name)
    return frozenset(chosen)
