"""Tests of commands with half a minute of randomly damaged runs, and of the fuzzer that makes them."""

from pathlib import Path

import pytest
import run_fuzzer as fuzzer

SECONDS = 30.0


def test_no_command_fails_on_randomly_damaged_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = fuzzer.fuzz(SECONDS, seed=1)
    with capsys.disabled():
        print({key: value for key, value in found.items() if key != "failures"})
    assert found["failures"] == []
    assert found["refused"] > 0
    assert found["done"] > 0
    assert all(found[kind] == 0 for kind in fuzzer.WRONG)


def loop_forever() -> tuple[int, str]:
    while True:
        pass


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda: (0, ""), "done"),
        (lambda: (2, "error"), "refused"),
        (lambda: (70, "Traceback"), "traceback"),
        (lambda: [][0], "traceback"),
        (lambda: (Path("/tmp/../outside of all").write_text("x"), "")[1], "write outside"),
        (lambda: __import__("os").system("true"), "child process"),
        (lambda: __import__("os").kill(__import__("os").getpid(), 11), "crash"),
        (lambda: (0, f"a{fuzzer.STEERING}"), "terminal"),
        (loop_forever, "hang"),
        (lambda: __import__("time").sleep(30), "hang"),
        (lambda: (0, str(len(bytearray(b"x") * 300_000_000))), "memory"),
    ],
)
def test_each_kind_of_failure_is_detected(work: object, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzer, "SECONDS", 1.0)
    monkeypatch.setattr(fuzzer, "MEMORY", 2 * 10**8)
    assert fuzzer.in_a_child(work, (tmp_path,))[0] == kind


def test_a_change_outside_the_run_is_detected(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    before = fuzzer.snapshot(tmp_path)
    (tmp_path / "secret").chmod(0o600)
    assert fuzzer.snapshot(tmp_path) != before
