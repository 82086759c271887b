"""Which rounds and clients are meant: how users write it, and what a recorder does about it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from fedsim.recording.writer import is_plain

COUNT_DIGITS = 6
"""A number with more digits is a client's name: Flower's node ids have about nineteen."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is written down. rounds, clients: only these, where given; at_most: so many clients, the first that answer."""

    rounds: frozenset[int] | None = None
    clients: frozenset[str] | None = None
    at_most: int | None = None

    @classmethod
    def parse(cls, rounds: str, clients: str) -> "Wanted":
        """From what users write. Raises ValueError for anything else."""
        chosen = parse_clients(clients)
        if isinstance(chosen, int):
            return cls(rounds=parse_rounds(rounds), at_most=chosen)
        return cls(rounds=parse_rounds(rounds), clients=chosen)


def parse_rounds(text: str) -> frozenset[int] | None:
    """`"1-20"`, `"3"` or `"1-3,7"` as a set of 1-based rounds; None for `"all"`. Raises ValueError for anything else."""
    if text == "all":
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not first.strip().isdigit() or not last.strip().isdigit():
            raise ValueError(f"cannot read rounds {text!r}: write '1-20', '1-3,7' or 'all'")
        numbers = range(int(first), int(last) + 1)
        if not numbers or numbers[0] < 1:
            raise ValueError(f"rounds {part!r} are none: rounds count from 1 upwards")
        chosen.update(numbers)
    return frozenset(chosen)


def parse_clients(text: str) -> int | frozenset[str] | None:
    """`"5"` as a number of clients, `"3f2a,77b0"` as their names, None for `"all"`. Raises ValueError for anything else."""
    if text == "all":
        return None
    if text.isdigit() and len(text) <= COUNT_DIGITS:
        if not int(text):
            raise ValueError("0 clients: give a number of clients, their names, or 'all'")
        return int(text)
    names = frozenset(part.strip() for part in text.split(","))
    if wrong := sorted(name for name in names if not is_plain(name)):
        raise ValueError(f"{wrong[0]!r} is no client's name: give a number of clients, their names, or 'all'")
    return names


def complete_names(given: Iterable[str], known: Collection[str]) -> frozenset[str]:
    """The clients that names, or the beginnings of names, stand for; one that is the beginning of none is left as it is.

    Raises ValueError where a beginning is that of several clients.
    """
    chosen = set()
    for name in given:
        found = sorted(other for other in known if other.startswith(name)) if name and name not in known else []
        if len(found) > 1:
            shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
            raise ValueError(f"client {name!r} is the beginning of {len(found)} names, give more of it: {shown}")
        chosen.add(found[0] if found else name)
    return frozenset(chosen)
