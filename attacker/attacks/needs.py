"""Conditions that a case must meet for an attack, such as a single example or images, and the knowledge that they imply."""

from enum import Enum

from attacker.attacks.cases import UNNAMED_CLIENT, Case
from attacker.attacks.networks.discrete_inputs import is_differentiable
from attacker.attacks.networks.gaussian_layer import find_gaussian_layer
from attacker.attacks.networks.input_layer import find_input_layer
from fedsim import models
from fedsim.models.imprint_layers import find_imprint
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation

MAX_EXAMPLES = 100_000
"""Largest number of examples per update that is attacked. An attack allocates as many examples as the client reports, and a
client could report any number."""


class Need(Enum):
    """A condition for an attack to work on a case. The value of each member is the reason shown if the condition is not met."""

    ONE_OBSERVATION = "it attacks one round of one client at a time"
    SAME_CLIENT = "it attacks rounds of one client together"
    UNNAMED = "it attacks the updates of single clients whose names are hidden, and this is a secure sum"
    NUM_EXAMPLES = "it must know how many examples are behind the update, and the client reported no number"
    FEW_EXAMPLES = f"it reconstructs every example behind the update, and the client reported more than {MAX_EXAMPLES:,}"
    SINGLE_EXAMPLE = "it works for one example only"
    LINEAR_HEAD = (
        "it reads labels off the last linear layer, whose outputs are the logits, and this model has none, or clients do not "
        "train it"
    )
    IMPRINT_LAYER = "it reads an imprint layer, which only a malicious server puts into a model, and this model has none"
    GAUSSIAN_LAYER = (
        "it recovers features behind a wide linear layer with random Gaussian weights and no bias, followed by ReLU and the last "
        "layer, which a server must have added to the network, and this model has none"
    )
    SECURE_SUM = "it splits secure sums, and this is the update of a single client"
    INPUT_LAYER = (
        "it reads examples off the update of a linear layer with a bias that sees them directly, and this model has none"
    )
    IMAGES = "it works on images, and these data are table rows"
    IMAGE_PRIOR = "its prior is for images, and these data are table rows"
    IMAGE_CRITERION = "its criterion is for images, and these data are table rows"
    CONTINUOUS_INPUTS = (
        "it searches among real-valued inputs, and this network reads whole numbers, such as tokens or codes of categories; the "
        "check tokens-readable of `attacker audit` finds which of them occur"
    )
    OWN_IMAGES = "it starts from images of the same class, which no server has"
    CANDIDATES = "it chooses among candidate images, which the threat model does not give to the server"
    PUBLIC_IMAGES = "it trains on public images, which the user supplies"

    def is_met(self, case: Case) -> bool:
        """Return whether `case` meets this condition.

        OWN_IMAGES, CANDIDATES and PUBLIC_IMAGES concern images that the user passes to the attack, and not the case: the result
        is then True.
        """
        first = case.observations[0]
        if self is Need.ONE_OBSERVATION:
            return len(case.observations) == 1
        if self is Need.SAME_CLIENT:
            return len({observation.client for observation in case.observations}) == 1
        if self is Need.UNNAMED:
            return all(observation.client == UNNAMED_CLIENT and not observation.cohort for observation in case.observations)
        if self is Need.NUM_EXAMPLES:
            return bool(first.num_examples)
        if self is Need.FEW_EXAMPLES:
            return (first.num_examples or 0) <= MAX_EXAMPLES
        if self is Need.SINGLE_EXAMPLE:
            return first.num_examples == 1
        if self in (Need.IMAGES, Need.IMAGE_PRIOR, Need.IMAGE_CRITERION):
            return first.data.is_image
        if self in (Need.OWN_IMAGES, *NEEDS_OF_FILES):
            return True
        if self is Need.IMPRINT_LAYER:
            return find_imprint(first.weights, first.data.size) is not None
        if self is Need.GAUSSIAN_LAYER:
            return find_gaussian_layer(models.build_layout(first.model, first.data), first.weights) is not None
        if self is Need.SECURE_SUM:
            return first.client == SUM_CLIENT
        if self is Need.CONTINUOUS_INPUTS:
            return is_differentiable(first.model, first.data)
        if self is Need.INPUT_LAYER:
            return find_input_layer(first.model, first.data) is not None
        return _has_trained_head(first)

    @property
    def hint(self) -> str:
        """A hint on which argument of the attack removes the need, such as "--set tv=0 leaves it out"; "" if there is none."""
        return _HINTS.get(self, "")


def _has_trained_head(observation: Observation) -> bool:
    """Return whether the network's last layer is linear, see `models.find_head`, and clients train it."""
    model = models.build_layout(observation.model, observation.data)
    if not models.has_head(model, observation.data):
        return False
    weight, _ = models.find_head(model, observation.data)
    return model.get_parameter(weight).requires_grad and not observation.training.is_frozen(weight)


NEEDS_OF_FILES = frozenset({Need.CANDIDATES, Need.PUBLIC_IMAGES})
"""Needs for images in a file of the user's."""
_HINTS = {
    Need.LINEAR_HEAD: "`dlg` and `cpl --set label_rule=joint` search for labels instead",
    Need.IMAGE_PRIOR: "--set tv=0 leaves it out",
    Need.GAUSSIAN_LAYER: "--set matched=head uses the last layer of any network",
    Need.IMAGE_CRITERION: "--set criterion=gradient needs no images",
}
MALICIOUS_SERVER = "malicious server"
"""Oracle of attacks that only a server that has changed the model can run."""
GAUSSIAN_LAYER_ADDED = "wide Gaussian layer"
"""Condition of attacks that need a wide layer with random weights, which the server has added to the network."""
_ORACLES = {
    Need.OWN_IMAGES: "images of the same class",
    Need.CANDIDATES: "candidate images",
    Need.IMPRINT_LAYER: MALICIOUS_SERVER,
    Need.GAUSSIAN_LAYER: GAUSSIAN_LAYER_ADDED,
}


def list_oracles(needs: frozenset[Need]) -> tuple[str, ...]:
    """Return names of those `needs` that go beyond the threat model (a curious, honest server), such as "malicious server"."""
    return tuple(_ORACLES[need] for need in _ORACLES if need in needs)


def list_withheld(needs: frozenset[Need]) -> tuple[str, ...]:
    """Return names of what a server sees and an attack with these `needs` does not, such as "client names"."""
    return ("client names",) if Need.UNNAMED in needs else ()
