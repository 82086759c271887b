"""Tests of audits by the service: the job, its progress, and who may read its verdict."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attacker.audit  # noqa: F401
from attacker.attacks import AttackSpec
from attacker.replay.executors.worker_loop import Interrupt
from attacker.service.audit_files import make_audit_base, make_audit_paths
from attacker.service.jobs.job import AuditSpec, JobSpec
from attacker.service.worker.audit_execution import AuditProgress, describe_seconds
from attacker.service.worker.execution import run_job
from attacker.service.worker.messages import JobTask
from attacker.service.worker.preview_files import make_preview_path
from fedsim.recording.files import make_private

Ask = Callable[..., Any]
SECONDS = 1


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short time limit for bounds, which are slow and tested elsewhere."""
    monkeypatch.setattr(sys.modules["attacker.audit.audit"], "BOUND_SECONDS", 1e-3)


def make_task(root: Path, state: Path, job: str, *, truth: bool = True) -> JobTask:
    """Return the task that the supervisor would make of an audit of `digits`."""
    make_private(state / "audits")
    make_private(state / "previews")
    run = root / "digits"
    return JobTask(
        job=job,
        spec=AuditSpec(recording="digits", seconds=SECONDS).model_dump(mode="json"),
        run=str(run),
        truth=(str(run / "truth"),) if truth else (),
        lock=str(state / "lock"),
        preview=str(make_preview_path(state, job)),
        threads=1,
        device="cpu",
        audit=str(make_audit_base(state, job)),
    )


def complete_audit(asked: Any, root: Path, *, truth: bool = True) -> str:
    """Submit an audit, run it as a worker would, publish its result, and return the id of its job."""
    job: str = asked("/api/v1/recordings/digits/audit", method="POST", json={"seconds": SECONDS}).json()["id"]
    outcome = run_job(
        make_task(root, asked.components.settings.state_folder, job, truth=truth), Interrupt(), lambda share, words: None
    )
    assert outcome.state == "done", outcome.error
    asked.components.queue.publish(asked.components.queue.claim("test"), outcome.result)
    return job


def test_audit_job_writes_its_verdict_and_reports_the_time_left(root: Path, tmp_path: Path) -> None:
    reported: list[tuple[float, str]] = []
    outcome = run_job(make_task(root, tmp_path, "a" * 16), Interrupt(), lambda share, words: reported.append((share, words)))
    assert (outcome.state, outcome.error, outcome.result.scored) == ("done", None, True)
    assert {part.null for part in outcome.result.attacks} == {False, True}
    shares = [share for share, _ in reported]
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    assert any("exact" in words and "left at most" in words for _, words in reported)
    page, data = make_audit_paths(make_audit_base(tmp_path, "a" * 16))
    assert "Verdict: severe" in page.read_text()
    assert '"grade": "severe"' in data.read_text()
    assert not (root / "digits" / "audit.html").exists()


def test_progress_counts_skipped_attacks_as_done() -> None:
    reported: list[tuple[float, str]] = []
    progress = AuditProgress({"exact": 10.0, "spans": 10.0, "cpl": 20.0}, lambda share, words: reported.append((share, words)))
    for name, null, share in (("exact", False, 0.5), ("exact", True, 1.0), ("cpl", True, 0.5)):
        progress.report(AttackSpec(name=name, null=null), share, "")
    assert [share / 0.95 for share, _ in reported] == pytest.approx([0.0625, 0.25, 0.875])
    assert "5 s left" in reported[-1][1]


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (99, "99 s"), (600, "10 min"), (2 * 3600, "2.0 h")])
def test_durations_are_described_briefly(seconds: float, words: str) -> None:
    assert describe_seconds(seconds) == words


def test_verdict_is_served_after_the_job_and_only_with_access_to_truth(ask: Ask, root: Path) -> None:
    asked = ask(truth="own")
    answer = asked("/api/v1/recordings/digits/audit", method="POST", json={"seconds": SECONDS})
    assert answer.status_code == 201
    waiting = answer.json()["id"]
    assert answer.headers["Location"].endswith(waiting)
    assert asked(f"/api/v1/jobs/{waiting}/audit").status_code == 409
    asked.components.queue.cancel(waiting)
    job = complete_audit(asked, root)
    verdict = asked.json(f"jobs/{job}/audit")
    assert (verdict["grade"], verdict["scored"]) == ("severe", True)
    assert verdict["findings"][0]["grade"] == "severe"
    page = asked(verdict["page"])
    assert page.headers["Content-Type"].startswith("text/html")
    assert "script-src" not in page.headers["Content-Security-Policy"]
    assert "Verdict: severe" in page.text

    # a service without --truth does not serve a verdict that used true examples
    without = ask()
    for path in (f"jobs/{job}/audit", f"jobs/{job}/audit/page"):
        answer = without(f"/api/v1/{path}")
        assert answer.status_code == 409
        assert "--truth" in answer.json()["error"]["message"]
    assert "severe" not in without("/api/v1/jobs").text


def test_audit_without_true_examples_is_not_scored(ask: Ask, root: Path) -> None:
    asked = ask()
    verdict = asked.json(f"jobs/{complete_audit(asked, root, truth=False)}/audit")
    assert not verdict["scored"]
    assert "The true examples to compare them with were not given" in verdict["findings"][0]["evidence"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("recordings/none/audit", {}, 404),
        ("recordings/digits/audit", {"seconds": 0}, 422),
        ("recordings/digits/audit", {"seconds": "10m"}, 422),
        ("recordings/digits/audit", {"seconds": 1e9}, 422),
        ("recordings/digits/audit", {"attack": "cpl"}, 422),
    ],
)
def test_wrong_requests_are_refused(ask: Ask, path: str, body: dict[str, Any], status: int) -> None:
    answer = ask()(f"/api/v1/{path}", method="POST", json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_only_audits_have_a_verdict(ask: Ask) -> None:
    asked = ask()
    job = asked.components.queue.submit(JobSpec(recording="digits", attack="exact")).id
    assert "is not an audit" in asked(f"/api/v1/jobs/{job}/audit").json()["error"]["message"]
    assert asked("/api/v1/jobs/none/audit").status_code == 404


def test_deleted_verdict_is_refused_with_what_to_do(ask: Ask, root: Path) -> None:
    asked = ask()
    job = complete_audit(asked, root, truth=False)
    for path in make_audit_paths(make_audit_base(asked.components.settings.state_folder, job)):
        path.unlink()
        for address in ("audit", "audit/page"):
            answer = asked(f"/api/v1/jobs/{job}/{address}")
            message = answer.json()["error"]["message"]
            assert answer.status_code == 409
            assert "deleted" in message
            assert "audit the recording again" in message
            assert "when it is done" not in message
