"""Tests of the time budget of an audit while its attacks run: what takes too long is stopped, not started, and named."""

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from federations import federate
from typer.testing import CliRunner

from attacker.attacks import AttackSpec, Case
from attacker.attacks.closed_form.attack import ClosedForm
from attacker.audit import Audit, attack_runs, audit
from attacker.audit import plan as audit_plans
from attacker.audit.attack_runs import AttackRuns, RunReplay, limit_time
from attacker.audit.plan import PlannedAttack
from attacker.bounds import FisherInformation
from attacker.cli import app
from attacker.reconstruction import Reconstruction
from attacker.replay import replay as replays
from attacker.replay.replay import Replay, ReplayResult
from attacker.scoring import Scorer, ScoreRow
from attacker.scoring.states import read_case
from fedsim.recording import Recording

SECONDS = 3.0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "slow", model="lenet_cpl", data="photos", clients=2, batch_size=4)


@pytest.fixture
def run(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run, on which every attack is expected to take no time."""
    monkeypatch.setattr(replays, "measure_slowdown", lambda *_: 1e-6)
    monkeypatch.setattr(attack_runs, "MIN_SECONDS", 0.0)
    return Path(shutil.copytree(recorded, tmp_path / "slow"))


def list_reasons(found: Audit) -> list[str]:
    return [one.reason for one in found.not_checked if one.rule == "attack" and one.kind == "left out"]


@pytest.mark.parametrize("scored", [True, False])
def test_attacks_end_with_the_budget_although_the_forecast_is_wrong(run: Path, scored: bool) -> None:
    started: dict[str, float] = {}

    def replay(one: Replay) -> ReplayResult:
        started.setdefault("first", time.monotonic())
        try:
            return one.run()
        finally:
            started["last"] = time.monotonic()

    found = audit(run, seconds=SECONDS, truth=[run / "truth"] if scored else [], run_replay=replay)
    assert started["last"] - started["first"] < 3 * SECONDS  # also the time for scores and for writing results
    stopped = [reason for reason in list_reasons(found) if "was stopped after" in reason]
    assert stopped
    for reason in stopped:
        has_verdict = reason.partition(" was")[0].removeprefix("the null of ") in {one.spec for one in found.attacks}
        assert has_verdict == ("it is judged on" in reason)
        assert has_verdict != ("it has no verdict" in reason)


def test_closed_forms_that_are_stopped_keep_the_updates_that_they_solved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, solve, called = federate(tmp_path / "run", clients=3, batch_size=1), ClosedForm.__call__, []

    def answer(self: ClosedForm, cases: Sequence[Case], **more: Any) -> list[Reconstruction]:
        called.append(cases)
        if len(called) == 2:
            signal.raise_signal(signal.SIGALRM)  # the time is used up
        return solve(self, cases, **more)

    monkeypatch.setattr(ClosedForm, "__call__", answer)
    monkeypatch.setattr(audit_plans, "CANDIDATE_ATTACKS", (("exact", {"fallback": "none"}),))
    shutil.rmtree(run / "truth")
    result = CliRunner().invoke(app, ["audit", str(run), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (exact,) = [one for one in found["attacks"] if one["spec"].startswith("exact")]
    assert (exact["updates"], exact["confident"]) == (1, 1)
    assert found["grade"] == "severe"
    assert any("exact" in one["reason"] and "it is judged on 1 of 3 cases" in one["reason"] for one in found["not_checked"])


@pytest.mark.parametrize(("seconds", "bounded"), [(1.0, False), (600.0, True)])
def test_bounds_take_at_most_a_tenth_of_the_budget(
    tmp_path: Path, seconds: float, bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bound needs 64 products, which take 0.004 s each here, so that it is expected to take more than 0.1 s."""
    run, multiply = federate(tmp_path / "digits", clients=1, batch_size=1), FisherInformation.multiply
    monkeypatch.setattr(FisherInformation, "multiply", lambda *given: (time.sleep(0.004), multiply(*given))[1])
    found = audit(run, seconds=seconds, truth=[run / "truth"])
    (exact,) = [one for one in found.attacks if one.spec.startswith("exact")]
    reasons = [one.reason for one in found.not_checked if one.rule == "bounds"]
    assert (exact.efficiency is not None) == bounded
    assert any("attacker score --bounds TIME" in reason for reason in reasons) != bounded


def test_the_command_names_what_was_stopped(run: Path) -> None:
    result = CliRunner().invoke(app, ["audit", str(run), "--budget", f"{SECONDS:.0f}s"])
    assert result.exit_code == 0
    assert "was stopped after" in result.stdout
    assert "give a larger --budget" in result.stdout


def plan(recording: Recording, *expected: float) -> list[PlannedAttack]:
    """Return attacks on all updates that are expected to take these numbers of seconds."""
    rows = tuple(recording.read_rows())
    specs = [AttackSpec(name="cpl", arguments={"steps": steps + 2}) for steps in range(len(expected))]
    return [PlannedAttack(spec=one, rows=rows, core_seconds=seconds) for one, seconds in zip(specs, expected, strict=True)]


def prepare(run: Path, run_replay: RunReplay) -> AttackRuns:
    scorer = Scorer(run, [run / "truth"])
    recording = Recording(run / "recording")
    return AttackRuns(recording=recording, out=run / "reconstructions", scorer=scorer, model=None, run_replay=run_replay)


def test_an_attack_is_judged_on_the_cases_that_it_finished(run: Path) -> None:
    """The attack finishes one of two updates, and the time ends during the second."""

    def replay(one: Replay) -> ReplayResult:
        if one.spec.null:
            return one.run()
        first = one.plan.cases[0].rows[0].client
        Replay(recording=one.recording, spec=one.spec, out=one.out, clients=frozenset({first})).run()
        sleep(60)
        raise AssertionError("the time did not end")

    runs = prepare(run, replay)
    runs.run(plan(runs.recording, 0.0), 20)
    (attack,) = runs.attacks
    assert (attack.updates, attack.failed, attack.examples) == (1, 0, 4)
    (reason,) = [one.reason for one in runs.left_out]
    assert "it is judged on 1 of 2 cases; repeat" in reason


@pytest.mark.parametrize(
    ("scored", "steps", "seconds", "judged"), [(True, 1000, 24, True), (True, 10**6, 8, False), (False, 1000, 3, True)]
)
def test_a_stopped_search_is_judged_on_its_best_result_beside_a_whole_null(
    run: Path, scored: bool, steps: int, seconds: float, judged: bool
) -> None:
    """The search is stopped early, and with more steps its null as well, which then would be too weak to compare with.

    Without truth, the confidence in the result of the stopped search decides.
    """

    def replay(one: Replay) -> ReplayResult:
        if one.spec.null:
            return one.run()
        sleep(60)
        raise AssertionError("the time did not end")

    runs = prepare(run, replay)
    runs.scorer = runs.scorer if scored else None
    search = AttackSpec(name="inverting_gradients", arguments={"steps": steps, "give_up": 0.0})
    (planned,) = [replace(one, spec=search) for one in plan(runs.recording, 0.0)]
    attack = planned.replay(runs.recording, runs.out, null=False)
    for limit in (1.5, 6, 24):  # on a busy machine, the search may not begin within the first
        with limit_time(limit):
            attack.run()
        if all(read_case(attack.folder, case.key)[1] == "interrupted" for case in attack.plan.cases):
            break
    runs.run([planned], seconds)
    (reason,) = [one.reason for one in runs.left_out]
    assert ("it is judged on 2 of 2 cases, 2 of them by what was found until then" in reason) == judged
    assert ("it has no verdict" in reason) != judged
    assert [attack.updates for attack in runs.attacks] == [2] * judged
    assert [attack.examples for attack in runs.attacks] == [8 * scored] * judged
    assert all("interrupted" not in attack.doubt for attack in runs.attacks)


def test_an_attack_without_enough_time_left_is_not_started(run: Path) -> None:
    """The first attack, which was expected to take no time, leaves less than half of what the second is expected to take."""
    asked: list[str] = []

    def replay(one: Replay) -> ReplayResult:
        asked.append(str(one.spec))
        sleep(0.3)
        return one.run()

    runs = prepare(run, replay)
    runs.run(plan(runs.recording, 0.0, 100.0), 40)
    assert {spec.partition(" without")[0] for spec in asked} == {"cpl(steps=2)"}
    (reason,) = [one.reason for one in runs.left_out]
    assert "cpl(steps=3) was not started: it is expected to take 100 seconds" in reason


def test_only_the_first_attack_and_closed_forms_have_a_minimum(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two attacks, which have no forecast, use more than the budget, and a search is not started then.

    Time passes by a clock that only the attacks move.
    """
    clock, asked = [0.0], list[str]()
    monkeypatch.setattr(attack_runs, "MIN_SECONDS", 600.0)
    monkeypatch.setattr(attack_runs, "monotonic", lambda: time.monotonic() + clock[0])

    def replay(one: Replay) -> ReplayResult:
        asked.append(str(one.spec))
        clock[0] += 120
        return one.run()

    runs = prepare(run, replay)
    runs.scorer = None
    runs.run(plan(runs.recording, 0.0, 0.0, 50.0), 100)
    assert asked == ["cpl(steps=2)", "cpl(steps=3)"]
    assert len(runs.attacks) == 2
    (reason,) = [one.reason for one in runs.left_out]
    assert "cpl(steps=4) was not started" in reason
    assert "left 0 of the budget of 100 seconds" in reason


def test_the_time_for_scores_is_part_of_the_budget(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring the first attack takes all of the budget, by a clock that only the scores move."""
    clock = [0.0]
    monkeypatch.setattr(attack_runs, "monotonic", lambda: time.monotonic() + clock[0])

    def score(folder: Path) -> list[ScoreRow]:
        clock[0] += 600
        return Scorer(run, [run / "truth"]).score(folder)

    runs = prepare(run, Replay.run)
    monkeypatch.setattr(runs.scorer, "score", score)
    runs.run(plan(runs.recording, 0.0, 10.0), 600)
    (reason,) = [one.reason for one in runs.left_out]
    assert "cpl(steps=3) was not started" in reason


def sleep(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)


def test_the_limit_stops_only_its_block() -> None:
    with limit_time(0.05) as limit:
        sleep(10)
    assert limit.is_over
    with limit_time(0.05) as limit:
        pass
    sleep(0.1)
    assert not limit.is_over
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_ctrl_c_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt), limit_time(10):
        raise KeyboardInterrupt


def test_other_threads_have_no_limit() -> None:
    over: list[bool] = []

    def work(wait: Callable[[float], None] = sleep) -> None:
        with limit_time(0.05) as limit:
            wait(0.2)
        over.append(limit.is_over)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert over == [False]
