"""Attack `accumulate`: one search for a client's examples in all its recorded rounds together.

The search simulates the state that the client's defense keeps between rounds, such as the residual of error feedback.
"""

from typing import Annotated, Literal, get_args

from attacker.attacks.arguments import OneOf
from attacker.attacks.matching.decoders import BUILT_IN_DECODERS
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.initialisation import get_start, normal_after_normalisation
from attacker.attacks.matching.names import get_decoder, get_optimiser
from attacker.attacks.matching.objectives import Objective, cosine, euclidean
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import Prior
from attacker.attacks.matching.settings import Search
from attacker.attacks.multi_round.agic import Agic, ComparedBy
from attacker.attacks.needs import Need
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.optimisers.stopping import PLATEAU_STOP, Stop
from attacker.attacks.papers.agic import agic

SearchName = Literal["cpl", "inverting_gradients", "agic"]
SEARCHES: tuple[SearchName, ...] = get_args(SearchName)
LINKS: tuple[ComparedBy, ...] = ("same", "features", "images", "none")


def accumulate(
    *,
    search: Annotated[str, OneOf(SEARCHES)] = "cpl",
    compare: Annotated[str, OneOf(LINKS)] = "same",
    steps: int = 100,
    tv: float = 1e-6,
    decoder: Annotated[str, OneOf(tuple(BUILT_IN_DECODERS))] = "smooth",
    restarts: int = 1,
    pre_steps: int = 50,
    robust: float = 0.0,
    residual: bool = True,
    closed_forms: bool = True,
    refined: bool = True,
    knows_defense: bool = True,
) -> Agic:
    """Search for a client's examples in all its rounds together; each round is simulated with the model sent in that round.

    The objective is the sum of the distances between simulated and observed gradients of all rounds, with equal weights. A client
    with error feedback (an option of top_k, prune and sign, and part of dgc) keeps the part of an update that it does not send,
    the residual, and adds it to later updates.

    search: which attack's distance, optimiser and start are used: cpl (squared distance, L-BFGS), inverting_gradients (cosine,
    Adam) or agic (cosine with layer weights, Adam).
    compare: `same` if the client uses all its examples in every round; otherwise how the same examples are found in different
    rounds: by `features` of the last layer, by `images` from a separate reconstruction of each round, or `none` (not at all).
    steps: maximum number of iterations.
    tv: weight of the total variation of pixels in [0, 1], relative to the distance of the observed gradient from a gradient of
    zeros. If the variance of a defense's noise is known and search is cpl, a second total variation is added, weighted by that
    variance, as by denoised in `cpl`.
    decoder: variable that is optimised, as in `cpl`; ignored for search=agic.
    restarts: maximum number of starts; another one is made only if the search was stuck. pre_steps: iterations of the separate
    reconstructions of rounds. compare=images needs them, and compare=features if the features of a round cannot be computed.
    robust: if above 0, rounds whose distance is much larger than this have less influence (Cauchy's loss).
    residual: whether to simulate what a defense keeps from round to round; false compares each round separately.
    closed_forms: try closed forms of `exact` on single rounds first, and search only for the examples that they do not determine
    exactly. They are not tried if a residual is simulated, since a residual needs all rounds.
    refined: if a residual is simulated and the values sent in all rounds are at least as many as the examples have, solve
    for the examples by Gauss-Newton steps after the search. The answer is kept only if it explains all of them.
    knows_defense: whether the attacker knows the clients' defense and models it; if false, no residual is simulated.
    """
    if search not in SEARCHES:
        raise ValueError(f"unknown search {search!r}. Known: {', '.join(SEARCHES)}")
    if compare not in LINKS:
        raise ValueError(f"the argument compare must be one of {', '.join(LINKS)}, got {compare!r}")
    if search == "agic":
        base = agic(tv=tv, steps=steps, restarts=restarts, knows_defense=knows_defense).matching
    else:
        base = _match_by_cpl(steps) if search == "cpl" else _match_by_cosine(steps)
        base = base.copy_with(decoder=get_decoder(decoder), tv=tv, restarts=restarts, knows_defense=knows_defense)
    matching = base.copy_with(name="accumulate", later=1.0, robust=robust, in_order=residual)
    needs = frozenset(matching.needs - {Need.ONE_OBSERVATION} | {Need.SAME_CLIENT, Need.LINEAR_HEAD, Need.NUM_EXAMPLES})
    needs |= {Need.IMAGE_PRIOR} if tv else frozenset()
    return Agic(
        name="accumulate",
        matching=matching,
        compare=compare,
        pre_steps=pre_steps,
        closed_forms=closed_forms,
        refined=refined,
        knows_defense=knows_defense,
        needs=needs,
    )


def _match_by_cpl(steps: int) -> GradientMatching:
    """Return a search like CPL's: squared distance of tensors divided by their root mean squares, L-BFGS with a line search."""
    return GradientMatching(
        name="cpl",
        objective=Objective(distance=euclidean, unit="root_mean_square"),
        parametrisation=Parametrisation(init=get_start("smooth")),
        prior=Prior(map_tv=1.0),
        search=Search(optimiser=get_optimiser("wolfe", 0.0), steps=steps, stop=PLATEAU_STOP),
    )


def _match_by_cosine(steps: int) -> GradientMatching:
    """Return a search like Inverting Gradients: the cosine distance, minimised by Adam within the decoder's box."""
    return GradientMatching(
        name="inverting_gradients",
        objective=Objective(distance=cosine),
        parametrisation=Parametrisation(init=normal_after_normalisation, boxed=True),
        search=Search(optimiser=Adam(learning_rate=0.1), steps=steps, stop=Stop(patience=steps, decrease=0.0)),
    )
