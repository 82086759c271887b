"""What attacks that put rounds of one client together made of them, which they left out, and what they say of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacker.reconstruction import Reconstruction

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Linked:
    """One case of several rounds.

    left_out: rounds that are no part of it, each with its reason. notes: what the attack says of the rounds.
    examples: how many it made, several: those of them said to be in several rounds; None and 0 where no answer can be read.
    """

    case: str
    client: str
    rounds: tuple[int, ...]
    left_out: tuple[tuple[int, str], ...]
    notes: tuple[str, ...] = ()
    examples: int | None = None
    several: int = 0


def linked(folder: Path, told: Mapping[str, Any]) -> tuple[Linked, ...]:
    """The cases of several rounds of an attack, in the order of its attack.json (`told`); folder: of its reconstructions."""
    return tuple(_linked(folder, case) for case in told["cases"] if "rounds" in case)


def _linked(folder: Path, case: Record) -> Linked:
    facts: Record = {
        "case": str(case["key"]),
        "client": str(case["client"]),
        "rounds": tuple(int(round) for round, _ in case["rounds"]),
        "left_out": tuple((int(round), str(reason)) for round, reason in case.get("left_out", ())),
    }
    try:
        found = Reconstruction.read(folder / f"{case['key']}.safetensors")
    except ValueError:
        return Linked(**facts)
    several = sum(len(rounds) > 1 for rounds in rounds_of(found).values())
    return Linked(**facts, notes=found.notes, examples=len(found.x), several=several)


def rounds_of(found: Reconstruction) -> dict[int, tuple[int, ...]]:
    """The rounds that each example is said to have been in, ascending, by its number."""
    places = Counter((slot.example, slot.round) for slot in found.slots)
    examples = sorted({example for example, _ in places})
    return {example: tuple(sorted(round for one, round in places if one == example)) for example in examples}
