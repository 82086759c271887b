"""Measured times of gradient evaluations, which correct estimates from the sizes of network and batches."""

from collections.abc import Callable, Sequence
from pathlib import Path

from attacker.attacks import Attack, AttackSpec, Case
from attacker.attacks.timing import time_evaluation
from attacker.replay.cases import PlannedCase
from attacker.replay.example_counts import add_estimate
from fedsim.recording import DamagedFile, Recording

ITERATION_ARGUMENTS = frozenset({"steps", "restarts", "patience", "give_up"})
"""Arguments of attacks that change the number of evaluations, and hardly the time of one."""
MAX_MEASURED_SECONDS = 2.0
"""Time in seconds of an evaluation above which no other attack is measured on updates of the same size: its estimate is corrected
by the same factor."""
Key = tuple[Path, str, int, str, bool]
"""Folder and manifest of a recording, number of examples of an update, device, and whether a null is measured, whose evaluations
compute no gradient of the network."""

_MEASURED: dict[tuple[Key, str], float] = {}
_SLOW: dict[Key, float] = {}


def measure_slowdown(
    recording: Recording, spec: AttackSpec, attack: Attack, case: PlannedCase, estimate: Callable[[Sequence[int]], float]
) -> float:
    """Return how many times as long as estimated one gradient evaluation for a case takes; 1 if it cannot be measured.

    It is measured on the first observation of the case, once in a process for each attack and number of examples.
    attack: the attack that `spec` builds. estimate: function from the numbers of examples of each observation to the estimated
    seconds.
    """
    key = (recording.folder, repr(recording.manifest), case.sizes[0], attack.device, spec.null)
    name = repr((spec.name, sorted((k, v) for k, v in spec.arguments.items() if k not in ITERATION_ARGUMENTS)))
    if (key, name) not in _MEASURED:
        _MEASURED[key, name] = _SLOW[key] if key in _SLOW else _measure(recording, spec, attack, case, estimate, key)
    return _MEASURED[key, name]


def _measure(
    recording: Recording,
    spec: AttackSpec,
    attack: Attack,
    case: PlannedCase,
    estimate: Callable[[Sequence[int]], float],
    key: Key,
) -> float:
    try:
        observation, _ = add_estimate(recording.read_observation(case.rows[0]), reads_update=not spec.null)
    except (ValueError, OSError, DamagedFile):  # the attack itself reports it
        return 1.0
    seconds = time_evaluation(attack, Case((observation,)))
    if seconds is None:
        return 1.0
    ratio = seconds / estimate([case.sizes[0]])
    if seconds > MAX_MEASURED_SECONDS:
        _SLOW[key] = ratio
    return ratio
