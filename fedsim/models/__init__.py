"""Models and losses that experiments choose by name, and checks of models. Model and loss of an experiment are public."""

from fedsim.models.building import (
    MAX_PARAMETERS,
    MODELS,
    admit,
    build,
    build_layout,
    find_head,
    has_head,
    identify_network,
    list_buffers,
)
from fedsim.models.concessions import adopt_precision, check_loss, list_concessions, list_unsimulated, require_mode
from fedsim.models.foreign import ModuleSpec, find_client_types
from fedsim.models.losses import find_loss, predict_classes, predict_probabilities

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
    "list_concessions",
    "list_unsimulated",
    "predict_classes",
    "predict_probabilities",
    "require_mode",
]
