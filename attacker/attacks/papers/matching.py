"""Functions that build gradient matching attacks from parts: DLG, iDLG, CPL and Inverting Gradients."""

from dataclasses import replace
from typing import Annotated

from attacker.attacks.arguments import FilePath, OneOf
from attacker.attacks.closed_form.warm_start import add_closed_form_start
from attacker.attacks.labels import rules as labels
from attacker.attacks.labels.rules import infer_from_rows, infer_labels
from attacker.attacks.learned.enhancer import NO_ENHANCER
from attacker.attacks.matching import decoders
from attacker.attacks.matching import names as named
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.initialisation import STARTS, get_start, normal, normal_after_normalisation
from attacker.attacks.matching.layer_weights import keep_largest
from attacker.attacks.matching.objectives import FeatureTerm, Objective, cosine, euclidean
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import (
    COLOUR_MAP_TV,
    COSINE_MAP_TV,
    Consistency,
    Prior,
    VariationTerm,
    colour_variation,
    total_variation,
)
from attacker.attacks.matching.settings import Labels, Polish, Search
from attacker.attacks.matching.simulation import LocalSteps, Simulation
from attacker.attacks.needs import Need
from attacker.attacks.optimisers.first_order import Adam, Optimiser
from attacker.attacks.optimisers.gradient_penalty import GradientPenalty
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.attacks.optimisers.stopping import EARLY_LIMITS, GIVE_UP_SHARE, INVERTING_STALL, PLATEAU_STOP, Stop

INVERTING_RATE = 0.1
"""Default learning rate of Inverting Gradients, for which the limits of giving up early were chosen."""

CONTINUATION = 10.0
"""Default of `continuation` in Inverting Gradients. Chosen on tuning images, with `tv` and `colour` (benchmarks, tuning)."""

POLISH = 0.4
"""Default of `polish` in Inverting Gradients. Chosen on tuning images, with the total variation in it (benchmarks, tuning)."""

PENALTY_DISTANCE = 0.01
"""Root mean square change of the pixels to the point from which the norm of the loss's gradient is estimated."""


def dlg(
    *, steps: int = 300, restarts: int = 1, closed_form_start: bool = False, compiled: bool = False, knows_defense: bool = True
) -> GradientMatching:
    """Optimise examples and soft labels by L-BFGS from noise (Zhu et al. 2019, "Deep leakage from gradients", algorithm 1).

    steps: maximum number of iterations of one start, of 20 gradient evaluations each. restarts: maximum number of starts; another
    one is made only if the lowest loss so far is still high, see `Stop.stuck`.
    closed_form_start: make an additional first start from the best answer of a closed form such as R-GAP, if one explains part of
    the gradient.
    compiled: compile the search by `torch.compile`, which takes time at first and pays off for small networks and thousands of
    iterations.
    knows_defense: whether the attacker knows the clients' defense and models it.
    """
    attack = GradientMatching(
        name="dlg",
        objective=Objective(distance=euclidean),
        simulation=Simulation(knows_defense=knows_defense),
        parametrisation=Parametrisation(init=normal),
        labels=Labels(rule=None),
        search=Search(optimiser=LBFGS(), steps=steps, stop=PLATEAU_STOP, restarts=restarts, compiled=compiled),
    )
    return add_closed_form_start(attack) if closed_form_start else attack


def idlg(*, steps: int = 300, restarts: int = 1, knows_defense: bool = True) -> GradientMatching:
    """Infer the label of one example from the last layer's gradient, then run DLG (Zhao et al. 2020, "iDLG", algorithm 1).

    steps, restarts, knows_defense: as in `dlg`.
    """
    needs = frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.SINGLE_EXAMPLE, Need.LINEAR_HEAD})
    base = dlg(steps=steps, restarts=restarts, knows_defense=knows_defense)
    return base.copy_with(name="idlg", rule=infer_from_rows, needs=needs)


def cpl(
    *,
    init: Annotated[str, OneOf((*STARTS, "insider"))] = "patterned",
    auxiliary: FilePath = "",
    optimiser: Annotated[str, OneOf(tuple(named.OPTIMISERS))] = "lbfgs",
    learning_rate: float = 0.0,
    distance: Annotated[str, OneOf(tuple(named.DISTANCES))] = "euclidean",
    label_rule: Annotated[str, OneOf((*labels.LABEL_RULES, "joint"))] = "inferred",
    steps: int = 300,
    patience: int = 10,
    tolerance: float = 0.0,
    restarts: int = 1,
    tv: float = 0.0,
    decoder: Annotated[str, OneOf(tuple(decoders.BUILT_IN_DECODERS))] = "pixels",
    local_steps: LocalSteps = "one_batch",
    agreement: float = 0.0,
    boxed: bool = False,
    closed_form_start: bool = False,
    features: bool = False,
    denoised: bool = True,
    relative: bool = False,
    compiled: bool = False,
    give_up: float = 0.0,
    knows_defense: bool = True,
) -> GradientMatching:
    """Match gradients, by default by L-BFGS from a patterned start with inferred labels (Wei et al. 2020, CPL, algorithm 1).

    The zero loss is the distance between the observed gradient and a gradient of zeros, which is 1 for the cosine distance.

    init: start: random (normal), uniform, patterned (a random block, repeated 2x2 times), patterned4 (4x4 times), coarse4 (random
    squares of 4x4 pixels), dark, light, red, green, blue, smooth (grey with faint smooth differences), or insider with
    auxiliary=FILE.npz, an archive of images from which one of the inferred class is drawn for each example (not with joint).
    optimiser: lbfgs, wolfe (L-BFGS with a line search), adam, momentum, or adagrad. learning_rate: 0 for the optimiser's default.
    distance: euclidean (squared), cosine, or absolute.
    label_rule: how labels are read from the gradient: inferred, bias, rows, llg, or ilrg, see `attacker.attacks.labels.rules`; or
    joint (optimised together with the images).
    steps: maximum number of iterations, of 20 gradient evaluations each for lbfgs and wolfe, and of one for all others.
    patience: a search stops once its best loss has decreased by at most 5 % over the last 20 * patience gradient evaluations,
    with any optimiser.
    restarts: as in `dlg`.
    tolerance: a search stops if its loss is at most this value, or at most 1e-8 times the zero loss. The paper uses a tolerance
    of 1e-4.
    tv: weight of the total variation of pixels in [0, 1] in the loss, as a multiple of the zero loss, see `Prior`. The paper uses
    none. Values to try: about 3e-5 for batches of images, and 1e-3 if parts of the gradient were not sent.
    decoder: variable that is optimised: pixels, bicubic4 (images of a quarter of height and width), tanh_box, smooth (cosine
    transform, scaled by the spectrum of images), the file of an autoencoder that attacker train-prior wrote, the file of a
    generator with what is searched (`FILE@latents`, `FILE@features` or `FILE@weights`, see `generator_decoders`), or another
    decoder by its entry point or as `module:function`, see `decoders`.
    local_steps: one_batch, as in the paper, treats an update of several local steps as one gradient; auto and simulated are as in
    `inverting_gradients`.
    agreement: the paper's alpha, weight of the distance between predictions and labels.
    boxed: keep the optimised variable in the decoder's box; for pixels, this is [0, 1].
    closed_form_start, compiled, knows_defense: as in `dlg`.
    features: make an additional first start from images with the features (inputs of the last layer) that are computed for each
    example from the last layer's gradient, see `closed_form.features`; not used with closed_form_start.
    denoised: if a defense adds noise of known variance and distance is euclidean or cosine, add total variation weighted by that
    variance (MAP estimate, `Prior.map_tv`), which the paper does not do; for images only.
    relative: divide each tensor of the gradient by about its root mean square before the comparison, unless a defense adds noise
    of known variance, so that layers with small gradients have more influence.
    give_up: share of the steps, and at least 30 steps, after which a search stops if its best loss is still above 15 % of its
    first loss, and above a tenth of the zero loss; 0 never stops it. These limits were chosen for `inverting_gradients`, and not
    tested on this attack.
    """
    chosen, rule = named.get_optimiser(optimiser, learning_rate), labels.get_label_rule(label_rule)
    if init == "insider" and rule is None:
        raise ValueError(
            "init 'insider' draws images of the classes that are inferred before the search, and label_rule 'joint' infers none; "
            f"choose another label_rule: {', '.join(labels.LABEL_RULES)}, or another init"
        )
    needs = (
        {Need.ONE_OBSERVATION, Need.NUM_EXAMPLES}
        | ({Need.LINEAR_HEAD} if rule else set())
        | ({Need.IMAGE_PRIOR} if tv else set())
    )
    needs |= {Need.OWN_IMAGES} if init == "insider" else set()
    attack = GradientMatching(
        name="cpl",
        objective=Objective(distance=named.get_distance(distance), unit="root_mean_square" if relative else None),
        simulation=Simulation(local_steps=named.check_local_steps(local_steps), knows_defense=knows_defense),
        parametrisation=Parametrisation(decoder=named.get_decoder(decoder), init=get_start(init, auxiliary), boxed=boxed),
        prior=Prior(tv=tv, map_tv=float(denoised)),
        labels=Labels(rule=rule, agreement=agreement),
        search=Search(
            optimiser=chosen,
            steps=steps,
            stop=replace(PLATEAU_STOP, tolerance=tolerance, patience=patience * LBFGS().period // chosen.period, give_up=give_up),
            restarts=restarts,
            compiled=compiled,
        ),
        needs=frozenset(needs),
    )
    if closed_form_start:
        return add_closed_form_start(attack)
    return add_closed_form_start(attack, routes=("features",)) if features else attack


def inverting_gradients(
    *,
    steps: int = 4800,
    restarts: int = 1,
    tv: float = 1e-3,
    colour: bool = True,
    continuation: float = CONTINUATION,
    decoder: Annotated[str, OneOf(tuple(decoders.BUILT_IN_DECODERS))] = "pixels",
    learning_rate: float = INVERTING_RATE,
    signed: bool = False,
    closed_form_start: bool = False,
    compiled: bool = False,
    give_up: float = GIVE_UP_SHARE,
    batch_norm: float = 1.0,
    feature_matching: float = 0.0,
    latent: float = 0.0,
    denoiser: Annotated[str, OneOf((NO_ENHANCER,))] = NO_ENHANCER,
    denoiser_weight: float = 1.0,
    denoiser_noise: float = 0.0,
    draws: bool = False,
    local_steps: LocalSteps = "auto",
    surrogate: bool = False,
    consistency: float = 0.0,
    registered: bool = False,
    denoised: bool = True,
    compared_share: float = 1.0,
    gradient_penalty: float = 0.0,
    polish: float = POLISH,
    knows_defense: bool = True,
) -> GradientMatching:
    """Minimise cosine distance plus total variation by Adam in a box (Geiping et al. 2020, "Inverting gradients", eq. 4).

    The total variation is that of colours, and its weight falls during the search, unless `colour` and `continuation` are set to
    the paper's values.

    steps: maximum number of gradient evaluations: one per iteration of Adam, and 20 per iteration of L-BFGS (see polish and
    local_steps). Shares of the steps, below, are of those of Adam. restarts: as in `dlg`.
    signed: give Adam only the sign of the derivative of the loss by the pixels. The paper does this, with tv=1e-4 for normalised
    inputs, which --preset published converts to pixels.
    learning_rate: learning rate of the first steps, for pixels in [0, 1]; it is divided by 10 after 3/8, 5/8 and 7/8 of the
    steps. The paper's code optimises normalised inputs.
    tv, decoder: as in `cpl`. closed_form_start, compiled, knows_defense: as in `dlg`.
    colour: measure total variation along brightness and two colour differences, of which the latter count more
            (`colour_variation`); false, as in the paper, measures it along the channels.
    continuation: ratio of the weight of the total variation at the first step to `tv`, to which it falls in the first two fifths
                  of the steps (`VariationTerm`); 1, as in the paper, for a constant weight.
    give_up: share of the steps, and at least 30 steps, after which a search stops if its best loss is still above 15 % of its
             first loss, and above 0.1 (the cosine distance of a gradient of zeros is 1). It also stops if its best loss is above
             0.1 and above the share of its first loss that `EARLY_LIMITS` states for 6, 15 and 30 steps, or if it is stalled near
             the loss of a grey image after 45 of at least 300 steps (`INVERTING_STALL`). These two tests are made only without a
             defense or returned statistics of batch norm, not in the first start with closed_form_start, and only with the
             settings for which they were chosen: unsigned steps at the default learning rate, in pixels, without further terms of
             the loss. 0 never stops a search.
             The null (the search without the gradient) is never stopped, and no search if clients draw random numbers while
             they train (dropout, MixUp).
    batch_norm: weight of the difference between the batch-norm statistics of the images and the statistics that the client
                returned, if clients train in mode "train" and return them (`buffers="shared"`); the paper has no such term.
    feature_matching: weight of the distance between the features (inputs of the last layer) of the images and those that the last
                      layer's gradient determines (Liu et al. 2024); the paper uses none. A value to try: 0.1.
    latent: weight of the mean square of the latents, relative to the loss of a zero gradient, for decoders whose latents have a
            standard normal prior, such as the latents of a generator; the paper has no such term.
    denoiser: keeps the search near images that a denoiser leaves as they are (Romano et al. 2017, RED): the file of one that
              attacker train-prior wrote, or `module:function`, see `learned.enhancer`; none for none, as in the paper.
    denoiser_weight: weight of half the mean squared difference of images and denoised images, relative to the loss of a zero
                     gradient.
    denoiser_noise: standard deviation of noise that is added before denoising at the first step, falling to 0 at the last one, as
                    a diffusion prior does (Mardani et al. 2024, RED-diff); a value to try: 0.2.
    draws: search with the images for what the client drew in its one step: the mixtures of MixUp (and of InstaHide without
           flipped values or public images), and the masks of dropout(). By default, they are ignored.
    local_steps: auto simulates each local step, as the paper does, if a client takes at most 10, with as many times fewer
                 iterations as there are steps. If these are not each on all examples of the client, Adam treats them as one; then
                 the order of at most 32 examples is searched for (`simulation.step_orders`), and the polish simulates the steps
                 in this order. one_batch treats all steps as one; simulated simulates all, with the examples in a fixed order,
                 and takes as many times longer as there are steps.
    surrogate: for steps that are treated as one, compute the gradient at a point between the weights sent and those returned,
               which is optimised together with the images (Zhu et al. 2023, SME).
    consistency: if above 0, all starts (`restarts`, at least 2) are made at once. It is the weight of the mean squared difference
                 between the images of each start and the mean over starts, relative to the loss of a zero gradient
                 (Yin et al. 2021, GradInversion, eq. 11). The images of the start with the lowest loss are returned; that loss
                 does not include this term.
    registered: with consistency, shift the images of each start onto the mean over starts, and compare with the mean of the
                shifted images instead.
    denoised: if a defense adds noise of known variance to images' gradients, also add total variation with a quarter of the
              weight of a MAP estimate (`Prior.map_tv`), or half of it without `colour`; the paper does not.
    compared_share: share of the entries of each tensor of the gradient that are compared, the largest ones by magnitude; 1 for
                    all (Fan et al. 2025, FedLeak, "partial gradient matching").
    gradient_penalty: from 0 to 1, weight of the norm of the loss's gradient, see `GradientPenalty`. Above 0, an iteration has two
                      gradient evaluations (FedLeak, "gradient regularization").
    polish: share of the gradient evaluations, at the end, that L-BFGS makes from the best result of Adam, on squared distances in
            units of each tensor, with a total variation that falls to a tenth of `tv` (`Polish`); the paper has no such search.
            With 0, Adam makes all of them, as it does for the null, behind noise of known variance, and for clients that draw
            random numbers while they train or return statistics of batch norm.
    """
    is_calibrated = (learning_rate, signed, decoder, denoiser) == (INVERTING_RATE, False, "pixels", NO_ENHANCER)
    is_calibrated = is_calibrated and not (feature_matching or latent or consistency or gradient_penalty or draws or surrogate)
    is_calibrated = is_calibrated and compared_share == 1
    optimiser: Optimiser = Adam(learning_rate=learning_rate, signed=signed)
    if gradient_penalty:
        optimiser = GradientPenalty(inner=optimiser, weight=gradient_penalty, distance=PENALTY_DISTANCE)
    image_needs = ({Need.IMAGE_PRIOR} if tv else set()) | (set() if denoiser == NO_ENHANCER else {Need.IMAGES})
    attack = GradientMatching(
        name="inverting_gradients",
        objective=Objective(
            distance=cosine,
            layers=None if compared_share == 1 else keep_largest(compared_share),
            batch_norm=batch_norm,
            features=FeatureTerm(weight=feature_matching),
        ),
        simulation=Simulation(
            local_steps=named.check_local_steps(local_steps), surrogate=surrogate, knows_defense=knows_defense, draws=draws
        ),
        parametrisation=Parametrisation(decoder=named.get_decoder(decoder), init=normal_after_normalisation, boxed=True),
        prior=Prior(
            tv=tv,
            variation=VariationTerm(measure=colour_variation if colour else total_variation, continuation=continuation),
            map_tv=(COLOUR_MAP_TV if colour else COSINE_MAP_TV) if denoised else 0.0,
            latent=latent,
            denoiser=named.get_denoiser_term(denoiser, denoiser_weight, denoiser_noise),
        ),
        labels=Labels(rule=infer_labels),
        search=Search(
            optimiser=optimiser,
            steps=steps,
            stop=Stop(
                patience=steps,
                decrease=0.0,
                give_up=give_up,
                early=EARLY_LIMITS if is_calibrated else (),
                stall=INVERTING_STALL if is_calibrated else None,
            ),
            restarts=restarts,
            compiled=compiled,
            consistency=Consistency(weight=consistency, registered=registered) if consistency else None,
        ),
        polish=Polish(share=polish) if polish else None,
        needs=frozenset({Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.LINEAR_HEAD} | image_needs),
    )
    return add_closed_form_start(attack) if closed_form_start else attack
