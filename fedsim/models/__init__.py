"""Models and losses by name. Both are public knowledge."""

from fedsim.models.building import MAX_PARAMETERS, MODELS, admit, buffer_names, build, head, identify_network, layout
from fedsim.models.concessions import concessions, require_mode, unsimulated
from fedsim.models.foreign import ModuleSpec
from fedsim.models.losses import loss_of, outputs_for, predictions, probabilities

__all__ = [
    "MAX_PARAMETERS",
    "MODELS",
    "ModuleSpec",
    "admit",
    "buffer_names",
    "build",
    "concessions",
    "head",
    "identify_network",
    "layout",
    "loss_of",
    "outputs_for",
    "predictions",
    "probabilities",
    "require_mode",
    "unsimulated",
]
