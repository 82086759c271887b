"""Attacks by closed forms: each an alias that says which routes are taken, and cites its source."""

from collections.abc import Callable
from typing import Annotated

from attacker.attacks.arguments import OneOf
from attacker.attacks.base import Need
from attacker.attacks.closed_form.hybrid import Hybrid, judge
from attacker.attacks.closed_form.plausibility import CRITERIA
from attacker.attacks.closed_form.rgap.walk import OURS, PAPER
from attacker.attacks.closed_form.router import ClosedForm
from attacker.attacks.closed_form.routes import ROUTES
from attacker.attacks.labels.rules import inferred
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.multi_round.agic import agic_of_one_round
from attacker.attacks.papers.matching import cpl, dlg, inverting_gradients

SINGLE = frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.SINGLE_EXAMPLE})
FALLBACKS: dict[str, Callable[..., GradientMatching]] = {
    "agic": agic_of_one_round,
    "cpl": cpl,
    "dlg": dlg,
    "inverting_gradients": inverting_gradients,
}
"""What searches on where no closed form is exact."""
SMOOTH = 3e-5
"""Total variation of a search that has no prior of its own: it finds batches, and a single image comes out as without."""


def exact(
    *,
    route: Annotated[str, OneOf(("auto", *ROUTES, "optimisation"))] = "auto",
    fallback: Annotated[str, OneOf((*FALLBACKS, "none"))] = "cpl",
    steps: int = 300,
    restarts: int = 1,
    knows_defense: bool = True,
) -> ClosedForm:
    """Closed forms before optimisation: linear, layers, peeled, features, then a search from the best; each answer is checked.

    An answer counts as exact where its own gradient is within a thousandth of the observed one. What no route answers exactly
    goes to the search `fallback`: cpl (of images with a prior), dlg, inverting_gradients, agic (of one round), or none.
    route: auto, or only one of them, or optimisation.
    """
    known = ["auto", *ROUTES, "optimisation"]
    if route not in known:
        raise ValueError(f"unknown route {route!r}. Known: {', '.join(known)}")
    if fallback != "none" and fallback not in FALLBACKS:
        raise ValueError(f"unknown fallback {fallback!r}. Known: {', '.join([*FALLBACKS, 'none'])}")
    if route == "optimisation" and fallback == "none":
        raise ValueError("route 'optimisation' needs a fallback that searches, and it is 'none'")
    routes = tuple(ROUTES) if route == "auto" else () if route == "optimisation" else (route,)
    search = None
    if fallback != "none" and route in ("auto", "optimisation"):
        search = FALLBACKS[fallback](steps=steps, restarts=restarts, knows_defense=knows_defense)
        search = search.changed(tv=SMOOTH) if fallback == "cpl" else search
    return ClosedForm(name="exact", routes=routes, fallback=search, knows_defense=knows_defense)


def rgap(*, paper_mode: bool = False, knows_defense: bool = True) -> ClosedForm:
    """R-GAP: one example, layer by layer from the last to the first, by linear systems (Zhu & Blaschko 2021, algorithm 1).

    paper_mode: equations as long as they are and float32 between layers, as in the authors' code; ours are scaled to equal
    length, in float64.
    """
    return ClosedForm(
        name="rgap",
        routes=("layers",),
        walk=PAPER if paper_mode else OURS,
        stability=False,
        knows_defense=knows_defense,
        needs=SINGLE,
    )


def hgap(
    *,
    criterion: Annotated[str, OneOf((*CRITERIA, "gradient"))] = "roughness",
    paper_mode: bool = False,
    steps: int = 300,
    restarts: int = 1,
    knows_defense: bool = True,
) -> Hybrid:
    """H-GAP: R-GAP and DLG, and of both the answer nearer to its own 3x3 mean filter (Zhu & Blaschko 2021, section 5).

    criterion: roughness (the paper's), total_variation, outside (of the range of data), or gradient (the distance of gradients).
    """
    judge(criterion)
    return Hybrid(
        name="hgap",
        closed=rgap(paper_mode=paper_mode, knows_defense=knows_defense),
        search=dlg(steps=steps, restarts=restarts, knows_defense=knows_defense).changed(rule=inferred),
        criterion=criterion,
        knows_defense=knows_defense,
        needs=SINGLE | ({Need.IMAGE_CRITERION} if criterion in ("roughness", "total_variation") else set()),
    )
