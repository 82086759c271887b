"""Models and losses that experiments choose by name, and checks of models. Model and loss of an experiment are public."""

from fedsim.models.building import MAX_PARAMETERS, admit, build, build_layout, find_head, has_head, identify_network, list_buffers
from fedsim.models.built_in import MODELS
from fedsim.models.foreign import ModuleSpec, find_client_types
from fedsim.models.losses import find_loss, predict_classes, predict_probabilities
from fedsim.models.network_warnings import adopt_precision, check_loss, list_unsimulated, list_warnings, require_mode

__all__ = [
    "MAX_PARAMETERS",
    "MODELS",
    "ModuleSpec",
    "admit",
    "adopt_precision",
    "build",
    "build_layout",
    "check_loss",
    "find_client_types",
    "find_head",
    "find_loss",
    "has_head",
    "identify_network",
    "list_buffers",
    "list_unsimulated",
    "list_warnings",
    "predict_classes",
    "predict_probabilities",
    "require_mode",
]
