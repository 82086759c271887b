"""Rows of a recording -> the cases of an attack, before any of them is attacked."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from attacker.attacks import Attack, Case
from attacker.attacks.base import Need, case_key, refused
from attacker.replay.example_counts import with_estimate
from fedsim.recording import Observation, Recording, Row
from fedsim.recording.masked_vectors import SUM


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A case to be attacked.

    rows:     of its observations, in order of rounds; never empty.
    left_out: rounds of its client that are no part of it, and why.
    reason:   why it cannot be attacked at all; empty where it can.
    """

    key: str
    rows: tuple[Row, ...]
    left_out: tuple[tuple[int, str], ...] = ()
    reason: str = ""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of each observation, 0 where the client reported no number: cases of equal sizes are of equal shape."""
        return tuple(row.num_examples or 0 for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What there is to attack. idle: rows that hold no update, or not that of one client alone. whole: see `planned`."""

    cases: tuple[Planned, ...]
    idle: tuple[Row, ...] = ()
    whole: bool = False

    @property
    def left_out(self) -> dict[str, list[tuple[int, str]]]:
        """Rounds that are no part of their client's case, by the case's key."""
        return {case.key: list(case.left_out) for case in self.cases if case.left_out}


@dataclass
class _Client:
    used: list[Row] = field(default_factory=list)
    complete: list[Row] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)


def planned(recording: Recording, rows: Sequence[Row], attack: Attack) -> Plan:
    """The cases that `attack` makes of `rows`: one for each complete row, or, of an attack of whole clients, one for each client.

    For the latter every update is read once, so that a round that cannot be used is left out, in words, and does not spoil the
    others: one that is missing or damaged, holds what is no number, or lacks what the attack needs.
    """
    complete = [_counted(recording, row) for row in rows if row.status == "complete"]
    idle = tuple(row for row in rows if row.status != "complete")
    if Need.SAME_CLIENT not in attack.needs:
        return Plan(cases=tuple(Planned(key=row.key, rows=(row,)) for row in complete), idle=idle)
    clients: dict[str, _Client] = {row.client: _Client() for row in complete}
    counted = {row.key: row for row in complete}
    for row in sorted(rows, key=lambda row: (row.round, row.client)):
        row, client = counted.get(row.key, row), clients.get(row.client)
        if client is None:
            continue
        if row.status != "complete":
            client.left_out.append((row.round, ": ".join(filter(None, (row.status, row.reason)))))
            continue
        client.complete.append(row)
        if reason := _unusable(recording, row, attack):
            client.left_out.append((row.round, reason))
        else:
            client.used.append(row)
    return Plan(cases=tuple(_whole(name, client) for name, client in sorted(clients.items())), idle=idle, whole=True)


def _counted(recording: Recording, row: Row) -> Row:
    """The row with an estimated number of examples where none is known; as it is where its update cannot be read."""
    if row.num_examples is not None or row.client == SUM:
        return row
    try:
        observation = recording.observation(row)
        return row if trouble(observation) else replace(row, num_examples=with_estimate(observation)[0].num_examples)
    except ValueError:
        return row


def _whole(name: str, client: _Client) -> Planned:
    rows = client.used or client.complete
    reasons = dict.fromkeys(reason for _, reason in client.left_out)
    return Planned(
        key=case_key([row.round for row in rows], name),
        rows=tuple(rows),
        left_out=tuple(client.left_out),
        reason="" if client.used else f"none of its rounds can be used: {'; '.join(reasons)}",
    )


def _unusable(recording: Recording, row: Row, attack: Attack) -> str:
    """Why the observation of a row is of no use to `attack`; empty where it is."""
    try:
        observation = recording.observation(row)
    except ValueError as error:
        return str(error)
    return trouble(observation) or refused(attack, Case((observation,)))


def trouble(observation: Observation) -> str:
    """What is wrong with the numbers of an observation, in words; empty where nothing is."""
    parts = {
        "weights that were sent hold": observation.weights,
        "buffers that were sent hold": observation.buffers,
        "update holds": observation.update,
    }
    for words, tensors in parts.items():
        bad = {name: count for name, t in tensors.items() if (count := _not_finite(t))}
        if bad:
            total = sum(bad.values())
            values = "1 value that is no number" if total == 1 else f"{total} values that are no numbers"
            return f"round {observation.round}: the {words} {values}, the first in {next(iter(bad))}"
        if long := next((name for name, t in tensors.items() if not torch.isfinite(t.square().sum())), ""):
            return f"round {observation.round}: the {words} values so large that their squares overflow, in {long}"
    return ""


def _not_finite(tensor: Tensor) -> int:
    return int(tensor.numel() - torch.isfinite(tensor).sum())


def entry(recording: Recording, case: Planned, *, whole: bool) -> dict[str, Any]:
    """What scoring and report need to know of a case.

    Of a whole client also its rounds, each with its attempt, those that were left out, and of a sum the cohort of each round.
    """
    first, sizes = case.rows[0], [row.num_examples for row in case.rows]
    told = {**row_entry(recording, first), "key": case.key}
    if not whole:
        return told
    return {
        **told,
        "rounds": [[row.round, row.attempt] for row in case.rows],
        "num_examples": None if None in sizes else sum(size for size in sizes if size is not None),
        "codec": ", ".join(sorted({str(row.codec) for row in case.rows})),
        "left_out": [list(one) for one in case.left_out],
        "cohorts": [_cohort(recording, row) for row in case.rows],
    }


def row_entry(recording: Recording, row: Row) -> dict[str, Any]:
    """The same of a row by itself, also of one that was not received."""
    return {
        "key": row.key,
        "round": row.round,
        "client": row.client,
        "attempt": row.attempt,
        "num_examples": row.num_examples,
        "codec": row.codec,
        "status": row.status,
        "reason": row.reason,
        "cohort": _cohort(recording, row),
    }


def _cohort(recording: Recording, row: Row) -> list[str]:
    return list(recording.summed(row.round)) if row.client == SUM else [row.client]
