"""The attacks with which each setting of a defense is measured, and the settings of these attacks."""

from collections.abc import Mapping
from typing import Any

from support.attacked import PUBLISHED_SEARCH
from support.defenses.grid import Entry

from attacker.attacks import AttackSpec

SINGLE_EXAMPLE_ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CPL": ("cpl", {"optimiser": "wolfe", "steps": 100}),
    "IG": ("inverting_gradients", {"steps": 300, **PUBLISHED_SEARCH, "signed": False, "tv": 1e-3}),
    "exact": ("exact", {"fallback": "none"}),
}
"""Dict from name in the table to attack, for updates of one step on one example."""
BATCH_ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CPL": ("cpl", {"optimiser": "wolfe", "steps": 200, "tv": 3e-5}),
    "IG": ("inverting_gradients", {"steps": 400, **PUBLISHED_SEARCH, "signed": False, "tv": 1e-3}),
    "exact": ("exact", {"fallback": "none"}),
}
"""Dict from name in the table to attack, for batches of more than one example."""
SUM_ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "CPL": ("cpl", {"optimiser": "wolfe", "steps": 300, "restarts": 2, "tv": 3e-5}),
    "IG": ("inverting_gradients", {"steps": 400, **PUBLISHED_SEARCH, "signed": False, "tv": 1e-3}),
    "CPL tuned": (
        "cpl",
        {"optimiser": "wolfe", "decoder": "smooth", "init": "smooth", "relative": True, "tv": 1e-6, "steps": 50, "restarts": 3},
    ),
    "exact": ("exact", {"fallback": "none"}),
}
"""Dict from name in the table to attack, for secure sums of several clients."""
DEFENSE_AWARE_ATTACKS = ("CPL", "IG")
"""Attacks that can model the defense or ignore it; closed forms use the gradient as received."""


def list_attacks(entry: Entry | None, *, batch: int, cohort: int | None, quick: bool) -> dict[str, AttackSpec]:
    """Return the attacks with which one federation is measured, as a dict from the name in the table to the attack.

    entry: its defense; None without one. batch: number of examples per client step. cohort: number of clients drawn in each
    round; None for all. quick: whether to use three iterations only.

    With a defense and without `cohort`, CPL and Inverting Gradients are run twice: ignoring the defense and knowing it. `cohort`
    is for secure aggregation: with an entry, sums over the drawn clients are attacked; with `cohort` but without an entry, the
    updates of the drawn clients are sent one by one, and only closed forms are run.
    """
    if entry is None and cohort:
        return {"exact": AttackSpec(name="exact", arguments=SINGLE_EXAMPLE_ATTACKS["exact"][1])}
    attacks = {}
    for name, (attack, arguments) in (SUM_ATTACKS if cohort else BATCH_ATTACKS if batch > 1 else SINGLE_EXAMPLE_ATTACKS).items():
        arguments = {**arguments, "steps": 3} if quick and "steps" in arguments else arguments
        if entry is None or cohort or name not in DEFENSE_AWARE_ATTACKS:
            attacks[name] = AttackSpec(name=attack, arguments=arguments)
            continue
        for knows in (False, True):
            label = f"{name} {'knowing' if knows else 'ignoring'}"
            attacks[label] = AttackSpec(name=attack, arguments={**arguments, "knows_defense": knows})
    return attacks


def describe_attacks(attacks: Mapping[str, AttackSpec]) -> dict[str, str]:
    """Return a dict from the name of each attack in the table to a text with its registered name and arguments."""
    return {name: str(spec) for name, spec in attacks.items()}
