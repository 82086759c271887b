"""Threat classes A to H of attackers, after Carletti et al. 2025, and training settings that make attacks easier.

The classes are those of "SoK: Gradient inversion attacks in federated learning". A: gradients alone. B: also what anybody assumes
of the data, such as ranges and smooth images. C: also the settings of local training. D: also data like the clients'. E: also
batch-norm statistics of the clients. F: a server that changes the model. G: F with data like the clients'. H: G with clients of
its own.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

from attacker.attacks.learned.enhancer import BUILT_IN_ENHANCERS, NO_ENHANCER
from attacker.attacks.matching.decoders import BUILT_IN_DECODERS
from attacker.attacks.needs import GAUSSIAN_LAYER_ADDED, MALICIOUS_SERVER
from attacker.attacks.registry import parse_arguments

ThreatClass = Literal["C", "D", "E", "F"]
"""Classes that attacks of this project can have. These attacks know the settings of local training, which the server prescribes,
so that none is in A or B. Every attack on a model to which a server has added an imprint layer or a wide Gaussian layer is in F;
none is in G or H."""
BUILT_IN_PRIORS: Mapping[str, Container[object]] = {
    "decoder": BUILT_IN_DECODERS,
    "enhancer": (NO_ENHANCER, *BUILT_IN_ENHANCERS),
    "denoiser": (NO_ENHANCER,),
}
"""Arguments of attacks that may name a learned prior, each with its values that need no data like the clients'."""
TAMPERED_MODELS = ("imprint", "wide_head")
"""Names of the built-in models that a server has changed so that updates reveal more."""
CHANGED_MODEL_ORACLES = (MALICIOUS_SERVER, GAUSSIAN_LAYER_ADDED)
"""Oracles of attacks that need a changed model."""


def classify_threat(run: Mapping[str, Any], spec: str, oracles: Sequence[str]) -> ThreatClass:
    """Return the threat class of an attack: the first of F, E and D whose condition holds, otherwise C.

    F: a malicious server or an added layer is among the oracles, or the model is one of `TAMPERED_MODELS`. E:
    clients send batch-norm statistics (`buffers` is "shared"). D: an oracle supplies images, or the attack has a decoder,
    enhancer or denoiser that is not built in. The oracles of true labels and logits do not change the class, since no class
    covers them.
    run: public settings of the federation, as in `attack.json`. spec: the attack with its arguments, as text. oracles: names of
    the information that was given to the attack and that no server has.
    """
    model = str(run.get("model", "")).partition("(")[0]
    if set(CHANGED_MODEL_ORACLES) & set(oracles) or model in TAMPERED_MODELS:
        return "F"
    if _get_training(run).get("buffers") == "shared":
        return "E"
    return "D" if _has_other_prior(spec) or any("images" in oracle for oracle in oracles) else "C"


def list_concessions(run: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence for each training setting that makes attacks easier: eval mode, and batch-norm statistics that are sent.

    run: as in `classify_threat`.
    """
    training = _get_training(run)
    concessions = []
    if training.get("mode") == "eval":
        concessions.append("mode eval: examples of a batch do not influence each other, and dropout is off")
    if training.get("buffers") == "shared":
        concessions.append("buffers shared: statistics of the clients' batches are sent in clear")
    return tuple(concessions)


def _get_training(run: Mapping[str, Any]) -> Mapping[str, Any]:
    training = run.get("training")
    return training if isinstance(training, Mapping) else {}


def _has_other_prior(spec: str) -> bool:
    """Return whether an attack, given with its arguments, has a decoder, enhancer or denoiser that is not built in."""
    arguments = parse_arguments(spec)
    return any(argument in arguments and str(arguments[argument]) not in values for argument, values in BUILT_IN_PRIORS.items())
