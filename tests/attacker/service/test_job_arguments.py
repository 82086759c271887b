"""Tests that jobs cannot name files, modules or addresses in arguments of attacks, and of limits of jobs."""

import os
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import ValidationError

from attacker.attacks import ATTACKS
from attacker.attacks.arguments import FilePath, OneOf, check_settable, list_settable
from attacker.replay.executors.process_usage import read_memory_limit
from attacker.service.jobs.job import JobSpec
from attacker.service.settings import JOB_SECONDS, ServiceSettings

HOSTILE = ("/etc/passwd", "../own.npz", "os:system", "http://127.0.0.1:1/x", "file:///etc/passwd", "", "\0")
Ask = Callable[..., Any]


@pytest.mark.parametrize("name", list(ATTACKS))
def test_arguments_of_attacks_accept_no_undeclared_text(name: str) -> None:
    allowed = list_settable(ATTACKS[name])
    for key in signature(ATTACKS[name]).parameters:
        for value in HOSTILE:
            with pytest.raises(ValidationError):
                JobSpec(recording="r", attack=name, arguments={key: value})
        for word in allowed[key].words if key in allowed else ():
            check_settable(name, ATTACKS[name], {key: word})


def test_refusal_does_not_reveal_whether_a_file_exists(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    os.mkfifo(tmp_path / "fifo")
    asked, answers = ask(), []
    for name in ("there", "not there", "fifo"):
        arguments = {"init": "insider", "auxiliary": str(tmp_path / name)}
        answers.append(asked("/api/v1/jobs", "POST", json={"recording": "digits", "attack": "cpl", "arguments": arguments}))
    assert {answer.status_code for answer in answers} == {422}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["error"]["field"] == "spec.arguments.auxiliary"
    assert asked.json("jobs")["items"] == []


def test_listed_arguments_are_those_that_jobs_may_set(ask: Ask) -> None:
    items = ask().json("attacks")["items"]
    assert {one["name"]: "auxiliary" in one["arguments"] for one in items}["cpl"] is False
    for one in items:
        assert set(one["arguments"]) == set(list_settable(ATTACKS[one["name"]]))


def undeclared(*, steps: int = 1, init: str = "patterned", decoder: str | None = None, free=1, words="a", **more: Any) -> None:
    """Stand in for an attack of an installed package, whose text arguments declare no values."""


def declared(
    *,
    steps: int | None = 1,
    share: float | Literal["all"] = 0.5,
    init: Annotated[str, OneOf(("a", "b"))] = "a",
    mode: Literal["x", "y"] = "x",
    images: FilePath = "",
    many: tuple[str, ...] = (),
    at: Path | None = None,
) -> None:
    """Stand in for an attack whose arguments declare their values."""


def test_text_arguments_of_custom_attacks_need_declared_values() -> None:
    assert set(list_settable(undeclared)) == {"steps", "free"}
    for key in ("init", "decoder", "words", "anything"):
        with pytest.raises(ValueError, match=f"theirs: {key} cannot be set by a job"):
            check_settable("theirs", undeclared, {key: "a"})
    assert set(list_settable(declared)) == {"steps", "share", "init", "mode"}
    check_settable("ours", declared, {"steps": None, "share": "all", "init": "b", "mode": "y"})
    with pytest.raises(ValueError, match="cannot set init to '/etc/passwd'; choose one of a, b"):
        check_settable("ours", declared, {"init": "/etc/passwd"})
    with pytest.raises(ValueError, match="steps must be a number"):
        check_settable("ours", declared, {"steps": "/etc/passwd"})


def test_unresolvable_annotation_declares_nothing() -> None:
    def theirs(*, path: str = "", steps: int = 1) -> None: ...

    theirs.__annotations__ = {"path": "NoSuchName", "steps": "int"}
    assert set(list_settable(theirs)) == {"steps"}


def test_jobs_have_default_limits(tmp_path: Path) -> None:
    settings = ServiceSettings(root=tmp_path)
    assert settings.longest_job == JOB_SECONDS
    assert settings.limit_job_memory(64_000.0, 4) == pytest.approx(0.8 * 64_000 / 4)
    assert settings.limit_job_memory(64_000.0, 64) == 2000
    assert settings.limit_job_memory(1_000.0, 4) == pytest.approx(800)
    assert settings.limit_job_memory(None, 4) is None
    unlimited = ServiceSettings(root=tmp_path, job_limits=False)
    assert (unlimited.longest_job, unlimited.limit_job_memory(64_000.0, 4)) == (None, None)
    given = ServiceSettings(root=tmp_path, job_limits=False, job_seconds=5.0, job_megabytes=900)
    assert (given.longest_job, given.limit_job_memory(64_000.0, 4)) == (5.0, 900)
    assert ServiceSettings(root=tmp_path, ray="auto").limit_job_memory(64_000.0, 4) is None, (
        "nobody measures what a cluster takes"
    )


def test_memory_limit_of_this_machine_is_plausible() -> None:
    assert 100 * 2**20 < read_memory_limit() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_attack_that_needs_a_file_is_not_offered_and_is_refused_with_the_command(ask: Ask) -> None:
    asked = ask()
    assert "membership" not in {item["name"] for item in asked.json("attacks")["items"]}
    answer = asked("/api/v1/jobs", "POST", json={"recording": "digits", "attack": "membership", "arguments": {}})
    assert answer.status_code == 422
    assert "attacker replay --attack membership --set candidates=FILE.npz" in answer.json()["error"]["message"]
