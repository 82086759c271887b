"""Functions that build AGIC (Xu et al. 2022), and its search on single rounds."""

from dataclasses import replace
from typing import Annotated, get_args

from attacker.attacks.arguments import OneOf
from attacker.attacks.labels import rules as labels
from attacker.attacks.matching import names as named
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.initialisation import get_start, normal_after_normalisation
from attacker.attacks.matching.layer_weights import DEPTH_SHAPES, weigh_by_depth
from attacker.attacks.matching.objectives import Objective
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import COLOUR_MAP_TV, COSINE_MAP_TV, Prior, VariationTerm, colour_variation, total_variation
from attacker.attacks.matching.settings import Labels, Polish, Search
from attacker.attacks.matching.simulation import LocalSteps, Simulation
from attacker.attacks.multi_round.agic import Agic, ComparedBy
from attacker.attacks.needs import Need
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.attacks.optimisers.stopping import PLATEAU_STOP, Stop
from attacker.attacks.papers.matching import CONTINUATION, POLISH

COMPARISONS: tuple[ComparedBy, ...] = get_args(ComparedBy)


def agic(
    *,
    steps: int = 2000,
    beta: float = 50.0,
    shape: Annotated[str, OneOf(tuple(DEPTH_SHAPES))] = "linear",
    relu_modifier: bool = True,
    tv: float = 1e-3,
    colour: bool = True,
    continuation: float = CONTINUATION,
    distance: Annotated[str, OneOf(tuple(named.DISTANCES))] = "cosine",
    optimiser: Annotated[str, OneOf(tuple(named.OPTIMISERS))] = "adam",
    learning_rate: float = 0.0,
    signed: bool = False,
    label_rule: Annotated[str, OneOf(tuple(labels.LABEL_RULES))] = "inferred",
    batch_norm: float = 1.0,
    local_steps: LocalSteps = "auto",
    surrogate: bool = False,
    order_invariant: float = 0.0,
    compare: Annotated[str, OneOf(COMPARISONS)] = "features",
    pre_steps: int = 200,
    later: float = 0.1,
    robust: float = 0.0,
    coarse: float = 0.0,
    compiled: bool = False,
    closed_forms: bool = True,
    restarts: int = 1,
    polish: float = POLISH,
    knows_defense: bool = True,
) -> Agic:
    """Link all rounds of a client and match their gradients, by a layer-weighted cosine (Xu et al. 2022, AGIC, eqs. 2 to 8).

    Links state which positions in the batches of different rounds hold the same example.

    steps: maximum number of iterations, of 20 gradient evaluations each for lbfgs and wolfe, and of one for all others.
    restarts, compiled, knows_defense: as in `dlg`.
    beta, shape, relu_modifier: layer weights, see `weigh_by_depth`. beta is 50 for an untrained network, 2 for a trained one.
    tv: weight of the total variation, as in `cpl`. If the variance of a defense's noise is known, a second total
    variation is added: with the weight of a MAP estimate if distance is euclidean, and with half of it (a quarter with
    colour) if it is cosine.
    colour, continuation: as in `inverting_gradients`.
    distance, optimiser: by name, as in `cpl`; lbfgs or wolfe with euclidean suit small sigmoid networks. With adam, the start is
    random noise, pixels stay in [0, 1], and the search takes all steps. With any other optimiser, the start is the pattern of
    `cpl`, pixels are not bounded, and the search stops once its best loss has decreased by at most 5 % over the last 200 gradient
    evaluations.
    learning_rate: 0 for the optimiser's default, which is 0.1 for adam. signed: adam uses only the sign of the gradient.
    label_rule: as in `cpl`, but not joint. batch_norm: as in `inverting_gradients`; the paper has no such term.
    local_steps: as in `inverting_gradients`; the paper has one_batch.
    surrogate: for one_batch, compute the gradient at a point between the weights sent and those returned. This point is optimised
    together with the images (SME).
    order_invariant: for simulated, a value above 0 gives each local epoch images of its own. It is the weight of a penalty on
    the difference between the mean images of the epochs (Dimitrov et al. 2022).
    compare: how rounds are linked: features, images, published (greedy), same or none, see `Agic`; with features, clients that
    take several local steps in whole epochs on equally many examples are taken to use the same examples in every round.
    pre_steps: iterations of the separate reconstruction of each round. Its images are compared for compare=images and
    compare=published, and also for compare=features if the features of a round cannot be computed.
    later: weight in the loss of the rounds after the client's first pass over its examples; rounds in that pass have weight 1,
    and all rounds if passes are unknown, as for same and none.
    robust: if above 0, the distance d of each round is replaced by robust * log(1 + d / robust), so that rounds with a distance
    far above this value, for example because of wrong links, have less influence (Cauchy's loss).
    coarse: share of the steps, at the beginning, whose large convolutions are computed in bfloat16 if the device computes it
    faster; this recovers slightly less.
    polish: as in `inverting_gradients`, in the joint search, with the optimiser adam and without robust; the paper has none.
    closed_forms: try the closed forms of `exact` that do not iterate on single rounds first, and search only for examples that
    none certifies.
    """
    if compare not in COMPARISONS:
        raise ValueError(f"the argument compare must be one of {', '.join(COMPARISONS)}, got {compare!r}")
    rule, adam = labels.get_label_rule(label_rule), optimiser == "adam"
    if rule is None:
        raise ValueError(
            "label_rule cannot be 'joint', since rounds are linked by labels that are known before the search; choose one of "
            f"{', '.join(labels.LABEL_RULES)}"
        )
    needs = {Need.SAME_CLIENT, Need.NUM_EXAMPLES, Need.LINEAR_HEAD} | ({Need.IMAGE_PRIOR} if tv else set())
    chosen = Adam(learning_rate=learning_rate or 0.1, signed=signed) if adam else named.get_optimiser(optimiser, learning_rate)
    plateau = replace(PLATEAU_STOP, patience=PLATEAU_STOP.patience * LBFGS().period // chosen.period)
    map_tv = COLOUR_MAP_TV if colour else COSINE_MAP_TV
    matching = GradientMatching(
        name="agic",
        objective=Objective(
            distance=named.get_distance(distance),
            layers=weigh_by_depth(beta, shape, relu_modifier=relu_modifier),
            robust=robust,
            later=later,
            batch_norm=batch_norm,
        ),
        simulation=Simulation(
            local_steps=named.check_local_steps(local_steps),
            surrogate=surrogate,
            order_invariant=order_invariant,
            knows_defense=knows_defense,
        ),
        parametrisation=Parametrisation(init=normal_after_normalisation if adam else get_start("patterned"), boxed=adam),
        prior=Prior(
            tv=tv,
            variation=VariationTerm(measure=colour_variation if colour else total_variation, continuation=continuation),
            map_tv=map_tv if distance == "cosine" else 1.0,
        ),
        labels=Labels(rule=rule),
        search=Search(
            optimiser=chosen,
            steps=steps,
            stop=Stop(patience=steps, decrease=0.0) if adam else plateau,
            restarts=restarts,
            coarse=coarse,
            compiled=compiled,
        ),
        polish=Polish(share=polish) if polish and adam else None,
        needs=frozenset(needs - {Need.SAME_CLIENT} | {Need.ONE_OBSERVATION}),
    )
    return Agic(
        name="agic",
        matching=matching,
        compare=compare,
        pre_steps=pre_steps,
        closed_forms=closed_forms,
        knows_defense=knows_defense,
        needs=frozenset(needs),
    )


def agic_of_one_round(*, steps: int = 2000, restarts: int = 1, knows_defense: bool = True) -> GradientMatching:
    """Return an attack on single rounds by AGIC's search, without linking."""
    return agic(steps=steps, restarts=restarts, knows_defense=knows_defense).matching
