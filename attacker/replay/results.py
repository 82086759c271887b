"""Paths of an attack's results, and the result of a case: its reconstruction, or the reason why there is none."""

import os
from pathlib import Path

from attacker.reconstruction import Reconstruction
from fedsim.recording.files import write_json


def get_run_folder(folder: Path) -> Path:
    """Return the run that an attack's folder RUN/reconstructions/ATTACK belongs to, two levels above it.

    Callers pass this run as `below` to the functions that write files, which follow no symbolic links below that folder.
    """
    return folder.parent.parent


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
    write_json(make_failure_path(folder, key), {"case": key, "reason": reason}, below=get_run_folder(folder))
