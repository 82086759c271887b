"""The attack protocol: cases in, reconstructions out, and the needs, progress and memory that go with it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from attacker.attacks.linking import Links
from attacker.attacks.simulation.client import schedule
from attacker.reconstruction import Reconstruction, Slot, slots_of
from fedsim import models
from fedsim.recording.observation import Observation

MAX_EXAMPLES = 100_000
"""Most examples behind one update that are attacked: a client reports any number it likes, and an attack makes as many."""


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
    """What an attack assumes of a case. The value says in words what is wrong with a case that does not give it."""

    ONE_OBSERVATION = "it attacks one round of one client at a time"
    SAME_CLIENT = "it attacks rounds of one client together"
    NUM_EXAMPLES = "it must know how many examples are behind the update, and the client reported no number"
    FEW_EXAMPLES = f"it makes every example behind the update, and the client reported more than {MAX_EXAMPLES:,}"
    SINGLE_EXAMPLE = "it works for one example only"
    LINEAR_HEAD = "it reads labels off the last linear layer, and this model has none"
    IMAGES = "it works on images, and these data are rows"
    IMAGE_PRIOR = "its prior is one of images, and these data are rows"
    IMAGE_CRITERION = "its criterion is one of images, and these data are rows"
    OWN_IMAGES = "it starts from images of the same class, which no server has"

    def met_by(self, case: Case) -> bool:
        """Return whether `case` gives what is needed. OWN_IMAGES come from the user, so every case meets it."""
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
        if self in (Need.IMAGES, Need.IMAGE_PRIOR, Need.IMAGE_CRITERION):
            return first.data.is_image
        if self is Need.OWN_IMAGES:
            return True
        model = models.layout(first.model, first.data)
        return any(isinstance(module, nn.Linear) for module in model.modules())

    @property
    def mend(self) -> str:
        """The argument of the attack that does without what is needed; empty where there is none."""
        return _MENDS.get(self, "")


_MENDS = {
    Need.IMAGE_PRIOR: "--set tv=0 leaves it out",
    Need.IMAGE_CRITERION: "--set criterion=gradient does without",
}
_ORACLES = {Need.OWN_IMAGES: "images of the same class"}


def oracles_of(needs: frozenset[Need]) -> tuple[str, ...]:
    """Return the names of the oracles among `needs`: assumptions beyond the threat model, which are printed in every row."""
    return tuple(_ORACLES[need] for need in _ORACLES if need in needs)


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
    """Reconstructs the examples behind the observations of many cases of equal shape at once.

    Any class with these four members is an attack: planning, replay, checkpoints, scoring, reports and the service use nothing
    else of it. It is registered under a name as a function (or the class itself) from arguments to the attack.

    needs:  what it assumes of a case. A case that does not give it is refused in words, and the attack is not called with it.
            With `Need.SAME_CLIENT` it is given all observations of a client as one case, else one observation a case.
            Oracles, such as `Need.OWN_IMAGES`, are named here as well.
    device: where it computes, as PyTorch names devices. `AttackSpec.build` sets it once, before anything else is called.
    """

    device: str

    @property
    def needs(self) -> frozenset[Need]: ...

    def null(self) -> "Attack":
        """Return the same attack with the gradient withheld: its prior, its start and random labels, and nothing that was sent.

        Whatever it returns is called with cases whose updates are all zeros (`blinded`), so that it cannot read them by mistake.
        An attack that looks at updates only through its cases may return itself.
        """
        ...

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction for each case, in any order, with the case's key as `case`.

        rng:    seeds the attack; what one case draws depends on its key and on nothing of its neighbours (`generator_for`).
        memory: where the attack keeps what it needs to go on after it was killed; None, or left unused, it starts again.

        After Ctrl-C it returns the best so far, where it has any: at least one answer then says that it was interrupted, and
        cases that it had not come to have none. One that has no answer at all raises KeyboardInterrupt. A case that cannot be
        attacked raises ValueError in words; the others are then attacked without it.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What an attack costs, for a replay to choose the number of workers and of cases at once.

    evaluations: of the gradient, by a search of one start that comes to its end. vectors: as long as an example's latent, that
    its optimiser keeps of each case.
    """

    evaluations: int = 1
    vectors: int = 0


@runtime_checkable
class Estimated(Protocol):
    """An attack that says what it costs. This is optional: one that does not is taken to cost one evaluation."""

    @property
    def effort(self) -> Effort: ...


def effort_of(attack: object) -> Effort:
    """Return what an attack says that it costs, or the least."""
    return attack.effort if isinstance(attack, Estimated) else Effort()


def reconstruction_of(
    case: Case, x: Tensor, y: Tensor, *, attack: str, rng: Generator, route: str, loss: Tensor | None = None, **said: Any
) -> Reconstruction:
    """Return examples x (N, *shape) and labels y (N,) as the answer to a case, with everything else at its least.

    Example i is taken to be the i-th of the case's observations, one after the other; where there are fewer examples than places,
    they are used again from the first one. confidence is undecided (NaN), loss is 0 where none is given.
    said: further fields of `Reconstruction`, in place of these.
    """
    slots, start = [], 0
    for observation in case.observations:
        own = slots_of(observation.round, observation.client, schedule(observation)[0], observation.num_examples or len(x))
        slots += [replace(slot, example=(start + slot.example) % len(x)) for slot in own]
        start += observation.num_examples or len(x)
    least: dict[str, Any] = {
        "confidence": torch.full((len(x),), float("nan")),
        "slots": tuple(slots),
        "iterations": 0,
        "evaluations": 0,
        "restarts": 1,
        "seconds": 0.0,
        "oracles": (),
    }
    return Reconstruction(
        case=case.key,
        x=x.detach().float().cpu(),
        y=y.cpu(),
        loss=torch.zeros(1) if loss is None else loss,
        route=route,
        attack=attack,
        seed=rng.initial_seed(),
        **{**least, **said},
    )


def unmet(attack: Attack, case: Case) -> list[str]:
    """Return why `attack` cannot work on `case`, in words; empty where it can. NUM_EXAMPLES implies FEW_EXAMPLES."""
    return [_words(need, case) for need in _missing(attack, case)]


def refused(attack: Attack, case: Case) -> str:
    """Return why an attack that the user named cannot work on `case`, with the argument that mends it; empty where it can."""
    missing = _missing(attack, case)
    mends = [need.mend for need in missing if need.mend]
    return "; ".join([_words(need, case) for need in missing] + mends)


def _missing(attack: Attack, case: Case) -> list[Need]:
    implied = {Need.FEW_EXAMPLES} if Need.NUM_EXAMPLES in attack.needs else set()
    return [need for need in sorted(attack.needs | implied, key=lambda need: need.name) if not need.met_by(case)]


def _words(need: Need, case: Case) -> str:
    words = str(need.value)
    zero = need is Need.NUM_EXAMPLES and case.observations[0].num_examples == 0
    return words.replace("no number", "0") if zero else words


def generator_for(rng: Generator, case: Case, purpose: str) -> Generator:
    """The randomness of one case for one purpose: neither its neighbours nor its other draws change it."""
    digest = hashlib.sha256(f"{rng.initial_seed()}/{case.key}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
