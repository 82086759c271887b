"""Warm starts that let a search begin at the answer of a closed form."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Generator

from attacker.attacks.cases import Case
from attacker.attacks.closed_form.rgap.recursion import DEFAULT_RGAP
from attacker.attacks.closed_form.routes import ROUTES
from attacker.attacks.closed_form.routing import Routing
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.warm_starts import WarmStart


def add_closed_form_start(attack: GradientMatching, *, routes: tuple[str, ...] = tuple(ROUTES)) -> GradientMatching:
    """Return the search with an additional first start from the best answer of the closed forms `routes`, one start per case.

    Cases without an answer, whose best answer explains nothing of the gradient, or whose gradient is zero or not finite, get no
    such start. An existing `warm_start` of the search is replaced.
    """

    def compute_starts(cases: Sequence[Case], rng: Generator) -> list[WarmStart | None]:
        try:
            routing = Routing(
                cases,
                rng,
                routes=routes,
                rgap=DEFAULT_RGAP,
                stability=False,
                knows_defense=attack.simulation.knows_defense,
                device=attack.device,
            )
        except ValueError:  # a gradient is zero or not finite; the other cases keep their starts
            half = len(cases) // 2
            return [*compute_starts(cases[:half], rng), *compute_starts(cases[half:], rng)] if half else [None]
        routing.answer()
        return [routing.get_warm_start(i) for i in range(len(cases))]

    return replace(attack, warm_start=compute_starts)
