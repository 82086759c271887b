"""Tests of the demonstration on the local engine with few steps: its files, and that it resumes after a crash."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attacker.commands import demo
from fedsim.config.experiment import read
from fedsim.engine.engines import EngineError
from fedsim.recording.files import read_json_lines
from fedsim.server.app import FederationServer


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demonstration limited to two clients and two rounds of each federation, and two steps of each search."""
    for name, federation in demo.DEMO_FEDERATIONS.items():
        attacks = tuple((attack, {"steps": 2}) for attack, _ in federation.attacks)
        short = replace(federation, overrides={**federation.overrides, "clients.count": 2, "rounds": 2}, attacks=attacks)
        monkeypatch.setitem(demo.DEMO_FEDERATIONS, name, short)


def test_demo_writes_scores_and_a_page(short: None, tmp_path: Path) -> None:
    page = demo.run(tmp_path, engine="local")
    assert page == tmp_path / "report.html"
    rows = [row for run in demo.DEMO_FEDERATIONS for row in read_json_lines(tmp_path / run / "scores.jsonl")]
    assert {(row["run"], row["attack"], row["null"], row["knows_defense"]) for row in rows} == {
        (run, attack, null, knows)
        for run, federation in demo.DEMO_FEDERATIONS.items()
        for attack, _ in federation.attacks
        for null in (False, True)
        for knows in {True, not federation.overrides.get("defense")}
    }
    assert all(run in page.read_text() for run in demo.DEMO_FEDERATIONS)
    used = [{(row["case"], row["index"]) for row in rows if row["run"] == run} for run in ("single", "compressed")]
    assert used[0] == used[1], "both attackers face the same photographs"
    assert all((tmp_path / run / "metrics.jsonl").exists() for run in demo.DEMO_FEDERATIONS)


@pytest.mark.parametrize(("name", "changed"), [("compressed", {"defense"}), ("noisy", {"defense"})])
def test_defended_federation_differs_in_the_defense_only(name: str, changed: set[str]) -> None:
    """Otherwise the accuracies and attacks that the page shows beside each other would not be comparable."""
    undefended = demo.DEMO_FEDERATIONS[{"compressed": "single", "noisy": "batches"}[name]]
    both = [
        read(demo.EXPERIMENT_FILE, list(one.overrides.items())).model_dump() for one in (undefended, demo.DEMO_FEDERATIONS[name])
    ]
    assert {key for key in both[0] if both[0][key] != both[1][key]} == changed


def test_demo_continues_after_a_crash(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DEMO_FEDERATIONS", {"single": demo.DEMO_FEDERATIONS["single"]})
    commit, folder = FederationServer._commit, tmp_path / "single"

    def crash(self: FederationServer, number: int, *rest: Any) -> None:
        if number == 2:
            raise MemoryError("no more")
        commit(self, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(FederationServer, "_commit", crash)
        with pytest.raises(EngineError, match="no more"):
            demo.run(tmp_path, engine="local")
    assert not (folder / "reconstructions").exists()
    assert demo.run(tmp_path, engine="local").exists()
    assert [row["round"] for row in read_json_lines(folder / "metrics.jsonl")] == [0, 1, 2]
    stamp = (folder / "metrics.jsonl").stat().st_mtime_ns
    shutil.rmtree(folder / "reconstructions")
    demo.run(tmp_path, engine="local")
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == stamp, "a finished federation is not run again"
    assert (folder / "reconstructions").is_dir()
