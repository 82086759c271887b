"""Recordings on disk of what the server sends and receives in each round: their format, their writer and their reader."""

from fedsim.recording.codec import Payload
from fedsim.recording.index import Row
from fedsim.recording.manifest import Manifest
from fedsim.recording.observation import Column, DataSpec, ModelSpec, Observation
from fedsim.recording.reader import Recording, find_recording, find_run
from fedsim.recording.safe_files import DamagedFile
from fedsim.recording.training import Training
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
    "find_recording",
    "find_run",
]
