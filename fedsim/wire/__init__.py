"""The contract between the federation and the attacker."""

from fedsim.wire.codec import Payload
from fedsim.wire.manifest import Manifest
from fedsim.wire.observation import Column, DataSpec, ModelSpec, Observation, Training
from fedsim.wire.recorder import Recorder, Reply
from fedsim.wire.recording import DamagedFile, Recording, Row

__all__ = [
    "Column",
    "DamagedFile",
    "DataSpec",
    "Manifest",
    "ModelSpec",
    "Observation",
    "Payload",
    "Recorder",
    "Recording",
    "Reply",
    "Row",
    "Training",
]
