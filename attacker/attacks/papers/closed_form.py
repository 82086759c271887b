"""Functions that build attacks with closed forms, which solve equations; some of these attacks also search."""

from collections.abc import Callable
from typing import Annotated

from attacker.attacks.arguments import OneOf
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.attacks.closed_form.cocktail.attack import CocktailParty
from attacker.attacks.closed_form.hybrid import CRITERIA, Hybrid, get_criterion
from attacker.attacks.closed_form.imprint import ImprintReadout
from attacker.attacks.closed_form.rgap.recursion import DEFAULT_RGAP, PAPER_RGAP
from attacker.attacks.closed_form.routes import ROUTES
from attacker.attacks.labels.rules import infer_labels
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.needs import Need
from attacker.attacks.papers.agic import agic_of_one_round
from attacker.attacks.papers.matching import cpl, dlg, inverting_gradients

SINGLE_EXAMPLE_NEEDS = frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.SINGLE_EXAMPLE})
FALLBACKS: dict[str, Callable[..., GradientMatching]] = {
    "agic": agic_of_one_round,
    "cpl": cpl,
    "dlg": dlg,
    "inverting_gradients": inverting_gradients,
}
"""The searches that can be used if no closed form is exact."""
FALLBACK_TV = 3e-5
"""Weight of the total variation for the fallback `cpl`, which has no prior itself. This term helps to find batches, and hardly
changes single images."""


def exact(
    *,
    route: Annotated[str, OneOf(("auto", *ROUTES, "optimisation"))] = "auto",
    fallback: Annotated[str, OneOf((*FALLBACKS, "none"))] = "cpl",
    steps: int = 300,
    restarts: int = 1,
    knows_defense: bool = True,
) -> ClosedForm:
    """Try closed forms, check each answer by its gradient, and if none is exact, search from the best answer.

    An answer is exact if its gradient differs from the observed one by at most a thousandth of the observed one's norm.
    route: auto (all closed forms, then the search), optimisation (the search alone), or one closed form without a search: linear
    (the input of a first linear layer), layers (R-GAP, layer by layer), peeled (equations of several layers at once), features
    (the inputs of the last layer), or layer_input (the input of a hidden linear layer).
    fallback: the search for cases without an exact answer: cpl (with total variation for images, and local_steps=auto), dlg,
    inverting_gradients, agic (its search for a single round), or none. Without a search, the best answer is returned even if it
    is not exact. Some closed forms mark an answer that is not exact as final; it is returned without a search, too.
    steps: maximum number of iterations of one start of the fallback. restarts: maximum number of starts of the fallback.
    knows_defense: whether the search, and the check of answers, model the clients' defense. Closed forms always use the gradient
    as received.
    """
    known = ["auto", *ROUTES, "optimisation"]
    if route not in known:
        raise ValueError(f"unknown route {route!r}. Known: {', '.join(known)}")
    if fallback != "none" and fallback not in FALLBACKS:
        raise ValueError(f"unknown fallback {fallback!r}. Known: {', '.join([*FALLBACKS, 'none'])}")
    if route == "optimisation" and fallback == "none":
        raise ValueError(f"route 'optimisation' needs a fallback, got 'none'; choose one of {', '.join(FALLBACKS)}")
    routes = tuple(ROUTES) if route == "auto" else () if route == "optimisation" else (route,)
    search = None
    if fallback != "none" and route in ("auto", "optimisation"):
        search = FALLBACKS[fallback](steps=steps, restarts=restarts, knows_defense=knows_defense)
        search = search.copy_with(tv=FALLBACK_TV, local_steps="auto") if fallback == "cpl" else search
    return ClosedForm(name="exact", routes=routes, fallback=search, knows_defense=knows_defense)


def rgap(*, paper_mode: bool = False, knows_defense: bool = True) -> ClosedForm:
    """Solve for one example layer by layer, from the last to the first (R-GAP, Zhu & Blaschko 2021, algorithm 1).

    paper_mode: settings of the authors' code: unscaled equations, and float32 between layers. By default, equations are weighted
    by their expected errors, computed in float64, and wrong signs of values near zero are corrected.
    knows_defense: whether the check of the answer's gradient models the clients' defense; the equations use the gradient as
    received.
    """
    return ClosedForm(
        name="rgap",
        routes=("layers",),
        rgap=PAPER_RGAP if paper_mode else DEFAULT_RGAP,
        stability=False,
        knows_defense=knows_defense,
        needs=SINGLE_EXAMPLE_NEEDS,
    )


def hgap(
    *,
    criterion: Annotated[str, OneOf((*CRITERIA, "gradient"))] = "roughness",
    paper_mode: bool = False,
    steps: int = 300,
    restarts: int = 1,
    knows_defense: bool = True,
) -> Hybrid:
    """Run R-GAP and DLG, and keep the answer that a criterion such as smoothness prefers (H-GAP, Zhu & Blaschko 2021, section 5).

    criterion: value that is smaller for the better answer: roughness (the paper's: mean squared difference of the answer and its
    own 3x3 mean filter), total_variation, outside (mean squared distance of the values to the range of the data), or gradient
    (relative distance of the answer's gradient to the observed one).
    paper_mode: as in `rgap`. steps, restarts: of DLG, as in `dlg`. Unlike in `dlg`, the label is inferred before the search.
    knows_defense: whether DLG, and comparisons of an answer's gradient with the observed one, model the clients' defense.
    """
    get_criterion(criterion)
    return Hybrid(
        name="hgap",
        closed=rgap(paper_mode=paper_mode, knows_defense=knows_defense),
        search=dlg(steps=steps, restarts=restarts, knows_defense=knows_defense).copy_with(rule=infer_labels),
        criterion=criterion,
        knows_defense=knows_defense,
        needs=SINGLE_EXAMPLE_NEEDS | ({Need.IMAGE_CRITERION} if criterion in ("roughness", "total_variation") else set()),
    )


def robbing_the_fed() -> ImprintReadout:
    """Read single examples of a batch off the imprint layer of a malicious server (Fowl et al. 2022, "Robbing the Fed").

    An imprint layer is a linear layer whose neurons compare one quantity of the input with different thresholds, so that
    differences of their gradients can hold single examples. The attack needs a model with such a layer, for example
    `model = { name = "imprint", base = "lenet_cpl", bins = 1024 }`.
    """
    return ImprintReadout()


def cocktail_party(
    *,
    criterion: Annotated[str, OneOf(("likelihood", "published"))] = "likelihood",
    steps: int = 25_000,
    restarts: int = 1,
    refine: bool = True,
    inversion_steps: int = 400,
) -> CocktailParty:
    """Separate a batch behind a linear layer by independent component analysis ("Cocktail Party", Kariyappa et al. 2023).

    If the linear layer does not receive the images directly, its inputs (features) are separated instead, and then a search finds
    images with these features.
    criterion: objective of the separation: likelihood (of sparse differences between pixels, or of sparse features), or
    published, the paper's loss, which is refused for features. steps: iterations with criterion=published; likelihood ignores it.
    restarts: number of random starts for either criterion; the one with the lowest loss is kept.
    refine: where possible, solve for exact examples by the zeros that ReLU causes in the gradient, starting from the separated
    ones.
    inversion_steps: iterations of the search for images with the separated features.
    """
    if criterion not in ("likelihood", "published"):
        raise ValueError(f"unknown criterion {criterion!r}. Known: likelihood, published")
    return CocktailParty(criterion=criterion, steps=steps, restarts=restarts, refine=refine, inversion_steps=inversion_steps)
