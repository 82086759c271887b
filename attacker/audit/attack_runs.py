"""Runs of the planned attacks of an audit and of their nulls, within the time budget."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from types import FrameType

from attacker.audit.attack_findings import AuditedAttack, describe_failures, judge_alone
from attacker.audit.findings import NotChecked
from attacker.audit.plan import ATTACK_RULE, PlannedAttack
from attacker.replay.cases import PlannedCase
from attacker.replay.replay import Replay, ReplayResult
from attacker.scoring import Scorer, summarise
from attacker.scoring.states import FINISHED_STATES, CaseState, read_case
from fedsim.recording import Recording

MIN_SECONDS = 30.0
"""Smallest time in seconds, since the first attack began, for that attack and for attacks whose time is not forecast (closed
forms), so that they can finish even if the budget is small. Other attacks have no more than the budget."""
MIN_LEFT_SHARE = 0.5
"""Share of an attack's expected time below which the attack is not started if no more time is left."""
MIN_NULL_SHARE = 0.1
"""Smallest share of the time for an attack and its null that is kept for the null."""
STOPPED, NOT_STARTED = "was stopped after", "was not started"
"""Words in the reasons why an attack has no verdict, or one on fewer updates, because its time was used up."""
JUDGED_STATES: frozenset[CaseState] = FINISHED_STATES | {"interrupted"}
"""States of the cases on which a stopped attack is judged: those of searches that were stopped count by their best result until
then. Nulls must be finished: a stopped null is worse than the whole one, so that its attack would seem to find more."""
MAX_TIMER_SECONDS = 1e7
RunReplay = Callable[[Replay], ReplayResult]


@dataclass(kw_only=True)
class AttackRuns:
    """The attacks of an audit that ran, and what was left out.

    recording, out, scorer, model, run_replay: as for `audit` and `PlannedAttack.replay`. Without a scorer, attacks are not
    compared with the true examples.
    attacks:  results, in the order of the plan. left_out: why other attacks did not run, or were stopped.
    """

    recording: Recording
    out: Path
    scorer: Scorer | None
    model: str | None
    run_replay: RunReplay
    attacks: list[AuditedAttack] = field(default_factory=list)
    left_out: list[NotChecked] = field(default_factory=list)

    def run(self, plan: Sequence[PlannedAttack | NotChecked], seconds: float) -> None:
        """Run the planned attacks and their nulls, until one recovers every example or the time is used up.

        seconds: wall-clock time for all attacks, nulls and scores; see `MIN_SECONDS` on attacks that are given more. An attack
                 and its null may take what is left of it without the expected time of later attacks, or an equal share of it if
                 that is more. What still runs after that is stopped; scores are not.
        """
        planned = [step for step in plan if isinstance(step, PlannedAttack)]
        used = 0.0
        for step in plan:
            if isinstance(step, NotChecked):
                self.left_out.append(step)
                continue
            later = planned[planned.index(step) + 1 :]
            has_minimum = step is planned[0] or not step.core_seconds
            left = (max(seconds, MIN_SECONDS) if has_minimum else seconds) - used
            if self.attacks and self.attacks[-1].recovers_all:
                self._leave_out(f"{step.spec} is not needed: {self.attacks[-1].spec} recovered every example")
            elif step is not planned[0] and left <= MIN_LEFT_SHARE * step.core_seconds:
                self._leave_out(
                    f"{step.spec} {NOT_STARTED}: it is expected to take {step.core_seconds:.0f} seconds, and earlier attacks "
                    f"left {max(left, 0):.0f} of the budget of {seconds:.0f} seconds"
                )
            else:
                allowed = max(left - sum(other.core_seconds for other in later), left / (1 + len(later)))
                used += self._attack(step, allowed)

    def _attack(self, planned: PlannedAttack, allowed: float) -> float:
        """Run an attack and, with a scorer, its null, store the result, and return the seconds that they and their scores took.

        allowed: seconds for the attack and its null. The null's expected share of it is kept for the null.
        """
        attack, null = (planned.replay(self.recording, self.out, null=null, model=self.model) for null in (False, True))
        cases, started = attack.plan.cases, monotonic()
        kept = min(0.5, max(MIN_NULL_SHARE, planned.null_share)) if self.scorer is not None else 0.0
        done, cut = self._replay(attack, started + (1 - kept) * allowed)
        if done is not None and done.reuse:
            self._leave_out(f"{planned.spec}: {done.reuse}")
        took = monotonic() - started
        judged = cases if not cut else _list_in_states(attack, cases, JUDGED_STATES)
        null_cut = False
        if judged and self.scorer is not None:
            _, null_cut = self._replay(null, max(started + allowed, monotonic() + kept * took))
            if null_cut:
                judged = _list_in_states(null, judged, FINISHED_STATES)
        seconds = monotonic() - started
        if cut or null_cut:
            unfinished = sum(read_case(attack.folder, case.key)[1] == "interrupted" for case in judged)
            self._leave_out(_explain_cut(planned, len(cases), len(judged), unfinished, took if cut else seconds, null=not cut))
        if judged:
            rows = {(row.round, row.client) for case in judged for row in case.rows}
            planned = (
                planned
                if not (cut or null_cut)
                else replace(planned, rows=tuple(r for r in planned.rows if (r.round, r.client) in rows))
            )
            result = self._build_result(planned, [case.key for case in judged], [attack.folder, null.folder])
            failed = done.failed if done is not None else _read_failures(attack, judged)
            count, reason = describe_failures(planned.rows, judged, failed)
            self.attacks.append(replace(result, failed=count, failure=reason))
        return monotonic() - started

    def _replay(self, replay: Replay, end: float) -> tuple[ReplayResult | None, bool]:
        """Run a replay until it is finished or the time is `end`; return its result, None if stopped, and whether it was."""
        done = None
        with limit_time(end - monotonic()) as limit:
            done = self.run_replay(replay)
        return done, limit.is_over

    def _build_result(self, planned: PlannedAttack, cases: Sequence[str], folders: Sequence[Path]) -> AuditedAttack:
        """Return the result of one attack; without a scorer, from the confidence in the examples alone.

        cases: keys of the attacked cases. folders: two, with the reconstructions of the attack and of its null.
        """
        if self.scorer is None:
            return judge_alone(str(planned.spec), len(planned.rows), folders[0], cases, self.recording.manifest.data)
        scored = [row for folder in folders for row in self.scorer.score(folder) if row.case in cases]
        rows = [replace(row, state="done") if row.state == "interrupted" and not row.null else row for row in scored]
        (summary,) = summarise(rows)
        return AuditedAttack.of(summary, [row for row in rows if not row.null], len(planned.rows))

    def _leave_out(self, reason: str) -> None:
        self.left_out.append(NotChecked(rule=ATTACK_RULE, reason=reason, kind="left out"))


def _list_in_states(replay: Replay, cases: Sequence[PlannedCase], states: frozenset[CaseState]) -> list[PlannedCase]:
    return [case for case in cases if read_case(replay.folder, case.key)[1] in states]


def _read_failures(replay: Replay, cases: Sequence[PlannedCase]) -> dict[str, str]:
    """Return a dict from the key of each case that failed to the reason."""
    states = {case.key: read_case(replay.folder, case.key) for case in cases}
    return {key: reason for key, (_, state, reason) in states.items() if state == "failed"}


def _explain_cut(planned: PlannedAttack, cases: int, judged: int, unfinished: int, seconds: float, *, null: bool) -> str:
    """Return that an attack or its null was stopped, after how many seconds, and on how many of its cases it is judged.

    unfinished: number of the judged cases whose search was stopped.
    """
    who = f"the null of {planned.spec}" if null else f"{planned.spec}"
    stopped = f", {unfinished} of them by what was found until then" if unfinished else ""
    verdict = f"it is judged on {judged} of {cases} cases{stopped}" if judged else "it has no verdict"
    return (
        f"{who} {STOPPED} {seconds:.0f} seconds, when its time was used up, and {verdict}; repeat the audit to continue it, or "
        "give a larger --budget"
    )


class TimeLimit:
    """The state of a time limit. is_over: whether the time was used up, so that the `with` block was stopped."""

    def __init__(self) -> None:
        self.is_over = False

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal at the end of the time: raise KeyboardInterrupt in the main thread, as Ctrl-C does."""
        self.is_over = True
        raise KeyboardInterrupt


@contextmanager
def limit_time(seconds: float) -> Iterator[TimeLimit]:
    """Raise KeyboardInterrupt inside the `with` block after `seconds`, so that attacks keep their best results, and suppress it.

    Ctrl-C is not suppressed. Signals reach only the main thread: in other threads, nothing is stopped.
    """
    limit = TimeLimit()
    if threading.current_thread() is not threading.main_thread():
        yield limit
        return
    previous = signal.signal(signal.SIGALRM, limit.stop)
    signal.setitimer(signal.ITIMER_REAL, min(max(seconds, 1e-3), MAX_TIMER_SECONDS))
    try:
        yield limit
    except KeyboardInterrupt:
        if not limit.is_over:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
