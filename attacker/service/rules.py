"""Rules of a TOML file that submit jobs, attacks on recordings, for new rounds automatically, within a budget."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from attacker.service.jobs.job import ArgumentValue, JobSpec, Word
from attacker.service.jobs.queue import Queue
from attacker.service.jobs.rule_history import RecordingIdentity, RuleHistory, TakenRound
from attacker.service.jobs.run_names import FOLDER_NAME_PATTERN, make_run_path
from fedsim.recording.array_archives import read_toml
from fedsim.recording.safe_files import shorten

log = logging.getLogger(__name__)

EVERY_PREFIX = "every="


class Budget(BaseModel):
    """Limits of a rule; None for no limit. A round that a limit excludes gets no job from the rule, unless it is recorded again.

    jobs_per_hour: maximum number of jobs that the rule submits within an hour, over all recordings.
    cpu_seconds: total CPU seconds that ended attempts of the rule's jobs on one recording took; once this is reached, no further
    job on the recording is submitted.
    behind: maximum number of the rule's jobs on a recording that wait or run; each new round makes one job. If more wait or run,
    waiting jobs are cancelled, the jobs for the earliest rounds first. If more than `behind` new rounds are found at once, only
    the latest `behind` rounds get a job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs_per_hour: Annotated[int, Field(gt=0)] | None = None
    cpu_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    behind: Annotated[int, Field(gt=0)] | None = None


class Rule(BaseModel):
    """One rule: an attack that runs automatically on new rounds.

    name:       identifies the rule in its history; if it is renamed, it begins again with all rounds.
    attack, arguments, seed, null, priority: as in `JobSpec`.
    recordings, clients: shell patterns such as "site-*", for ids of recordings and names of clients; an id or a name that matches
                any of them is attacked.
    rounds:     rounds that get a job: "all", "first" (the earliest round in the recording), "last" (the newest round each time
                that new rounds are found; older ones found at the same time never get one), "every=K" (rounds 1, 1 + K, ...), or
                a selection such as "1-3,7". The job for round N attacks this round only or, if the attack uses all rounds of a
                client together, rounds 1 to N.
    budget:     limits on the number and the CPU time of the rule's jobs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=rf"^{FOLDER_NAME_PATTERN}$")]
    attack: Word
    arguments: dict[Word, ArgumentValue] = {}
    recordings: tuple[Word, ...] = ("*",)
    rounds: str = "all"
    clients: tuple[Word, ...] = ("*",)
    seed: int = 0
    null: bool = True
    priority: int = 0
    budget: Budget = Budget()

    @field_validator("rounds")
    @classmethod
    def _check_rounds(cls, rounds: str) -> str:
        number = rounds.removeprefix(EVERY_PREFIX)
        if rounds.startswith(EVERY_PREFIX):
            if not number.isdigit() or not int(number):
                raise ValueError(f"cannot read rounds {rounds!r}: after every= write a whole number from 1, such as every=5")
        elif rounds not in ("first", "last"):
            JobSpec(recording="any", attack="exact", rounds=rounds)
        return rounds

    def is_for(self, recording: str) -> bool:
        return any(fnmatchcase(recording, pattern) for pattern in self.recordings)

    def choose_rounds(self, known: Iterable[int]) -> set[int]:
        """Return the rounds that get a job by the setting `rounds`, given all recorded rounds `known`."""
        rounds = set(known)
        if self.rounds == "all" or not rounds:
            return rounds
        if self.rounds in ("first", "last"):
            return {min(rounds) if self.rounds == "first" else max(rounds)}
        if self.rounds.startswith(EVERY_PREFIX):
            return {round for round in rounds if (round - 1) % int(self.rounds.removeprefix(EVERY_PREFIX)) == 0}
        from fedsim.recording.selection import parse_rounds

        return rounds & (parse_rounds(self.rounds) or rounds)

    def make_spec(self, recording: str, rounds: str, clients: tuple[str, ...] = ()) -> JobSpec:
        """Return the request of a job of this rule on a recording.

        rounds, clients: as in `JobSpec`. Raises ValidationError if the attack is unknown or needs a file of images, which a job
        cannot name, or if an argument of it, the seed, the priority or one of the given values is invalid.
        """
        fields = {name: getattr(self, name) for name in ("attack", "arguments", "seed", "null", "priority")}
        return JobSpec(recording=recording, rounds=rounds, clients=clients, **fields)


def read(path: Path) -> tuple[Rule, ...]:
    """Return the rules of a TOML file.

    Raises ValueError if the file cannot be read, has no rule, an unknown key, an invalid rule, or two rules of one name. For an
    invalid rule, the message names file, rule and key.
    """
    try:
        content = read_toml(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a file of rules, such as deploy/rules.toml") from None
    if unknown := sorted(content.keys() - {"rule"}):
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; write rules as tables [[rule]]")
    listed = content.get("rule", [])
    if not isinstance(listed, list) or not listed:
        raise ValueError(f"{path}: holds no rule; write one or more tables [[rule]]")
    rules = tuple(_parse_rule(path, number, fields) for number, fields in enumerate(listed, start=1))
    names = [rule.name for rule in rules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: two rules have the name {twice[0]!r}; give each rule a different name")
    return rules


def _parse_rule(path: Path, number: int, fields: Any) -> Rule:
    named = f"rule {number}" + (f" ({fields['name']!r})" if isinstance(fields, dict) and "name" in fields else "")
    try:
        rule = Rule.model_validate(fields)
        rule.make_spec("any", "all")
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        value = "nothing" if first["type"] == "missing" else shorten(first["input"])
        raise ValueError(f"{path}: {named}: {key or 'the table'}: {reason}, got {value}") from None
    return rule


class Rules:
    """The rules of a file, applied to rounds as they are recorded.

    path: the file. queue: the queue to which jobs are submitted. root: folder below which the recordings are.
    """

    def __init__(self, path: Path, queue: Queue, root: Path) -> None:
        self.rules, self.root = read(path), root
        self._queue, self._ledger = queue, RuleHistory(queue)
        self._lock = threading.Lock()

    def follow(self, recording: RecordingIdentity, attempts: Mapping[int, int]) -> None:
        """Submit the jobs of all rules that match a recording, for the rounds that a rule selects and has not dealt with before.

        A rule decides on a round only once, also if the service is restarted: it submits a job, or leaves the round out for good,
        for example because of a limit. If the round is recorded again, the rule decides on it again.
        If more of a rule's jobs on the recording wait or run than `Budget.behind` allows, waiting jobs are cancelled, those for
        the earliest rounds first, even if an earlier call submitted them.
        attempts: dict from each recorded round to its attempt, see `TakenRound`.

        Raises TooManyJobs if too many jobs wait; a later call submits the remaining jobs.
        """
        with self._lock:
            for rule in self.rules:
                if rule.is_for(recording.id):
                    self._follow(rule, recording, attempts)

    def _follow(self, rule: Rule, recording: RecordingIdentity, attempts: Mapping[int, int]) -> None:
        taken, chosen = self._ledger.list_taken(rule.name, recording), rule.choose_rounds(attempts)
        if rule.rounds == "first" and any(earlier.round not in chosen for earlier in taken):
            return
        new = {TakenRound(*item) for item in attempts.items()} - taken
        if rule.rounds == "last":
            self._leave_out(rule, recording, [found for found in new if found.round not in chosen], "there are newer rounds")
        wanted = sorted(found for found in new if found.round in chosen)
        if rule.budget.behind is not None and len(wanted) > rule.budget.behind:
            late, wanted = wanted[: -rule.budget.behind], wanted[-rule.budget.behind :]
            self._leave_out(rule, recording, late, f"more than {rule.budget.behind} rounds wait, the limit of the rule")
        for following in wanted:
            if reason := self._explain_limit(rule, recording):
                self._leave_out(rule, recording, [following], reason)
            else:
                self._submit(rule, recording, following, again=any(following.round == earlier.round for earlier in taken))
        self._catch_up(rule, recording)

    def _submit(self, rule: Rule, recording: RecordingIdentity, taken: TakenRound, *, again: bool) -> None:
        clients = self._choose_clients(rule, recording, taken.round)
        if clients is None:
            self._leave_out(rule, recording, [taken], "no client of this round matches the patterns of the rule")
            return
        rounds = f"1-{taken.round}" if _uses_all_rounds(rule) else str(taken.round)
        self._ledger.take(rule.name, recording, [taken], rule.make_spec(recording.id, rounds, clients))
        if again:
            message = "submits a job for round %d again: the round was recorded again, in attempt %d of the federation"
            log.warning(f"rule %s, %s: {message}", rule.name, recording.id, taken.round, taken.attempt)

    def _choose_clients(self, rule: Rule, recording: RecordingIdentity, round: int) -> tuple[str, ...] | None:
        """Return the clients of a round that match the patterns of the rule.

        The result is () if the rule chooses all clients, and None if no client of the round matches.
        """
        if "*" in rule.clients:
            return ()
        from fedsim.recording import Recording

        rows = Recording(make_run_path(self.root, recording.id) / "recording").read_rows(
            rounds=[round], on_damage=lambda error: None
        )
        names = sorted({row.client for row in rows})
        return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in rule.clients)) or None

    def _explain_limit(self, rule: Rule, recording: RecordingIdentity) -> str:
        """Return why a limit of the budget, on jobs per hour or CPU seconds, allows no further job; "" if both allow one."""
        budget = rule.budget
        hour = (datetime.now(UTC) - timedelta(hours=1)).isoformat(timespec="milliseconds")
        if budget.jobs_per_hour is not None and self._ledger.count_submitted(rule.name, hour) >= budget.jobs_per_hour:
            return f"{budget.jobs_per_hour} jobs were submitted within an hour"
        if budget.cpu_seconds is not None and self._ledger.sum_cpu_seconds(rule.name, recording) >= budget.cpu_seconds:
            return f"{budget.cpu_seconds:.0f} CPU-seconds were used on this recording"
        return ""

    def _catch_up(self, rule: Rule, recording: RecordingIdentity) -> None:
        """Cancel waiting jobs of a rule on a recording, earliest rounds first, until at most `Budget.behind` wait or run."""
        if rule.budget.behind is None:
            return
        surplus = self._ledger.count_unfinished(rule.name, recording) - rule.budget.behind
        for round, job in self._ledger.list_waiting(rule.name, recording)[: max(0, surplus)]:
            reason = f"more than {rule.budget.behind} rounds wait, the limit of the rule, and newer ones run first"
            if self._queue.leave_out(job, f"round {round} is left out: {reason}"):
                self._tell(rule, recording, [round], reason)

    def _leave_out(self, rule: Rule, recording: RecordingIdentity, rounds: Sequence[TakenRound], reason: str) -> None:
        if rounds:
            self._ledger.take(rule.name, recording, rounds, None)
            self._tell(rule, recording, sorted(taken.round for taken in rounds), reason)

    def _tell(self, rule: Rule, recording: RecordingIdentity, rounds: list[int], reason: str) -> None:
        named = f"round {rounds[0]}" if len(rounds) == 1 else f"{len(rounds)} rounds from {rounds[0]} to {rounds[-1]}"
        log.warning("rule %s, %s: leaves out %s: %s", rule.name, recording.id, named, reason)


def _uses_all_rounds(rule: Rule) -> bool:
    """Return whether a case of the rule's attack combines all rounds of one client, or all rounds of all clients."""
    from attacker.attacks import AttackSpec, Need

    needs = AttackSpec(name=rule.attack, arguments=rule.arguments).build().needs
    return bool({Need.SAME_CLIENT, Need.UNNAMED} & needs)
