"""Version of the code that computes answers: the version of the package, and a digest of the sources of attacks and networks.

The digest tells apart states of a working copy that have the same version number.
"""

import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attacker.attacks
import defenses
from fedsim import models

SOURCE_FOLDERS = tuple(Path(package.__file__ or "").parent for package in (attacker.attacks, defenses, models))
"""Folders of the packages that decide what an attack answers: attacks, with their calibration, defenses and networks."""
SOURCE_SUFFIXES = (".py", ".json", ".safetensors", ".toml")


@cache
def identify_version() -> str:
    """Return the version of the package and a digest of its sources, such as "1.0.0+3f2a9c01".

    The sources are read once per process, so that an edit of a file after that changes nothing.
    """
    digest = hashlib.sha256()
    for folder in SOURCE_FOLDERS:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in SOURCE_SUFFIXES):
            digest.update(f"{folder.name}/{path.relative_to(folder)}\n".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    try:
        number = version("fedleak")
    except PackageNotFoundError:
        number = "unknown"
    return f"{number}+{digest.hexdigest()[:8]}"


def explain_reuse(codes: Sequence[str], kept: int, folder: Path) -> str:
    """Return a sentence on answers in `folder` that another version of the code gave and a replay keeps; "" if there are none.

    codes: the versions that wrote the folder, this one included. kept: number of cases that had been finished before.
    """
    others = [code for code in codes if code != identify_version()]
    if not others or not kept:
        return ""
    return (
        f"{kept} finished case{'s' * (kept != 1)} in {folder}: all or some by {' and '.join(others)}, and this is "
        f"{identify_version()}, which may answer otherwise; they are kept: to attack them again, delete this folder"
    )
