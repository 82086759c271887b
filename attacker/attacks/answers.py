"""What an attack returns: building a reconstruction with default values, and checks that the answers for cases are usable."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from attacker.attacks.cases import Case
from attacker.attacks.simulation.client import find_schedule
from attacker.reconstruction import Reconstruction, list_slots


def build_reconstruction(
    case: Case, x: Tensor, y: Tensor, *, attack: str, rng: Generator, route: str, loss: Tensor | None = None, **fields: Any
) -> Reconstruction:
    """Return a `Reconstruction` of a case from examples x (N, *shape) and labels y (N,), with default values for other fields.

    A slot is the place of one example in a batch of an observation. An observation of n examples gets the next n rows of x, in
    this order in its slots, and again in each further epoch. After the last row of x, assignment starts again at the first.
    rng: its initial seed is stored. route: name of the method that found the examples. loss: the attack's own loss after each
    iteration (T,); None for a single 0.
    fields: further fields of `Reconstruction` by name, which replace the defaults: confidence NaN (undecided), restarts 1, no
    oracles, 0 for iterations, evaluations and seconds. All other fields have the defaults of `Reconstruction`.
    """
    slots, start = [], 0
    for observation in case.observations:
        count, sizes = observation.num_examples or len(x), find_schedule(observation)[0]
        places = list_slots(observation.round, observation.client, sizes, count)
        slots += [replace(slot, example=(start + slot.example) % len(x)) for slot in places]
        start += count
    defaults: dict[str, Any] = {
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
        **{**defaults, **fields},
    )


def find_problems(attack: str, cases: Sequence[Case], answers: Any) -> dict[str, str]:
    """Return a dict from the key of each case without a usable answer to a message on what is wrong and what is expected.

    attack:  name of the attack, with which each message begins.
    answers: what the attack returned for `cases`. If it is not a list or tuple of `Reconstruction` only, every case gets a
             message. A missing answer is no problem if any answer is marked as interrupted, since the attack then stopped early.
    """
    if not isinstance(answers, list | tuple) or not all(isinstance(answer, Reconstruction) for answer in answers):
        types = sorted({type(answer).__name__ for answer in answers}) if isinstance(answers, list | tuple) else []
        got = f"a {type(answers).__name__} of {' and '.join(types)}" if types else type(answers).__name__
        return {case.key: f"{attack} must return a list of Reconstruction, one per case, got {got}" for case in cases}
    problems = {
        case.key: fault
        for case in cases
        for answer in answers
        if answer.case == case.key and (fault := _find_fault(case, answer))
    }
    if any(answer.interrupted for answer in answers):
        return {key: f"{attack}: {fault}" for key, fault in problems.items()}
    answered = {answer.case for answer in answers}
    others = sorted(answered - {case.key for case in cases})
    hint = f"; one has case={others[0]!r}, which is the key of no attacked case" if others else ""
    for case in cases:
        if case.key not in answered:
            problems[case.key] = f"no reconstruction was returned for this case{hint}; return one per case, with case=case.key"
    return {key: f"{attack}: {fault}" for key, fault in problems.items()}


def _find_fault(case: Case, answer: Reconstruction) -> str:
    """Return a message on the first fault in an answer's tensors or slots; "" if there is none.

    A slot is the place of an example in one of the client's batches.
    """
    shape, x = case.observations[0].data.shape, answer.x
    expected = f"(N, {', '.join(map(str, shape))})"
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0 or tuple(x.shape[1:]) != shape:
        return f"x must be floats of shape {expected}, got {_describe(x)}; return one row for each example"
    if len(x) == 0:
        return f"x must hold at least one example, got {_describe(x)}; raise ValueError for a case without an answer"
    per_example = {"confidence": answer.confidence, "explained": answer.explained}
    if not isinstance(answer.y, Tensor) or answer.y.dtype != torch.int64 or tuple(answer.y.shape) != (len(x),):
        return f"y must be int64 of shape ({len(x)},), one label for each row of x, got {_describe(answer.y)}"
    for name, value in per_example.items():
        if value is not None and (not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != (len(x),)):
            return f"{name} must be floats of shape ({len(x)},), NaN where nothing is known, got {_describe(value)}"
    if (
        not isinstance(answer.loss, Tensor)
        or not answer.loss.is_floating_point()
        or answer.loss.ndim != 1
        or not len(answer.loss)
    ):
        return f"loss must be floats of shape (iterations,), at least one, got {_describe(answer.loss)}"
    if beyond := [slot.example for slot in answer.slots if not 0 <= slot.example < len(x)]:
        return f"a slot has example={beyond[0]}, but x has {len(x)} rows; set it to the index of a row of x, from 0"
    return ""


def _describe(value: Any) -> str:
    """Return the dtype and shape of a tensor, or the type of any other value, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
