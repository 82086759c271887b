"""Cases (observations that are attacked together) of a replay, planned from the rows of a recording before any is attacked."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from attacker.attacks import Attack, Case
from attacker.attacks.base import explain_refusal
from attacker.attacks.cases import UNNAMED_CLIENT, build_case_key
from attacker.attacks.needs import Need
from attacker.attacks.nulls import BlindedNull
from attacker.replay.example_counts import add_estimate
from fedsim.recording import Observation, Recording, Row
from fedsim.recording.masked_vectors import SUM_CLIENT


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """A case of a replay: observations to be attacked together, or the reason why they cannot be.

    rows:     rows of its observations in the order of rounds; never empty.
    left_out: pairs (omitted round of the client, reason); if `unnamed`, of all clients.
    reason:   why the case cannot be attacked; "" if it can.
    unnamed:  whether the names of the rows' clients are hidden from the attack.
    """

    key: str
    rows: tuple[Row, ...]
    left_out: tuple[tuple[int, str], ...] = ()
    reason: str = ""
    unnamed: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of examples of each observation, 0 if not known. Cases of equal sizes can be attacked at once."""
        return tuple(row.num_examples or 0 for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All cases of a replay.

    idle:  chosen rows of the recording that belong to no case: the client failed or was late, or its update is hidden in the sum
           of secure aggregation.
    whole: whether each case holds all usable rounds of one client, or of all clients without their names, see `plan_cases`; if
           False, each case is one row.
    """

    cases: tuple[PlannedCase, ...]
    idle: tuple[Row, ...] = ()
    whole: bool = False

    @property
    def left_out(self) -> dict[str, list[tuple[int, str]]]:
        """Return a dict from the key of each case with omitted rounds to a list of pairs of round and reason."""
        return {case.key: list(case.left_out) for case in self.cases if case.left_out}


@dataclass
class _Client:
    used: list[Row] = field(default_factory=list)
    complete: list[Row] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)


def plan_cases(recording: Recording, rows: Sequence[Row], attack: Attack) -> Plan:
    """Return the cases of `attack` on rows of the recording (one row per client and round), and the rows that give no case.

    A row is complete if its update was recorded. There is one case per complete row; one per client with a complete row if the
    attack uses all rounds of a client together; or a single case if it uses the updates of all clients without their names. For
    the last two kinds of attacks, all updates are read here, and unusable rounds are omitted with a reason: no update, damaged
    files, NaN, infinite or huge values (`find_bad_numbers`), or a condition of the attack that is not met. Numbers of examples
    that clients did not report are estimated where possible.
    """
    reads_update = not isinstance(attack, BlindedNull)
    complete = [_estimate_count(recording, row, reads_update) for row in rows if row.status == "complete"]
    idle = tuple(row for row in rows if row.status != "complete")
    if Need.UNNAMED in attack.needs:
        return Plan(cases=_plan_unnamed(recording, complete, attack), idle=idle, whole=True)
    if Need.SAME_CLIENT not in attack.needs:
        return Plan(cases=tuple(PlannedCase(key=row.key, rows=(row,)) for row in complete), idle=idle)
    clients: dict[str, _Client] = {row.client: _Client() for row in complete}
    estimated = {row.key: row for row in complete}
    for row in sorted(rows, key=lambda row: (row.round, row.client)):
        row, client = estimated.get(row.key, row), clients.get(row.client)
        if client is None:
            continue
        if row.status != "complete":
            client.left_out.append((row.round, ": ".join(filter(None, (row.status, row.reason)))))
            continue
        client.complete.append(row)
        if reason := _explain_unusable(recording, row, attack):
            client.left_out.append((row.round, reason))
        else:
            client.used.append(row)
    return Plan(cases=tuple(_plan_client(name, client) for name, client in sorted(clients.items())), idle=idle, whole=True)


def _plan_unnamed(recording: Recording, complete: Sequence[Row], attack: Attack) -> tuple[PlannedCase, ...]:
    """Return the case of all complete rows for an attack that sees no names of clients; () if there are no rows.

    Within a round, rows are sorted by a hash of round and client, so that the clients' order differs from round to round.
    """
    ordered = sorted(complete, key=lambda row: (row.round, hashlib.sha256(row.key.encode()).digest()))
    reasons = [_explain_unusable(recording, row, attack) for row in ordered]
    used = _Client(
        used=[row for row, reason in zip(ordered, reasons, strict=True) if not reason],
        complete=list(ordered),
        left_out=[(row.round, f"{row.client}: {reason}") for row, reason in zip(ordered, reasons, strict=True) if reason],
    )
    return (replace(_plan_client(UNNAMED_CLIENT, used), unnamed=True),) if ordered else ()


def hide_client(observation: Observation) -> Observation:
    """Return the observation of a single client without the client's name; a secure sum is returned unchanged."""
    return observation if observation.client == SUM_CLIENT else replace(observation, client=UNNAMED_CLIENT, cohort=())


def _estimate_count(recording: Recording, row: Row, reads_update: bool) -> Row:
    """Return the row with an estimated number of examples; the same row if a number was reported or none can be estimated.

    There is no estimate for secure sums, for updates that cannot be read or hold NaN, infinite or huge values, and for clients
    that defend their updates. reads_update: whether the update is used for the estimate; False for a null.
    """
    if row.num_examples is not None or row.client == SUM_CLIENT:
        return row
    try:
        observation = recording.read_observation(row)
        if find_bad_numbers(observation):
            return row
        return replace(row, num_examples=add_estimate(observation, reads_update=reads_update)[0].num_examples)
    except ValueError:
        return row


def _plan_client(name: str, client: _Client) -> PlannedCase:
    rows = client.used or client.complete
    reasons = dict.fromkeys(reason for _, reason in client.left_out)
    return PlannedCase(
        key=build_case_key([row.round for row in rows], name),
        rows=tuple(rows),
        left_out=tuple(client.left_out),
        reason="" if client.used else f"none of its rounds can be used: {'; '.join(reasons)}",
    )


def _explain_unusable(recording: Recording, row: Row, attack: Attack) -> str:
    """Return why `attack` cannot use the observation of a row, or "" if it can."""
    try:
        observation = recording.read_observation(row)
    except ValueError as error:
        return str(error)
    seen = hide_client(observation) if Need.UNNAMED in attack.needs else observation
    return find_bad_numbers(observation) or explain_refusal(attack, Case((seen,)))


def find_bad_numbers(observation: Observation) -> str:
    """Return a sentence on values of an observation that attacks cannot use, or "" if there are none.

    Such values, in the weights and buffers that were sent or in the update, are NaN, infinite values, and values so large that
    the sum of the squares of a tensor overflows.
    """
    parts = {
        "weights that were sent hold": observation.weights,
        "buffers that were sent hold": observation.buffers,
        "update holds": observation.update,
    }
    for words, tensors in parts.items():
        bad = {name: count for name, t in tensors.items() if (count := int((~torch.isfinite(t)).sum()))}
        if bad:
            total = sum(bad.values())
            values = "1 value that is NaN or infinite" if total == 1 else f"{total} values that are NaN or infinite"
            return f"round {observation.round}: the {words} {values}, the first in {next(iter(bad))}"
        if long := next((name for name, t in tensors.items() if not torch.isfinite(t.square().sum())), ""):
            return f"round {observation.round}: the {words} values so large that their squares overflow, in {long}"
    return ""
