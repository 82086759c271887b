"""Identity of a replay, the folder named after it, and the version of the code that computes answers.

The identity is made of recording, attack, seed and oracles (information that no server has). The version is that of the package,
with a digest of the sources of attacks and networks, which tells apart states of a working copy with the same version number.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from pathlib import Path
from typing import Any

import attacker.attacks
import defenses
from attacker.attacks import ATTACKS, AttackSpec
from attacker.attacks.arguments import list_files
from fedsim import models
from fedsim.models.source_code import identify_code
from fedsim.recording import Recording

SOURCE_FOLDERS = tuple(Path(package.__file__ or "").parent for package in (attacker.attacks, defenses, models))
"""Folders of the packages that decide what an attack answers: attacks, with their calibration, defenses and networks."""
SOURCE_SUFFIXES = (".py", ".json", ".safetensors", ".toml")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The facts that the folder of a replay is named after, as plain data, so that replays that differ in them do not share one.

    The device, the rounds and clients to attack, and the versions of PyTorch and of this project are not among them;
    `attack.json` states the version of this project (`identify_version`), and a replay that keeps answers of another one says so.
    arguments: all arguments of the attack, including defaults, since defaults may change between versions.
    oracles:   names of the oracles (information that no server has, such as true labels) that the user gave to the attack.
    truth:     digest of the clients' true examples that oracles read; "" without oracles.
    recording: fingerprint of the recording.
    files:     digests of the files that arguments of the attack name.
    network, attack_code: `module:name@digest` of the code of network and attack if it is not part of this project, otherwise "".
    """

    spec: AttackSpec
    arguments: dict[str, Any]
    seed: int
    oracles: tuple[str, ...]
    recording: str
    network: str = ""
    attack_code: str = ""
    truth: str = ""
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, recording: Recording, spec: AttackSpec, *, seed: int, oracles: tuple[str, ...], truth: str = "") -> "Identity":
        """Return the identity of a replay.

        Raises ValueError if the recording's network is code outside of this project that the user has not allowed
        (`models.admit`).
        """
        factory = ATTACKS[spec.name]
        bound = signature(factory).bind(**spec.arguments)
        bound.apply_defaults()
        return cls(
            spec=spec,
            arguments=json.loads(json.dumps(bound.arguments, default=repr)),
            seed=seed,
            oracles=oracles,
            recording=recording.compute_fingerprint(),
            network=models.identify_network(recording.manifest.model),
            attack_code=identify_code(factory),
            truth=truth if oracles else "",
            files=tuple(_hash_file(Path(bound.arguments[name])) for name in list_files(factory) if bound.arguments.get(name)),
        )

    @property
    def digest(self) -> str:
        """Return a hash of all fields, as 8 hexadecimal digits."""
        everything = [str(self.spec), self.arguments, self.seed, self.oracles, self.recording, self.network, self.attack_code]
        values = [*everything, *([self.truth] if self.truth else []), *self.files]
        return hashlib.sha256(json.dumps(values, default=repr).encode()).hexdigest()[:8]

    def make_path(self, out: Path) -> Path:
        """Return the replay's folder in `out`, the folder of all reconstructions. It need not exist."""
        return out / f"{self.spec.name.rpartition(':')[2]}{'-null' if self.spec.null else ''}-{self.digest}"


def _hash_file(path: Path) -> str:
    """Return the digest of a file's content; "" if it cannot be read, which the attack reports."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return ""


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
