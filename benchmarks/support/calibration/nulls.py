"""The table `nulls` of calibration.py: a check that no attack's null reads the update.

The null of each registered attack is run on the same rounds of one client four times: as they were sent, and with the update
replaced by noise of the same shape, by zeros, and by the update times 1000. The four results must be equal, except for the time
taken. Random images of 8x8 pixels are enough, since nothing is recovered here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from support.contract import Options, ResultRow
from support.single_cases import make_client
from torch import Tensor

from attacker.attacks import ATTACKS, Attack, AttackSpec, Case
from attacker.attacks.needs import Need
from attacker.attacks.papers.accumulate import LINKS
from attacker.attacks.papers.agic import COMPARISONS
from attacker.attacks.papers.closed_form import FALLBACKS
from attacker.reconstruction import Reconstruction
from fedsim.recording import DataSpec
from fedsim.recording.codec import encode

DATA_SPEC = DataSpec(shape=(1, 8, 8), num_classes=4)
ROUND_EXAMPLES = ((0, 3), (1, 2), (3, 1), (2, 0))
"""Indices of the examples in four rounds, which are two passes over the same four examples."""
ARGUMENT_VALUES: Mapping[str, Sequence[Any]] = {
    "closed_form_start": (True,),
    "features": (True,),
    "fallback": (*FALLBACKS, "none"),
    "compare": COMPARISONS,
}
"""Values of arguments that change how an attack starts or links rounds."""
UPDATE_CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda u: torch.randn(u.shape, generator=torch.Generator().manual_seed(1)),
    "zeros": torch.zeros_like,
    "scaled": lambda u: 1000 * u,
}


def measure_nulls(options: Options) -> tuple[list[ResultRow], ResultRow]:
    """Compare the results of each attack's null before and after three changes of the update (`UPDATE_CHANGES`).

    Returns a row for each null, with the names of the changes that altered its result, and a dict with the number of nulls whose
    result was altered, which should be 0.
    """
    with TemporaryDirectory() as folder:
        candidates = Path(folder) / "candidates.npz"
        np.savez(candidates, images=np.random.default_rng(0).random((64, 8, 8)), labels=np.arange(64) % DATA_SPEC.num_classes)
        rows = [_measure_null(options, spec) for spec in list_specs(candidates)]
    return rows, {"null_reads_gradient": sum(bool(row["changed by"]) for row in rows)}


def list_specs(candidates: Path) -> Iterator[AttackSpec]:
    """Yield specifications of each attack's null: with default arguments, and then with one argument changed at a time.

    candidates: archive of images for attacks that need one. Each argument that the attack has takes its values in
    `ARGUMENT_VALUES`; `compare` of `accumulate` takes those in `LINKS`.
    """
    for name in ATTACKS:
        known = signature(ATTACKS[name]).parameters
        needed = {argument: str(candidates) for argument in ("candidates", "images") if argument in known}
        yield AttackSpec(name=name, arguments=needed, null=True)
        for argument in (name for name in ARGUMENT_VALUES if name in known):
            values = LINKS if (name, argument) == ("accumulate", "compare") else ARGUMENT_VALUES[argument]
            yield from (AttackSpec(name=name, arguments={argument: value}, null=True) for value in values)


def _measure_null(options: Options, spec: AttackSpec) -> ResultRow:
    attack = _build_attack(spec, options.device)
    cases = _make_cases(attack)
    expected = _run_attack(attack, cases, options.seed)
    changed = [
        words
        for words, change in UPDATE_CHANGES.items()
        if not all(map(_is_same, expected, _run_attack(attack, [_change_update(case, change) for case in cases], options.seed)))
    ]
    return {"null of": str(replace(spec, null=False)), "cases": len(cases), "changed by": ", ".join(changed)}


def _build_attack(spec: AttackSpec, device: str) -> Attack:
    few = {key: 3 for key in ("steps", "pre_steps") if key in signature(ATTACKS[spec.name]).parameters}
    return replace(spec, arguments={**few, **spec.arguments}).build(device=device)


def _make_cases(attack: Attack) -> list[Case]:
    """Return what the attack is run on: one case of all four rounds if it attacks rounds together, otherwise a case per round."""
    of = make_client("lenet_dlg", DATA_SPEC, seed=0)
    x = torch.rand(4, *DATA_SPEC.shape, generator=torch.Generator().manual_seed(5))
    size = 1 if Need.SINGLE_EXAMPLE in attack.needs else 2
    rounds = []
    for number, labels in enumerate(ROUND_EXAMPLES, start=1):
        rows = list(labels[:size])
        case = of.make_case([(x[rows], torch.tensor(rows))], "c")
        rounds.append(replace(case.observations[0], round=number))
    return [Case(tuple(rounds))] if Need.SAME_CLIENT in attack.needs else [Case((observation,)) for observation in rounds]


def _change_update(case: Case, change: Callable[[Tensor], Tensor]) -> Case:
    """Return a copy of a case in which each tensor of every update is replaced by the result of `change`."""
    sent = [{name: change(u) for name, u in observation.update.items()} for observation in case.observations]
    changed = [replace(observation, payload=encode(update)) for observation, update in zip(case.observations, sent, strict=True)]
    return Case(tuple(changed))


def _run_attack(attack: Attack, cases: Sequence[Case], seed: int) -> list[Reconstruction]:
    return attack(cases, rng=torch.Generator().manual_seed(seed))


def _is_same(one: Reconstruction, other: Reconstruction) -> bool:
    """Return whether two reconstructions hold equal examples, labels, confidences, losses, counts and notes."""
    tensors = all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("x", "y", "confidence", "loss"))
    plain = ("slots", "notes", "iterations", "evaluations", "restarts", "route", "oracles", "interrupted")
    return tensors and all(getattr(one, name) == getattr(other, name) for name in plain)
