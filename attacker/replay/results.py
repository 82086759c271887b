"""Files of the result of a case: its reconstruction, or the reason why there is none."""

import os
from pathlib import Path

from attacker.reconstruction import Reconstruction
from attacker.replay.checkpoints import run_of
from fedsim.recording.files import write_json


def make_reconstruction_path(folder: Path, key: str) -> Path:
    """Return the path of a case's reconstruction. folder: the attack's folder of reconstructions. key: key of the case."""
    return folder / f"{key}.safetensors"


def make_failure_path(folder: Path, key: str) -> Path:
    """Return the path of the reason why a case has no reconstruction. Arguments as for `make_reconstruction_path`."""
    return folder / f"{key}.failed.json"


def is_done(folder: Path, key: str) -> bool:
    """Return whether a case has a reconstruction that can be read and was not interrupted."""
    path = make_reconstruction_path(folder, key)
    if not os.path.lexists(path):
        return False
    try:
        return not Reconstruction.read(path).interrupted
    except ValueError:
        return False


def write_failure(folder: Path, key: str, reason: str) -> None:
    """Write the reason why a case has no reconstruction into KEY.failed.json in `folder`, which holds the reconstructions."""
    write_json(make_failure_path(folder, key), {"case": key, "reason": reason}, below=run_of(folder))
