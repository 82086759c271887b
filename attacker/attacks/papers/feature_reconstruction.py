"""Feature reconstruction with an untrained prior (Liu et al. 2024, "Data reconstruction attacks and defenses")."""

from typing import Annotated

from attacker.attacks.arguments import OneOf
from attacker.attacks.labels.rules import infer_labels
from attacker.attacks.matching import decoders
from attacker.attacks.matching import names as named
from attacker.attacks.matching.gradient_matching import GradientMatching
from attacker.attacks.matching.initialisation import normal_after_normalisation
from attacker.attacks.matching.objectives import FeatureLayerName, FeatureTerm, Objective, cosine
from attacker.attacks.matching.parametrisation import Parametrisation
from attacker.attacks.matching.priors import Prior
from attacker.attacks.matching.settings import Labels, Search
from attacker.attacks.matching.simulation import Simulation
from attacker.attacks.needs import Need
from attacker.attacks.optimisers.first_order import Adam
from attacker.attacks.optimisers.stopping import Stop

FEATURES_MAP_TV = 0.2
"""`Prior.map_tv` of feature reconstruction, chosen among 0.1, 0.2 and 0.5 on the tuning part of CIFAR-10."""
MATCHED: tuple[FeatureLayerName, ...] = ("gaussian", "head")


def feature_reconstruction(
    *,
    matched: Annotated[str, OneOf(MATCHED)] = "gaussian",
    feature_matching: float = 0.1,
    decoder: Annotated[str, OneOf(tuple(decoders.BUILT_IN_DECODERS))] = "deep_prior",
    steps: int = 2000,
    restarts: int = 1,
    learning_rate: float = 3e-3,
    tv: float = 1e-3,
    weighted: bool = True,
    batch_norm: float = 0.0,
    injected: bool = True,
    knows_defense: bool = True,
) -> GradientMatching:
    """Match gradients and features with an untrained network as prior (Liu et al. 2024, section 4.2 and appendix F).

    Features are recovered by tensor decomposition from the gradient behind a wide layer of random Gaussian weights, which the
    server has added. The loss is the cosine distance of the gradients, whose tensors have equal weight, plus the share of the
    features' norm outside the recovered spans, plus total variation, and is minimised by Adam. The copy of the paper that was
    used lacks the values of the settings, so the defaults are our own.

    matched: the features: gaussian (inputs of the wide layer, by tensor decomposition) or head (inputs of the last layer, on any
    network, solved from its gradient as in `inverting_gradients`).
    feature_matching: weight of the distance between the features of the images and the recovered features; 0 leaves this term
    out.
    decoder: deep_prior (the weights of an untrained U-Net per image), shared_prior (the weights of one U-Net for a whole batch),
    or another as in `cpl`, which needs another learning_rate, such as 0.1 for pixels.
    steps: maximum number of iterations, of one gradient evaluation each. restarts: as in `dlg`.
    learning_rate: learning rate of the first steps; it is divided by 10 after 3/8, 5/8 and 7/8 of the steps.
    tv: as in `cpl`. If a defense adds noise of known variance, total variation with a fifth of the weight of a MAP estimate is
    added (`Prior.map_tv`).
    weighted: divide each tensor of the gradient by its norm before the comparison, so that large ones do not dominate,
    unless a defense adds noise of known variance.
    batch_norm: as in `inverting_gradients`. knows_defense: as in `dlg`.
    injected: with shared_prior, add the recovered features, by a linear map, in each residual block of the network. A network of
    a single image needs no features to tell it from others.
    """
    if matched not in MATCHED:
        raise ValueError(f"the argument matched must be one of {', '.join(MATCHED)}, got {matched!r}")
    layer: FeatureLayerName = "gaussian" if matched == "gaussian" else "head"
    needs = {Need.ONE_OBSERVATION, Need.NUM_EXAMPLES, Need.LINEAR_HEAD}
    needs |= {Need.GAUSSIAN_LAYER} if layer == "gaussian" else set()
    needs |= {Need.IMAGES} if decoder in ("deep_prior", "shared_prior") else set()
    needs |= {Need.IMAGE_PRIOR} if tv else set()
    return GradientMatching(
        name="feature_reconstruction",
        objective=Objective(
            distance=cosine,
            unit="norm" if weighted else None,
            batch_norm=batch_norm,
            features=FeatureTerm(weight=feature_matching, layer=layer, injected=injected),
        ),
        simulation=Simulation(knows_defense=knows_defense),
        parametrisation=Parametrisation(decoder=named.get_decoder(decoder), init=normal_after_normalisation, boxed=True),
        prior=Prior(tv=tv, map_tv=FEATURES_MAP_TV),
        labels=Labels(rule=infer_labels),
        search=Search(
            optimiser=Adam(learning_rate=learning_rate),
            steps=steps,
            stop=Stop(patience=steps, decrease=0.0, give_up=0.0),
            restarts=restarts,
        ),
        needs=frozenset(needs),
    )
