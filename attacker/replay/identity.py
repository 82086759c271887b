"""What defines the results of a replay, and the folder that is named after it."""

import hashlib
import json
import os
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

from attacker.attacks import ATTACKS, AttackSpec
from attacker.replay.attack_facts import MAX_BYTES
from fedsim import models
from fedsim.models.source_code import identify_code
from fedsim.recording import DamagedFile, Recording
from fedsim.recording.safe_files import read_json


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Everything that defines the results of a replay, as plain data; two replays that differ in any of it share no folder.

    arguments: of the attack, with its defaults: results of an earlier default are not those of a later one.
    oracles:   names of those that the user asked for. recording: its fingerprint. truth: digest of what oracles are told from.
    network, attack_code: `module:name@digest` of code that is not this project's; "" for its own.
    """

    spec: AttackSpec
    arguments: dict[str, Any]
    seed: int
    oracles: tuple[str, ...]
    recording: str
    network: str = ""
    attack_code: str = ""
    truth: str = ""

    @classmethod
    def of(cls, recording: Recording, spec: AttackSpec, *, seed: int, oracles: tuple[str, ...], truth: str = "") -> "Identity":
        """The identity of a replay. Raises ValueError where the recording's network is code that was not admitted."""
        factory = ATTACKS[spec.name]
        bound = signature(factory).bind(**spec.arguments)
        bound.apply_defaults()
        return cls(
            spec=spec,
            arguments=json.loads(json.dumps(bound.arguments, default=repr)),
            seed=seed,
            oracles=oracles,
            recording=recording.fingerprint(),
            network=models.identify_network(recording.manifest.model),
            attack_code=identify_code(factory),
            truth=truth if oracles else "",
        )

    @property
    def digest(self) -> str:
        """Of all that is in it."""
        everything = [str(self.spec), self.arguments, self.seed, self.oracles, self.recording, self.network, self.attack_code]
        return _digest([*everything, self.truth] if self.truth else everything)

    def folder(self, out: Path) -> Path:
        """The replay's own folder in `out`, that of all reconstructions.

        A folder that was written before arguments and code were part of the name is gone on with, unless the network or the
        attack is somebody else's: it does not say which code it was made with, so that it is only read by scoring and report.
        """
        name = f"{self.spec.name.rpartition(':')[2]}{'-null' if self.spec.null else ''}"
        before = out / f"{name}-{_digest([str(self.spec), self.seed, self.oracles, self.recording])}"
        if not self.network and not self.attack_code and not self.truth and _written_by(before) in ("", self.digest):
            return before
        return out / f"{name}-{self.digest}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=repr).encode()).hexdigest()[:8]


def _written_by(folder: Path) -> str | None:
    """The identity of the replay that wrote `folder`; "" where it does not say, None where there is no such folder."""
    path = folder / "attack.json"
    if not os.path.lexists(path):
        return None
    try:
        told = read_json(path, limit=MAX_BYTES)
    except DamagedFile:
        return ""
    return str(told.get("identity", "")) if isinstance(told, dict) else ""
