"""Identity of a client: a pseudonym that it sends, and a secret that it keeps."""

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
    """Identity of a client.

    pseudonym: name that is sent with every reply.
    secret:    hexadecimal text that seeds the randomness of training and defenses. The client keeps it.
    """

    pseudonym: str
    secret: str

    def _derive_seed(self, purpose: str, number: int) -> bytes:
        return hashlib.sha256(f"{self.secret}/{purpose}/{number}".encode()).digest()

    def make_generator(self, round: int, purpose: Literal["defense", "gradient", "inputs"] = "defense") -> torch.Generator:
        """Return the generator for one round, seeded from the secret so that the server cannot compute and subtract the noise.

        purpose: what draws from the generator: the "defense" of the update, the computation of the "gradient", or the mixing of
                 examples ("inputs").
        """
        seed = int.from_bytes(self._derive_seed(purpose, round)[:8], "big") >> 1
        return torch.Generator().manual_seed(seed)

    def flip_coins(self, count: int) -> NDArray[np.int64]:
        """Return (count,) fair coins, 0 or 1, which are the same at every call with this count.

        Coin i says which example of canary i, a pair of examples for an audit, the client trains on: the first for 0.
        """
        words = np.frombuffer(self._derive_seed("canaries", 0), dtype=np.uint32)
        return np.random.default_rng(words).integers(0, 2, count)

    def derive_training_seed(self, round: int) -> int:
        """Return the seed of random layers of the model, such as dropout, for one round."""
        return int.from_bytes(self._derive_seed("training", round)[:8], "big") >> 1

    def draw_order(self, epoch: int, size: int, *, shuffle: bool) -> NDArray[np.int64]:
        """Return the indices 0 .. size - 1 of the client's examples in the order of one epoch; ascending without `shuffle`.

        epoch: its number from 0, counted over all rounds of the client.
        """
        if not shuffle:
            return np.arange(size)
        words = np.frombuffer(self._derive_seed("order", epoch), dtype=np.uint32)
        return np.random.default_rng(words).permutation(size)


def draw_identity() -> ClientIdentity:
    """Return a new identity, drawn from the operating system's random source."""
    return ClientIdentity(secrets.token_hex(6), secrets.token_hex(32))


def _derive_identity(seed: str) -> ClientIdentity:
    drawn = hashlib.sha256(seed.encode()).hexdigest()
    return ClientIdentity(drawn[:12], hashlib.sha256(f"secret/{drawn}".encode()).hexdigest())


def load_or_draw(folder: Path, partition: int, *, seed: int | None) -> ClientIdentity:
    """Return the identity stored in the client's private folder; at the first use, draw and store it.

    seed: the identity is derived from this number and the partition, so that a simulation can be repeated exactly; None draws the
          identity from the operating system's random source. An identity that is stored already does not change. Like the secret,
          the seed must not be known to the server.
    """
    make_private(folder.parent)
    path = make_private(folder) / "identity.json"
    if os.path.lexists(path):
        return ClientIdentity(**read_json(path))
    identity = draw_identity() if seed is None else _derive_identity(f"client/{seed}/{partition}")
    write_json(path, {"pseudonym": identity.pseudonym, "secret": identity.secret})
    return identity
