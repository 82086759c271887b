"""The demonstration, on the local engine and with few steps: what it leaves, and that it goes on after a crash."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from attacker import demo
from fedsim.engine import EngineError
from fedsim.server.app import Server
from fedsim.wire.files import read_json_lines


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ATTACKS", {"cpl": {"steps": 1}, "inverting_gradients": {"steps": 2}})


def test_the_demonstration_leaves_a_page(short: None, tmp_path: Path) -> None:
    page = demo.run(tmp_path, engine="local")
    assert page == tmp_path / "report.html"
    rows = [row for run in ("undefended", "defended") for row in read_json_lines(tmp_path / run / "scores.jsonl")]
    assert {(row["run"], row["attack"], row["null"], row["knows_defense"]) for row in rows} == {
        (run, attack, null, knows)
        for attack in ("cpl", "inverting_gradients")
        for null in (False, True)
        for run, knows in (("undefended", True), ("defended", True), ("defended", False))
    }
    assert len(rows) == 24 * 2 * 2 * 3
    used = [{(row["case"], row["index"]) for row in rows if row["run"] == run} for run in ("undefended", "defended")]
    assert used[0] == used[1]


def test_the_demonstration_goes_on_after_a_crash(short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Server._commit

    def crash(self: Server, number: int, *rest: Any) -> None:
        if number == 2:
            raise MemoryError("no more")
        commit(self, number, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Server, "_commit", crash)
        with pytest.raises(EngineError, match="no more"):
            demo.run(tmp_path, engine="local")
    index = tmp_path / "undefended" / "recording" / "index.sqlite"
    stamp = index.stat().st_mtime_ns
    assert demo.run(tmp_path, engine="local").exists()
    assert index.stat().st_mtime_ns > stamp
    assert len(read_json_lines(tmp_path / "undefended" / "metrics.jsonl")) == 4
    stamp = index.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "undefended" / "reconstructions")
    demo.run(tmp_path, engine="local")
    assert index.stat().st_mtime_ns == stamp
    assert (tmp_path / "undefended" / "reconstructions").is_dir()
