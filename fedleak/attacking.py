"""Attacks on an observation in memory, or on a recording."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attacker.attacks import AttackSpec, Case
from attacker.attacks.answers import find_problems
from attacker.attacks.base import explain_refusal
from attacker.replay.cases import find_bad_numbers
from attacker.replay.replay import Replay
from defenses.registry import references
from fedleak.federations import find_run
from fedleak.results import AttackResult, ReconstructionFiles
from fedsim.recording import Observation, Recording


def attack(
    target: Observation | Sequence[Observation] | Recording,
    name: str,
    *,
    seed: int = 0,
    null: bool = False,
    device: str = "cpu",
    out: Path | str | None = None,
    workers: int | None = 1,
    **arguments: Any,
) -> AttackResult:
    """Attack an observation, several observations of one client together (for attacks such as agic), or a recording.

    A case is the observations that are attacked together: all of `target` if it is in memory; in a recording, each single
    observation, or all observations of a client for attacks on several rounds. The result holds one reconstruction for each case
    that did not fail.
    name:    a name that the command `attacker list` prints, or `module:function`, which is imported.
    seed:    seed of the attack's random choices. device: PyTorch device on which the attack computes.
    arguments: arguments of the attack, by name. A `decoder` given as `module:function` is imported.
    null:    withhold the gradient from the attack, to measure what the attack achieves without the gradient (the baseline of a
             verdict).
    out:     for a recording, a folder, in which each attack has a subfolder of reconstructions; by default `reconstructions`
             beside the recording. Cases that are finished there are not attacked again, and are part of the result.
    workers: for a recording, the largest number of worker processes; 1 attacks in this process, and None chooses the number
             by the size of the work and the number of cores.

    Raises ValueError if the name or an argument is unknown, if code cannot be imported, or if the recording holds nothing to
    attack. For observations in memory, also raises ValueError if there is none, if they hold NaN or infinity, or if the attack
    cannot be used on them or returns an invalid result. The failure of a case of a recording is noted in the result instead.
    """
    for named in (name, arguments.get("decoder")):
        if isinstance(named, str) and references.is_reference(named):
            references.admit(named)
    spec = AttackSpec(name=name, arguments=arguments, null=null)
    if isinstance(target, Recording):
        folder = find_run(target) / "reconstructions" if out is None else Path(out)
        replay = Replay(recording=target, spec=spec, out=folder, seed=seed, device=device, workers=workers)
        replayed = replay.run()
        paths = tuple(path for case in replay.plan.cases if (path := replay.make_path(case.key)).exists())
        return AttackResult(
            spec=spec,
            data=target.manifest.data,
            reconstructions=ReconstructionFiles(paths),
            failed=dict(replayed.failed),
            folder=replayed.folder,
            run=find_run(target),
        )
    observations = (target,) if isinstance(target, Observation) else tuple(target)
    if not observations:
        raise ValueError("there is no observation to attack; give at least one")
    case, built = Case(observations), spec.build(device=device)
    if reason := next(filter(None, map(find_bad_numbers, observations)), ""):
        raise ValueError(f"no attack can use the observations: {reason}; choose an observation with finite values")
    if reason := explain_refusal(built, case):
        raise ValueError(
            f"the attack {name} cannot be used on these observations: {reason}. Choose another attack; `attacker list` prints "
            "what each attack requires"
        )
    found = built([case], rng=torch.Generator().manual_seed(seed))
    for reason in find_problems(name, [case], found).values():
        raise ValueError(reason)
    return AttackResult(spec=spec, data=observations[0].data, reconstructions=found)
