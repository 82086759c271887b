"""Who a client is: a pseudonym that it sends, and a secret that never leaves it."""

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.recording.files import make_private, write_json
from fedsim.recording.safe_files import read_json


@dataclass(frozen=True)
class ClientIdentity:
    """pseudonym: sent with every reply. secret: seeds all that is random on the client, in hexadecimal."""

    pseudonym: str
    secret: str

    def _seed(self, purpose: str, number: int) -> bytes:
        return hashlib.sha256(f"{self.secret}/{purpose}/{number}".encode()).digest()

    def generator(self, round: int, purpose: Literal["defense", "gradient", "inputs"] = "defense") -> torch.Generator:
        """The randomness of the defenses in one round. Seeded from the round alone, the server could subtract the noise.

        purpose: defense for what is done to the update, gradient and inputs for what is done while it is computed.
        """
        seed = int.from_bytes(self._seed(purpose, round)[:8], "big") >> 1
        return torch.Generator().manual_seed(seed)

    def training_seed(self, round: int) -> int:
        """What the randomness within the model, dropout for one, is seeded from in one round."""
        return int.from_bytes(self._seed("training", round)[:8], "big") >> 1

    def order(self, epoch: int, size: int, *, shuffle: bool) -> NDArray[np.int64]:
        """The order of `size` examples in one epoch."""
        if not shuffle:
            return np.arange(size)
        words = np.frombuffer(self._seed("order", epoch), dtype=np.uint32)
        return np.random.default_rng(words).permutation(size)


def draw() -> ClientIdentity:
    """A new identity, from the system's randomness."""
    return ClientIdentity(secrets.token_hex(6), secrets.token_hex(32))


def _seeded(seed: str) -> ClientIdentity:
    drawn = hashlib.sha256(seed.encode()).hexdigest()
    return ClientIdentity(drawn[:12], hashlib.sha256(f"secret/{drawn}".encode()).hexdigest())


def load_or_draw(folder: Path, partition: int, *, seed: int | None) -> ClientIdentity:
    """The identity in the client's private folder, drawn at the first use.

    seed: draws it from this number and the partition instead of from the system, so that a simulation repeats exactly.
    It is the experimenter's, like the secret, and no part of what a server distributes.
    """
    make_private(folder.parent)
    path = make_private(folder) / "identity.json"
    if os.path.lexists(path):
        return ClientIdentity(**read_json(path))
    identity = draw() if seed is None else _seeded(f"client/{seed}/{partition}")
    write_json(path, {"pseudonym": identity.pseudonym, "secret": identity.secret})
    return identity
