"""Identity of a replay: recording, attack, seed and oracles (information that no server has), and the folder named after them."""

import hashlib
import json
import os
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from attacker.attacks import ATTACKS, AttackSpec
from attacker.attacks.arguments import list_files
from attacker.replay.metadata_reader import MAX_BYTES
from fedsim import models
from fedsim.models.source_code import identify_code
from fedsim.recording import DamagedFile, Recording
from fedsim.recording.safe_files import read_json

ATTACKS_WITH_NEW_DEFAULTS = frozenset({"inverting_gradients"})
"""Attacks whose defaults have changed since versions that wrote no identity into `attack.json`."""


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
        return _hash_value([*everything, *([self.truth] if self.truth else []), *self.files])

    def make_path(self, out: Path) -> Path:
        """Return the replay's folder in `out`, the folder of all reconstructions. It need not exist.

        Its name ends with `digest`. If an older version of this project wrote a folder for this replay under another name, that
        folder is returned, so that the replay is resumed. Such folders are looked for only if the fields `network`,
        `attack_code`, `truth` and `files` are empty, and without an identity not for `ATTACKS_WITH_NEW_DEFAULTS`.
        """
        name = f"{self.spec.name.rpartition(':')[2]}{'-null' if self.spec.null else ''}"
        before = out / f"{name}-{_hash_value([str(self.spec), self.seed, self.oracles, self.recording])}"
        others = (self.network, self.attack_code, self.truth, self.files)
        same = {self.digest} | (set() if self.spec.name in ATTACKS_WITH_NEW_DEFAULTS else {""})
        if not any(others) and _read_identity(before) in same:
            return before
        return out / f"{name}-{self.digest}"


def _hash_file(path: Path) -> str:
    """Return the digest of a file's content; "" if it cannot be read, which the attack reports."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError:
        return ""


def _hash_value(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:8]


def _read_identity(folder: Path) -> str | None:
    """Return the digest of the replay that wrote `folder`, from its `attack.json`.

    It is "" if the file holds no digest or is damaged, and None if there is no such file.
    """
    path = folder / "attack.json"
    if not os.path.lexists(path):
        return None
    try:
        content = read_json(path, limit=MAX_BYTES)
    except DamagedFile:
        return ""
    return str(content.get("identity", "")) if isinstance(content, dict) else ""
