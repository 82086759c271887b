"""ROG (Yue et al. 2022): gradient matching in a small latent space, through the model of the client's defense."""

from typing import Annotated

from attacker.attacks.arguments import FilePath, OneOf
from attacker.attacks.labels.rules import infer_labels
from attacker.attacks.learned.enhancer import BUILT_IN_ENHANCERS, NO_ENHANCER, find_enhancer
from attacker.attacks.matching import decoders
from attacker.attacks.matching import names as named
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.initialisation import STARTS, get_start
from attacker.attacks.matching.objectives import Objective
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import COSINE_MAP_TV, Prior, VariationTerm, colour_variation, total_variation
from attacker.attacks.matching.settings import Labels, Search
from attacker.attacks.matching.simulation import LocalSteps, Simulation
from attacker.attacks.needs import Need
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.optimisers.stopping import Stop

LAST_RATE = 0.1
"""Learning rate at the end of the cosine schedule, relative to the learning rate at the start."""
SIGN_FACTOR = 2.0
"""`VariationTerm.sign_factor` of ROG. Twice `tv` was better for signs on tuning and validation images
(benchmarks/results/rog-cpu.md)."""


def rog(
    *,
    steps: int = 100,
    restarts: int = 1,
    decoder: Annotated[str, OneOf(tuple(decoders.BUILT_IN_DECODERS))] = "coarse_to_fine",
    init: Annotated[str, OneOf(tuple(STARTS))] = "coarse4",
    distance: Annotated[str, OneOf(tuple(named.DISTANCES))] = "cosine",
    local_steps: LocalSteps = "one_batch",
    surrogate: bool = True,
    enhancer: Annotated[str, OneOf((NO_ENHANCER, *BUILT_IN_ENHANCERS))] = NO_ENHANCER,
    lpips_weights: FilePath = "",
    learning_rate: float = 0.05,
    beta1: float = 0.8,
    beta2: float = 0.99,
    tv: float = 1e-2,
    colour: bool = True,
    boxed: bool = False,
    denoised: bool = True,
    latent: float = 0.0,
    denoiser: Annotated[str, OneOf((NO_ENHANCER,))] = NO_ENHANCER,
    denoiser_weight: float = 1.0,
    denoiser_noise: float = 0.0,
    draws: bool = False,
    knows_defense: bool = True,
) -> GradientMatching:
    """Search by Adam with cosine annealing for small images, to which finer details are added (after Yue et al. 2022, ROG).

    steps: number of iterations of one start. restarts: as in `dlg`.
    decoder: variable that is optimised: coarse_to_fine, images of an eighth of height and width in the first tenth of the steps,
    to which details of four, two and one pixels are added in two, three and four tenths; bicubic4, images of a quarter of height
    and width, as in the paper; pixels; the file of an autoencoder or a generator that attacker train-prior wrote; or another one,
    as in `cpl`.
    init: start, as in `cpl`, but not insider. coarse4 gives squares of 4 x 4 pixels with one random value in [0, 1) each for
    every channel, which for bicubic4 are independent values of its small image.
    distance: cosine; euclidean (squared), as in the paper; or absolute.
    local_steps: one_batch treats all local steps of a client as one; simulated, as in the paper, simulates each, which takes
    about n times as long for n local steps.
    surrogate: for one_batch and clients with several local steps, compute the gradient at a point between the weights sent and
    those returned. This point is optimised together with the images (Zhu et al. 2023, SME), which comes near the results of
    simulated at the cost of one_batch. Not used for clients that send signs, nor with draws.
    enhancer: changes the images after the search, and also the images of the null (the attack without the gradient): none, small
    (shipped), equalize (divides by the largest value and equalises histograms, as the paper does for signs), the file of an
    enhancer that attacker train-prior wrote, the file of a generator, or `module:function`, see `learned.enhancer`. With a
    generator, the nearest images that it can make are looked for (ROGS), by Adam or, if @frank_wolfe follows the file, by the
    method of Frank and Wolfe.
    lpips_weights: file of AlexNet's weights for LPIPS, which is then a part of the distance in the search of a generator for the
    nearest images (ROGS); as --lpips-weights of attacker score. By default, the weights in torch's hub cache are used; if there
    are none, the distance has no LPIPS.
    learning_rate: at the start; a tenth of it is left at the end. beta1, beta2: decay rates of Adam's averages of gradients and
    of their squares, in [0, 1), which begin anew in each phase of a decoder; the paper has 0.9 and 0.999.
    boxed: keep the optimised variable in the decoder's box, which the paper does not.
    tv: as in `cpl`, and twice as much if clients send signs; the paper uses no total variation.
    colour: measure total variation along brightness and two colour differences, of which the latter count more
    (`colour_variation`), instead of along the channels.
    denoised: if a defense adds noise of known variance to images' gradients, also add total variation with half the weight of a
    MAP estimate (`Prior.map_tv`).
    latent, denoiser, denoiser_weight, denoiser_noise: as in `inverting_gradients`; the paper has none of them.
    draws: as in `inverting_gradients`.
    knows_defense: as in `dlg`; simulated updates pass through the model of each defense (its channel) before they are compared.
    """
    needs = {Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.LINEAR_HEAD, Need.IMAGES}
    return GradientMatching(
        name="rog",
        objective=Objective(distance=named.get_distance(distance)),
        simulation=Simulation(
            local_steps=named.check_local_steps(local_steps),
            surrogate=surrogate and local_steps == "one_batch" and not draws,
            knows_defense=knows_defense,
            draws=draws,
        ),
        parametrisation=Parametrisation(decoder=named.get_decoder(decoder), init=get_start(init), boxed=boxed),
        prior=Prior(
            tv=tv,
            variation=VariationTerm(measure=colour_variation if colour else total_variation, sign_factor=SIGN_FACTOR),
            map_tv=COSINE_MAP_TV if denoised else 0.0,
            latent=latent,
            denoiser=named.get_denoiser_term(denoiser, denoiser_weight, denoiser_noise),
        ),
        labels=Labels(rule=infer_labels),
        search=Search(
            optimiser=Adam(learning_rate=learning_rate, decay_at=(), cosine=LAST_RATE, betas=(beta1, beta2)),
            steps=steps,
            stop=Stop(patience=steps, decrease=0.0),
            restarts=restarts,
        ),
        enhancer=find_enhancer(enhancer, lpips_weights),
        needs=frozenset(needs),
    )
