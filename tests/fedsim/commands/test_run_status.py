"""Tests of the exit status of a run, which says whether updates are missing or not finite."""

from pathlib import Path

import numpy as np
import pytest
import tomli_w
from command_line import join_lines, run_fedsim

from fedsim.client import app as client_app
from fedsim.commands.console import EXIT_FAILURES


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    np.savez(tmp_path / "data.npz", images=np.arange(160, dtype=np.uint8).reshape(10, 4, 4), labels=np.arange(10) % 2)
    facts = {
        "rounds": 1,
        "model": {"name": "mlp", "hidden": [4]},
        "data": {"name": "npz", "train": str(tmp_path / "data.npz")},
        "clients": {"count": 2},
        "training": {"learning_rate": 0.1, "batch_size": 1, "steps": 2},
    }
    (tmp_path / "e.toml").write_text(tomli_w.dumps(facts))
    return tmp_path / "e.toml"


def run(experiment: Path, *more: str) -> tuple[int, str]:
    words = ["run", str(experiment), "--engine", "local", "--out", str(experiment.parent / "run"), "--device", "cpu", *more]
    result = run_fedsim(*words)
    return result.exit_code, join_lines(result.output)


def test_a_run_that_went_well_ends_with_status_0(experiment: Path) -> None:
    assert run(experiment)[0] == 0


@pytest.mark.parametrize(("more", "status"), [((), EXIT_FAILURES), (("--allow-failures",), 0)])
def test_updates_that_are_not_finite_are_reported(experiment: Path, more: tuple[str, ...], status: int) -> None:
    code, words = run(experiment, "--set", "training.learning_rate=1e38", *more)
    assert code == status
    assert ("lower training.learning_rate" in words) == bool(status)


def test_one_client_that_fails_is_reported(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, seen = client_app.TruthWriter.write, set[str]()

    def fail_once(self: object, *given: object) -> None:
        if not seen:
            seen.add("first")
            raise RuntimeError("unplugged")
        write(self, *given)

    monkeypatch.setattr(client_app.TruthWriter, "write", fail_once)
    code, words = run(experiment)
    assert code == EXIT_FAILURES
    assert "1 reply is missing; fedsim show" in words


@pytest.mark.parametrize(("threshold", "low"), [(3, False), (2, True)])
def test_limits_of_secure_aggregation_are_printed_at_the_start(experiment: Path, threshold: int, low: bool) -> None:
    code, words = run(
        experiment, "--set", "clients.count=4", "--set", f"secure_aggregation={{ threshold = {threshold}, clip = 1.0 }}"
    )
    assert code == 0, words
    assert "Public keys are not authenticated" in words
    assert ("is at most half of the 4 clients" in words) == low
