"""Recordings on disk: observations of the server, written by the federation and read by the attacker."""

from fedsim.recording.codec import Payload
from fedsim.recording.manifest import Manifest
from fedsim.recording.observation import Column, DataSpec, ModelSpec, Observation, Training
from fedsim.recording.reader import DamagedFile, Recording, Row
from fedsim.recording.writer import Recorder, Reply

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
