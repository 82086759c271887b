"""The protocol of an attack and of the callbacks that it is passed, and checks whether an attack can work on a case."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Generator, Tensor

from attacker.attacks.cases import Case
from attacker.attacks.needs import Need
from attacker.reconstruction import Reconstruction, Slot

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
    Any class with `needs`, `device`, `null` and `__call__` is an attack. The protocols `PlansRoutes`, `ReportsEffort` and
    `Measurable` are optional.
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


def check_members(name: str, attack: Any) -> None:
    """Raise ValueError unless `attack`, registered as `name`, has `needs`, `null` and `__call__`, and `needs` is a set."""
    missing = [member for member in ("needs", "null", "__call__") if not hasattr(attack, member)]
    if missing:
        members = "needs, device, null and __call__"
        raise ValueError(f"{name}: an attack has the members {members}, and this {type(attack).__name__} has no {missing[0]}")
    if not isinstance(attack.needs, frozenset | set):
        raise ValueError(f"{name}: needs must be a frozenset of attacker.attacks.Need, got {attack.needs!r}")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The cost of an attack per case, from which a replay chooses the number of workers and the batch size.

    evaluations: number of gradient evaluations of one search that runs to its last step, without restarts; if several searches
                 of a case run at once, of all of these.
    vectors:     largest number of vectors of the size of the search variable that the optimiser stores at once for a search.
    searches:    number of searches of a case that run at once.
    starts:      largest number of searches of a case that run one after the other, as restarts do.
    local_steps: which local steps of a client are simulated one by one, which takes memory for each: "one_batch" for none,
                 "simulated" for all, "auto" for those that are on all examples of a client, or whose order of examples is
                 searched for.
    """

    evaluations: int = 1
    vectors: int = 0
    searches: int = 1
    starts: int = 1
    local_steps: str = "one_batch"

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


@runtime_checkable
class Measurable(Protocol):
    """Protocol of an attack that can measure the time of one of the evaluations that `Effort` counts. It is optional."""

    def time_evaluation(self, case: Case) -> float:
        """Return the seconds of processor time, or on a GPU of wall-clock time, of one evaluation for `case` alone.

        May raise any error if the attack cannot be used on the case.
        """
        ...


def estimate_effort(attack: object) -> Effort:
    """Return the cost that an attack reports; if none, the cost of one gradient evaluation and no stored vectors."""
    return attack.effort if isinstance(attack, ReportsEffort) else Effort()


def find_unmet(attack: Attack, case: Case) -> list[str]:
    """Return the reasons why `attack` cannot work on `case`; empty if it can.

    An attack that needs NUM_EXAMPLES also needs FEW_EXAMPLES (at most MAX_EXAMPLES). An attack that reports another cost than the
    default `Effort`, as searches do, also needs CONTINUOUS_INPUTS (inputs are real numbers and not tokens).
    """
    return [_explain(need, case) for need in _find_missing(attack, case)]


def explain_refusal(attack: Attack, case: Case) -> str:
    """Return one message with all reasons why `attack` cannot work on `case`, and hints on arguments that help; "" if it can."""
    missing = _find_missing(attack, case)
    hints = [need.hint for need in missing if need.hint]
    return "; ".join([_explain(need, case) for need in missing] + hints)


def _find_missing(attack: Attack, case: Case) -> list[Need]:
    implied = {Need.FEW_EXAMPLES} if Need.NUM_EXAMPLES in attack.needs else set()
    if estimate_effort(attack) != Effort():
        implied.add(Need.CONTINUOUS_INPUTS)
    return [need for need in sorted(attack.needs | implied, key=lambda need: need.name) if not need.is_met(case)]


def _explain(need: Need, case: Case) -> str:
    words = str(need.value)
    zero = need is Need.NUM_EXAMPLES and case.observations[0].num_examples == 0
    return words.replace("no number", "0") if zero else words
