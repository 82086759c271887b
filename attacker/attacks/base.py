"""The attack protocol and its types: cases (observations that are attacked together), needs (conditions on a case), callbacks."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from attacker.attacks.linking import Links
from attacker.attacks.networks.discrete_inputs import is_differentiable
from attacker.attacks.networks.gaussian_layer import find_gaussian_layer
from attacker.attacks.networks.input_layer import find_input_layer
from attacker.attacks.simulation.client import find_schedule
from attacker.reconstruction import Reconstruction, Slot, list_slots
from fedsim import models
from fedsim.models.imprint_layers import find_imprint
from fedsim.recording.masked_vectors import SUM_CLIENT
from fedsim.recording.observation import Observation

UNNAMED_CLIENT = "anonymous"
"""Client of observations whose senders are hidden from the attack."""
MAX_EXAMPLES = 100_000
"""Largest number of examples per update that is attacked. An attack allocates as many examples as the client reports, and a
client could report any number."""


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
        return build_case_key([observation.round for observation in self.observations], self.observations[0].client)


def build_case_key(rounds: Sequence[int], client: str) -> str:
    """Return the name of the case that consists of these rounds of one client.

    One round: "00003-CLIENT", the name of the observation. Several: "00003-00007-CLIENT-1a2b3c", with the first round, the last
    round, and a hash of all round numbers.
    """
    if len(rounds) == 1:
        return f"{rounds[0]:05d}-{client}"
    digest = hashlib.sha256(",".join(map(str, rounds)).encode()).hexdigest()[:6]
    return f"{rounds[0]:05d}-{rounds[-1]:05d}-{client}-{digest}"


class Need(Enum):
    """A condition for an attack to work on a case. The value of each member is the reason shown if the condition is not met."""

    ONE_OBSERVATION = "it attacks one round of one client at a time"
    SAME_CLIENT = "it attacks rounds of one client together"
    UNNAMED = "it attacks the updates of single clients whose names are hidden, and this is a secure sum"
    NUM_EXAMPLES = "it must know how many examples are behind the update, and the client reported no number"
    FEW_EXAMPLES = f"it reconstructs every example behind the update, and the client reported more than {MAX_EXAMPLES:,}"
    SINGLE_EXAMPLE = "it works for one example only"
    LINEAR_HEAD = (
        "it reads labels off the last linear layer, whose outputs are the logits, and this model has none, or clients do not "
        "train it"
    )
    IMPRINT_LAYER = "it reads an imprint layer, which only a malicious server puts into a model, and this model has none"
    GAUSSIAN_LAYER = (
        "it recovers features behind a wide linear layer with random Gaussian weights and no bias, followed by ReLU and the last "
        "layer, which a server must have added to the network, and this model has none"
    )
    SECURE_SUM = "it splits secure sums, and this is the update of a single client"
    INPUT_LAYER = (
        "it reads examples off the update of a linear layer with a bias that sees them directly, and this model has none"
    )
    IMAGES = "it works on images, and these data are table rows"
    IMAGE_PRIOR = "its prior is for images, and these data are table rows"
    IMAGE_CRITERION = "its criterion is for images, and these data are table rows"
    CONTINUOUS_INPUTS = (
        "it searches among real-valued inputs, and this network reads whole numbers, such as tokens or codes of categories; the "
        "check tokens-readable of `attacker audit` finds which of them occur"
    )
    OWN_IMAGES = "it starts from images of the same class, which no server has"
    CANDIDATES = "it chooses among candidate images, which the threat model does not give to the server"
    PUBLIC_IMAGES = "it trains on public images, which the user supplies"

    def is_met(self, case: Case) -> bool:
        """Return whether `case` meets this condition.

        OWN_IMAGES, CANDIDATES and PUBLIC_IMAGES concern images that the user passes to the attack, and not the case: the result
        is then True.
        """
        first = case.observations[0]
        if self is Need.ONE_OBSERVATION:
            return len(case.observations) == 1
        if self is Need.SAME_CLIENT:
            return len({observation.client for observation in case.observations}) == 1
        if self is Need.UNNAMED:
            return all(one.client == UNNAMED_CLIENT and not one.cohort for one in case.observations)
        if self is Need.NUM_EXAMPLES:
            return bool(first.num_examples)
        if self is Need.FEW_EXAMPLES:
            return (first.num_examples or 0) <= MAX_EXAMPLES
        if self is Need.SINGLE_EXAMPLE:
            return first.num_examples == 1
        if self in (Need.IMAGES, Need.IMAGE_PRIOR, Need.IMAGE_CRITERION):
            return first.data.is_image
        if self in (Need.OWN_IMAGES, *NEEDS_OF_FILES):
            return True
        if self is Need.IMPRINT_LAYER:
            return find_imprint(first.weights, first.data.size) is not None
        if self is Need.GAUSSIAN_LAYER:
            return find_gaussian_layer(models.build_layout(first.model, first.data), first.weights) is not None
        if self is Need.SECURE_SUM:
            return first.client == SUM_CLIENT
        if self is Need.CONTINUOUS_INPUTS:
            return is_differentiable(first.model, first.data)
        if self is Need.INPUT_LAYER:
            return find_input_layer(first.model, first.data) is not None
        return _has_trained_head(first)

    @property
    def mend(self) -> str:
        """A hint on which argument of the attack removes the need, such as "--set tv=0 leaves it out"; "" if there is none."""
        return _MENDS.get(self, "")


def _has_trained_head(observation: Observation) -> bool:
    """Return whether the network's last layer is linear, see `models.find_head`, and clients train it."""
    model = models.build_layout(observation.model, observation.data)
    if not models.has_head(model, observation.data):
        return False
    weight, _ = models.find_head(model, observation.data)
    return model.get_parameter(weight).requires_grad and not observation.training.is_frozen(weight)


NEEDS_OF_FILES = frozenset({Need.CANDIDATES, Need.PUBLIC_IMAGES})
"""Needs for images in a file of the user's."""
_MENDS = {
    Need.LINEAR_HEAD: "`dlg` and `cpl --set label_rule=joint` search for labels instead",
    Need.IMAGE_PRIOR: "--set tv=0 leaves it out",
    Need.GAUSSIAN_LAYER: "--set matched=head uses the last layer of any network",
    Need.IMAGE_CRITERION: "--set criterion=gradient needs no images",
}
MALICIOUS_SERVER = "malicious server"
"""Oracle of attacks that only a server that has changed the model can run."""
GAUSSIAN_LAYER_ADDED = "wide Gaussian layer"
"""Condition of attacks that need a wide layer with random weights, which the server has added to the network."""
_ORACLES = {
    Need.OWN_IMAGES: "images of the same class",
    Need.CANDIDATES: "candidate images",
    Need.IMPRINT_LAYER: MALICIOUS_SERVER,
    Need.GAUSSIAN_LAYER: GAUSSIAN_LAYER_ADDED,
}


def list_oracles(needs: frozenset[Need]) -> tuple[str, ...]:
    """Return names of those `needs` that go beyond the threat model (a curious, honest server), such as "malicious server"."""
    return tuple(_ORACLES[need] for need in _ORACLES if need in needs)


def list_withheld(needs: frozenset[Need]) -> tuple[str, ...]:
    """Return names of what a server sees and an attack with these `needs` does not, such as "client names"."""
    return ("client names",) if Need.UNNAMED in needs else ()


Progress = Callable[[int, int, str], None]
"""Callback for progress, called with (iterations done, maximum number of iterations, a short status text)."""


@dataclass(frozen=True)
class IntermediateResult:
    """The intermediate result of a running search for one case, for live display.

    x, y:  examples (N, *shape) and labels (N,), on the CPU. loss: value at x and y of the objective that the search minimises.
    slots: the places of the examples in the client's batches.
    """

    x: Tensor
    y: Tensor
    slots: tuple[Slot, ...]
    loss: float


Look = Callable[[Sequence[IntermediateResult], int, int], None]
"""Callback for live display, called with (intermediate results, iterations done, maximum number of iterations)."""


class Memory(Protocol):
    """Protocol of a storage for checkpoints, from which an attack resumes after its process was killed.

    every: number of seconds that an attack should wait between two calls of `keep`; `keep` itself does not check it.
    look:  callback for the attack's intermediate results, to be called about once a second; None if nobody watches.
    """

    @property
    def every(self) -> float: ...

    @property
    def look(self) -> Look | None: ...

    def recall(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors that were last stored under `key`, on the CPU; None if there are none."""
        ...

    def keep(self, key: str, state: Mapping[str, Tensor], *, drop: str = "") -> None:
        """Store copies of the tensors `state` under `key`, replacing those stored before, and delete the key `drop` if given."""
        ...


class Attack(Protocol):
    """Protocol of an attack: it reconstructs the training examples of a batch of cases.

    All cases of a batch are from one recording, and have equally many observations with the same numbers of examples.
    Any class with `needs`, `device`, `null` and `__call__` is an attack. The protocols `PlansRoutes` and `ReportsEffort` are
    optional.
    The registry maps a name to a factory (a function or the class itself) that takes the arguments and returns the attack.

    needs:  conditions that a case must meet. A case that does not meet them is refused with the reason, and not passed to the
            attack. With `Need.SAME_CLIENT` all usable observations of a client form one case, with `Need.UNNAMED` the usable
            observations of all clients form one case. With neither, each observation is a case. Needs for information that no
            server has, such as `Need.OWN_IMAGES`, are listed here as well.
    device: PyTorch device on which the attack computes; `AttackSpec.build` sets it.
    """

    device: str

    @property
    def needs(self) -> frozenset[Need]: ...

    def null(self) -> "Attack":
        """Return the same attack without the client's message: only its prior, its starting point and random labels are left.

        The returned attack is called with cases whose updates are all zeros (see `blind_cases`), so that it cannot use an update
        by mistake. An attack that reads updates only from the cases it is called with may therefore return itself.
        """
        ...

    def __call__(
        self, cases: Sequence[Case], *, rng: Generator, progress: Progress | None = None, memory: Memory | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction per case, in any order, each with the case's key in its field `case`.

        rng:      holds the seed. Draw random numbers from `seed_generator(rng, case, purpose)`, so that they depend on this
                  seed and on the case's key, but not on the other cases of the batch.
        progress: callback for a status line, see `Progress`.
        memory:   checkpoint storage. If it is None, or if the attack does not use it, a killed attack starts again from zero.

        After Ctrl-C, return the best results so far: at least one of them is marked as interrupted, and cases that were not begun
        have none. Raise KeyboardInterrupt if there is no result at all. Raise ValueError with the reason if a
        case cannot be attacked; the caller then passes each half of the cases on its own, until the failing case is alone.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The cost of an attack per case, from which a replay chooses the number of workers and the batch size.

    evaluations: number of gradient evaluations of one search that runs to its last step, without restarts; if several searches
                 of a case run at once, of all of these.
    vectors:     largest number of vectors of the size of the search variable that the optimiser stores at once for a search.
    searches:    number of searches of a case that run at once.
    starts:      largest number of searches of a case that run one after the other, as restarts do.
    """

    evaluations: int = 1
    vectors: int = 0
    searches: int = 1
    starts: int = 1

    @property
    def most_evaluations(self) -> int:
        """Return the number of gradient evaluations if every start is made and runs to its last step."""
        return self.evaluations * self.starts


@dataclass(frozen=True)
class RoutePlan:
    """Which routes (closed forms that an attack tries in turn) may apply to a case, judged before any is tried.

    reasons:     dict from the name of each route to why it cannot apply; "" if it may apply. Empty if there are no routes.
    evaluations: sum of the gradient evaluations of all routes that may apply, without those of a later search.
    """

    reasons: Mapping[str, str] = field(default_factory=dict)
    evaluations: int = 0


@runtime_checkable
class PlansRoutes(Protocol):
    """Protocol of an attack that plans its routes before it attacks a case. It is optional."""

    def plan(self, case: Case) -> RoutePlan: ...


@runtime_checkable
class ReportsEffort(Protocol):
    """Protocol of an attack that reports its cost. It is optional; without it, the default values of `Effort` are assumed."""

    @property
    def effort(self) -> Effort: ...


def estimate_effort(attack: object) -> Effort:
    """Return the cost that an attack reports; if none, the cost of one gradient evaluation and no stored vectors."""
    return attack.effort if isinstance(attack, ReportsEffort) else Effort()


def build_reconstruction(
    case: Case, x: Tensor, y: Tensor, *, attack: str, rng: Generator, route: str, loss: Tensor | None = None, **said: Any
) -> Reconstruction:
    """Return a `Reconstruction` of a case from examples x (N, *shape) and labels y (N,), with default values for other fields.

    A slot is the place of one example in a batch of an observation. An observation of n examples gets the next n rows of x, in
    this order in its slots, and again in each further epoch. After the last row of x, assignment starts again at the first.
    rng: its initial seed is stored. route: name of the method that found the examples. loss: the attack's own loss after each
    iteration (T,); None for a single 0.
    said: further fields of `Reconstruction` by name, which replace the defaults: confidence NaN (undecided), restarts 1, no
    oracles, 0 for iterations, evaluations and seconds. All other fields have the defaults of `Reconstruction`.
    """
    slots, start = [], 0
    for observation in case.observations:
        own = list_slots(observation.round, observation.client, find_schedule(observation)[0], observation.num_examples or len(x))
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


def find_unmet(attack: Attack, case: Case) -> list[str]:
    """Return the reasons why `attack` cannot work on `case`; empty if it can.

    An attack that needs NUM_EXAMPLES also needs FEW_EXAMPLES (at most MAX_EXAMPLES). An attack that reports another cost than the
    default `Effort`, as searches do, also needs CONTINUOUS_INPUTS (inputs are real numbers and not tokens).
    """
    return [_explain(need, case) for need in _find_missing(attack, case)]


def explain_refusal(attack: Attack, case: Case) -> str:
    """Return one message with all reasons why `attack` cannot work on `case`, and hints on arguments that help; "" if it can."""
    missing = _find_missing(attack, case)
    mends = [need.mend for need in missing if need.mend]
    return "; ".join([_explain(need, case) for need in missing] + mends)


def _find_missing(attack: Attack, case: Case) -> list[Need]:
    implied = {Need.FEW_EXAMPLES} if Need.NUM_EXAMPLES in attack.needs else set()
    if estimate_effort(attack) != Effort():
        implied.add(Need.CONTINUOUS_INPUTS)
    return [need for need in sorted(attack.needs | implied, key=lambda need: need.name) if not need.is_met(case)]


def _explain(need: Need, case: Case) -> str:
    words = str(need.value)
    zero = need is Need.NUM_EXAMPLES and case.observations[0].num_examples == 0
    return words.replace("no number", "0") if zero else words


def seed_generator(rng: Generator, case: Case, purpose: str) -> Generator:
    """Return a random generator seeded by the attack's seed, the case's key and `purpose`, and by nothing else.

    The numbers drawn for a case thus do not depend on the other cases of the batch, nor on draws for other purposes.
    """
    digest = hashlib.sha256(f"{rng.initial_seed()}/{case.key}/{purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
