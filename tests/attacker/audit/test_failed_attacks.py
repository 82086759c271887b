"""Tests of audits whose attacks fail: numbers of failures in every format, and a verdict that claims nothing from attacks."""

import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from federations import federate

from attacker.audit import Audit, NotChecked, audit
from attacker.audit.attack_findings import MAX_REASON, NO_ANSWER, AuditedAttack, judge_results
from attacker.audit.output import render, to_junit, to_sarif
from attacker.audit.what_if import AuditOutcome, MeasuredChange, describe_change, describe_outcome
from attacker.replay.replay import Replay, ReplayResult

REASON = "ValueError: mat1 and mat2 must have the same dtype\n" + "long " * 100


def fail_first(count: int) -> Callable[[Replay], ReplayResult]:
    """Return a replay of which each attack, but not its null, fails on its first `count` cases and does nothing for others."""

    def replay(one: Replay) -> ReplayResult:
        failed = {case.key: REASON for case in one.plan.cases[:count]}
        return ReplayResult(one.folder, failed={} if one.spec.null else failed)

    return replay


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of two rounds of two clients, without truth."""
    out = federate(tmp_path_factory.mktemp("runs") / "failing", rounds=2, batch_size=4, defense="gaussian(0.1)")
    shutil.rmtree(out / "truth")
    return out


def fail_audit(run: Path, count: int) -> Audit:
    return audit(run, seconds=1e9, run_replay=fail_first(count))


def test_failures_are_counted_in_updates_with_a_short_reason(run: Path) -> None:
    attacks = {one.spec.partition("(")[0]: one for one in fail_audit(run, 1).attacks}
    assert {(one.updates, one.failed) for name, one in attacks.items() if not one.is_joint} == {(2, 1)}
    assert (attacks["accumulate"].updates, attacks["accumulate"].failed) == (4, 2)  # a client's rounds fail together
    assert all(one.has_answer for one in attacks.values())
    assert all(one.failure.startswith("ValueError: mat1") and len(one.failure) <= MAX_REASON + 3 for one in attacks.values())


def test_an_audit_without_answers_draws_no_conclusion_in_any_format(run: Path) -> None:
    found = fail_audit(run, 99)
    assert not found.has_answer
    assert found.as_json()["has_answer"] is False
    assert all(one.failed == one.updates for one in found.attacks)
    inconclusive = [one.reason for one in found.not_checked if one.kind == "inconclusive"]
    assert NO_ANSWER in inconclusive
    assert any(reason.startswith("exact(fallback='none') failed on 2 of 2 updates: ValueError") for reason in inconclusive)
    page = render(found, run)
    assert "No leak found" not in page
    assert "No conclusion from attacks: no attack produced an answer." in page
    assert "exact (2 updates, failed on all)" in page
    assert "<td>2: ValueError: mat1 and mat2 must have the same dtype" in page
    (invocation,) = to_sarif(found)["runs"][0]["invocations"]
    assert not invocation["executionSuccessful"]
    assert {one["level"] for one in invocation["toolExecutionNotifications"]} == {"warning", "error"}
    suite = ElementTree.fromstring(to_junit(found))
    assert suite.get("errors") == "1" == str(len(suite.findall("testcase/error")))
    assert int(suite.get("tests", "")) == len(suite.findall("testcase"))


def test_an_audit_with_answers_has_no_error(run: Path) -> None:
    found = fail_audit(run, 1)
    assert found.has_answer
    assert NO_ANSWER not in render(found, run).lower()
    assert to_sarif(found)["runs"][0]["invocations"][0]["executionSuccessful"]
    assert ElementTree.fromstring(to_junit(found)).get("errors") == "0"


@pytest.mark.parametrize("scored", [True, False])
def test_attacks_that_did_not_run_are_no_conclusion(scored: bool) -> None:
    (found,) = judge_results([], scored=scored)
    assert isinstance(found, NotChecked)
    assert (found.reason, found.kind) == (NO_ANSWER, "inconclusive")


def test_effect_of_a_change_is_not_claimed_from_attacks_without_answers(run: Path) -> None:
    after = describe_outcome("low", (AuditedAttack(spec="exact", updates=2, failed=2),), run)
    words = describe_change(MeasuredChange(change="clip(1)", before=AuditOutcome(grade="severe"), after=after))
    assert "after the change, none had an answer" in words
