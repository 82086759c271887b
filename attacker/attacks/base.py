"""What an attack is: a function from cases to reconstructions, and from nothing else."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.linking import Links
from attacker.reconstruction import Reconstruction, Slot
from fedsim import models
from fedsim.recording.observation import Observation

MAX_EXAMPLES = 100_000
"""Behind one update. A client reports any number it likes, and an attack makes as many examples."""


@dataclass(frozen=True)
class Case:
    """Observations that one attack run uses together: of one client, in the order of rounds.

    known_labels: an oracle, only where asked for by name: the true labels, which no server knows; of several observations, one
                  after the other.
    known_logits: another oracle: (N, K), what the model sent made of the true examples of the first observation.
    links:        which examples the observations share, where that is known; an attack of several rounds finds them itself.
    """

    observations: tuple[Observation, ...]
    known_labels: Tensor | None = None
    known_logits: Tensor | None = None
    links: Links | None = None

    @property
    def key(self) -> str:
        """Names the case within its recording, and its files."""
        return case_key([observation.round for observation in self.observations], self.observations[0].client)


def case_key(rounds: Sequence[int], client: str) -> str:
    """The name of a case of one client: of one round that of its observation, of several one that tells them from others."""
    if len(rounds) == 1:
        return f"{rounds[0]:05d}-{client}"
    digest = hashlib.sha256(",".join(map(str, rounds)).encode()).hexdigest()[:6]
    return f"{rounds[0]:05d}-{rounds[-1]:05d}-{client}-{digest}"


class Need(Enum):
    """What an attack assumes of a case; the value says it in words."""

    ONE_OBSERVATION = "it attacks one round of one client at a time"
    SAME_CLIENT = "it attacks rounds of one client together"
    NUM_EXAMPLES = "it must know how many examples are behind the update, and the client reported no number"
    FEW_EXAMPLES = f"it makes every example behind the update, and the client reported more than {MAX_EXAMPLES:,}"
    SINGLE_EXAMPLE = "it works for one example only"
    LINEAR_HEAD = "it reads labels off the last linear layer, and this model has none"
    IMAGES = "its prior is one of images, and these data are rows"

    def met_by(self, case: Case) -> bool:
        """Whether `case` gives what is needed."""
        first = case.observations[0]
        if self is Need.ONE_OBSERVATION:
            return len(case.observations) == 1
        if self is Need.SAME_CLIENT:
            return len({observation.client for observation in case.observations}) == 1
        if self is Need.NUM_EXAMPLES:
            return bool(first.num_examples)
        if self is Need.FEW_EXAMPLES:
            return (first.num_examples or 0) <= MAX_EXAMPLES
        if self is Need.SINGLE_EXAMPLE:
            return first.num_examples == 1
        if self is Need.IMAGES:
            return first.data.is_image
        model = models.layout(first.model, first.data)
        return any(isinstance(module, nn.Linear) for module in model.modules())


Progress = Callable[[int, int, str], None]
"""Is called with (iterations done, iterations at most, a few words)."""


@dataclass(frozen=True)
class Sight:
    """What a search under way has come to for one case. x: (N, *shape), y: (N,), both on the CPU; see `Reconstruction`."""

    x: Tensor
    y: Tensor
    slots: tuple[Slot, ...]
    loss: float


Look = Callable[[Sequence[Sight], int, int], None]
"""Is called with what there is to see, iterations done, and iterations at most."""


class Memory(Protocol):
    """Outlives a process that is killed: what an attack needs to go on where it was, bit for bit, as tensors by name.

    every: seconds that an attack lets pass between two calls of `keep`. look: who watches it, and is shown about once a second
    what emerges; None for nobody.
    """

    @property
    def every(self) -> float: ...

    @property
    def look(self) -> Look | None: ...

    def recall(self, key: str) -> dict[str, Tensor] | None:
        """What was last kept under `key`, on the CPU; None where that is nothing."""
        ...

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        """Keep `state` under `key` in place of what was there; what is under other keys stays, save `drop`. Takes copies."""
        ...


class Attack(Protocol):
    """Reconstructs many cases of equal shape at once.

    rng:    seeds the attack; what one case draws depends on its key and on nothing of its neighbours.
    memory: of these cases, where the attack keeps what it needs to go on after it was killed; one without it starts again.

    After Ctrl-C it returns the best so far, where it has any: at least one answer then says that it was interrupted, and cases
    that it had not come to have none. One that has no answer at all raises KeyboardInterrupt.

    An attack with the attribute `whole_clients` set gets all observations of a client as one case, others one at a time.
    """

    @property
    def needs(self) -> frozenset[Need]: ...

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]: ...


def unmet(attack: Attack, case: Case) -> list[str]:
    """Why `attack` cannot work on `case`, in words; empty where it can. What needs NUM_EXAMPLES needs FEW_EXAMPLES, too."""
    implied = {Need.FEW_EXAMPLES} if Need.NUM_EXAMPLES in attack.needs else set()
    return [_words(need, case) for need in sorted(attack.needs | implied, key=lambda need: need.name) if not need.met_by(case)]


def _words(need: Need, case: Case) -> str:
    words = str(need.value)
    zero = need is Need.NUM_EXAMPLES and case.observations[0].num_examples == 0
    return words.replace("no number", "0") if zero else words


def refused(attack: Attack, case: Case) -> str:
    """Why an attack that the user named cannot work on `case`, with the argument that mends it, if any; empty where it can."""
    reasons = unmet(attack, case)
    if Need.IMAGES.value in reasons:
        reasons.append("--set criterion=gradient does without" if hasattr(attack, "criterion") else "--set tv=0 leaves it out")
    return "; ".join(reasons)


def generator_for(rng: Generator, case: Case, purpose: str) -> Generator:
    """The randomness of one case for one purpose: neither its neighbours nor its other draws change it."""
    digest = hashlib.sha256(f"{rng.initial_seed()}/{case.key}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
