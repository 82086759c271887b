"""The observations that an attack uses together, their name, and random numbers that depend on it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from attacker.attacks.linking import Links
from fedsim.recording.observation import Observation

UNNAMED_CLIENT = "anonymous"
"""Client of observations whose senders are hidden from the attack."""


@dataclass(frozen=True)
class Case:
    """The observations that an attack uses together: one or more rounds of one client, ordered by round.

    For an attack with `Need.UNNAMED` they are the observations of all clients, each under the name `UNNAMED_CLIENT`, in an order
    within a round that says nothing about the clients.

    known_labels: the true labels, (N,); the labels of several observations are concatenated in their order. No server knows them:
                  they are set only if the user asked for the labels.
    known_logits: the logits (N, K) of the true examples of the first observation under the weights that were sent; set only if
                  the user asked for the logits.
    links:        which batch positions of the observations hold the same example; None if this is not known.
    """

    observations: tuple[Observation, ...]
    known_labels: Tensor | None = None
    known_logits: Tensor | None = None
    links: Links | None = None

    @property
    def key(self) -> str:
        """The name of the case, see `build_case_key`; its files are named after it."""
        return build_case_key(self.rounds, self.observations[0].client)

    @property
    def rounds(self) -> list[int]:
        """The round of each observation."""
        return [observation.round for observation in self.observations]


def build_case_key(rounds: Sequence[int], client: str) -> str:
    """Return the name of the case that consists of these rounds of one client.

    One round: "00003-CLIENT", the name of the observation. Several: "00003-00007-CLIENT-1a2b3c", with the first round, the last
    round, and a hash of all round numbers.
    """
    if len(rounds) == 1:
        return f"{rounds[0]:05d}-{client}"
    digest = hashlib.sha256(",".join(map(str, rounds)).encode()).hexdigest()[:6]
    return f"{rounds[0]:05d}-{rounds[-1]:05d}-{client}-{digest}"


def seed_generator(rng: Generator, case: Case, purpose: str) -> Generator:
    """Return a random generator seeded by the attack's seed, the case's key and `purpose`, and by nothing else.

    The numbers drawn for a case thus do not depend on the other cases of the batch, nor on draws for other purposes.
    """
    digest = hashlib.sha256(f"{rng.initial_seed()}/{case.key}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
