"""Tests of the pieces of work for a GPU: each starts on a CPU, and an interrupted run continues."""

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from support.gpu import pieces as gpu

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "benchmarks" / "support"


def test_pieces_are_at_most_forty_and_each_has_its_own_name() -> None:
    names = [piece.name for piece in gpu.PIECES]
    assert len(names) == len(set(names)) <= 40
    assert names[0] == "tests"


def test_searches_of_a_network_fit_into_the_time_of_their_piece() -> None:
    text = (ROOT / "benchmarks" / "real.py").read_text()
    (seconds,) = re.findall(r'"cuda": ([\d.]+)', text)
    (batches,) = re.findall(r"BATCH_SIZES, QUICK_BATCH_SIZES = \(([\d, ]+)\)", text)
    assert 2 * len(batches.split(",")) * float(seconds) < gpu.PIECE_SECONDS  # each batch size has a search and its null


@pytest.mark.parametrize("piece", gpu.PIECES, ids=lambda piece: piece.name)
def test_pieces_name_existing_scripts_and_tables(piece: gpu.Piece) -> None:
    for dry in (False, True):
        words = piece.list_arguments(dry=dry, data=None, device="cpu")[1:]
        assert "--data" not in words
        if words[0] == "-m":
            assert words[1] == "pytest"
            assert (ROOT / words[-1]).is_dir()
            continue
        text = (ROOT / words[0]).read_text()
        if not words[1].startswith("--"):
            table = words[1]
            grid = "".join((SUPPORT / name).read_text() for name in ("defenses/grid.py", "cpl/tables.py"))
            known = re.findall(r'"([\w-]+)"', text + grid)
            known += [f"{network}-{size}" for network in ("resnet18", "mobilenet", "vit") for size in (64, 128, 224)]
            assert table in known, piece.name
    assert "--quick" in piece.dry or "pytest" in piece.dry
    data = piece.list_arguments(dry=False, data=Path("/some where"), device="cuda")
    assert data[0] == sys.executable
    assert "pytest" in data or (data[data.index("--data") + 1], data[data.index("--device") + 1]) == ("/some where", "cuda")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder for the results of three pieces, one of which fails."""
    result = (
        "import json; print('| a |'); print('|---|'); print('| 1 |'); print(json.dumps({'benchmark': 'b', 'rows': [{'a': 1}]}))"
    )
    calls = {"first": result, "second": "raise SystemExit(3)", "third": result}
    found = [gpu.Piece(name=name, shows=name, command=f'-c "{code}"', dry=f'-c "{code}"') for name, code in calls.items()]
    monkeypatch.setattr(gpu, "PIECES", tuple(found))
    return tmp_path / "results"


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["pieces.py", *words])
    gpu.main()


def test_run_continues_with_unfinished_pieces(
    pieces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call(monkeypatch, "--dry-run", "--out", str(pieces), "--only", "first")
    assert [path.stem for path in pieces.glob("*.json")] == ["first"]
    capsys.readouterr()
    call(monkeypatch, "--dry-run", "--out", str(pieces))
    printed = capsys.readouterr().out
    assert "first: done" not in printed
    assert "second: failed" in printed
    assert "third: done" in printed
    assert "2 of 3 pieces are done: left are second" in printed
    table = (pieces / "README.md").read_text()
    assert "| 1 |" in table
    assert "torch" in table
    assert "dry run on a CPU: its numbers mean nothing" in table
    printed = json.loads((pieces / "second.json").read_text())
    assert (printed["state"], printed["status"], printed["dry_run"]) == ("failed", 3, True)


def test_piece_of_another_commit_is_done_again(pieces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, "--dry-run", "--out", str(pieces), "--only", "first")
    monkeypatch.setattr(gpu, "read_commit", lambda: "another commit")
    assert gpu.find_state(pieces, gpu.PIECES[0], dry=True) == "other code"


def test_without_git_the_version_stands_for_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.read_commit() == f"fedleak {version('fedleak')}"


def test_a_dry_run_does_not_count_as_a_run(pieces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, "--dry-run", "--out", str(pieces), "--only", "first")
    assert gpu.find_state(pieces, gpu.PIECES[0], dry=True) == "done"
    assert gpu.find_state(pieces, gpu.PIECES[0], dry=False) == "left"


@pytest.mark.parametrize(
    ("has_rows", "printed", "state"),
    [
        (True, '{"benchmark": "b", "rows": [{"a": 1}]}', ("done", "")),
        (True, 'skipped: no reader\n{"benchmark": "b", "rows": []}', ("skipped", "no reader")),
        (True, '{"benchmark": "b", "rows": []}', ("failed", "its table has no rows")),
        (True, "| a |", ("failed", "it printed no result")),
        (False, "..s\n2 passed, 1 skipped in 1.0s", ("done", "")),
        (False, "SKIPPED [2] tests/a.py:3: no device\nSKIPPED [1] tests/a.py:9: no device\n3 skipped", ("skipped", "no device")),
    ],
)
def test_a_piece_is_done_only_with_rows_or_passed_tests(has_rows: bool, printed: str, state: tuple[str, str]) -> None:
    piece = gpu.Piece(name="any", shows="", command="", dry="", has_rows=has_rows)
    assert gpu.judge_output(piece, printed) == state


def test_skipped_piece_is_not_run_again(
    pieces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import json; print('skipped: no reader'); print(json.dumps({'benchmark': 'b', 'rows': []}))"
    monkeypatch.setattr(gpu, "PIECES", (gpu.Piece(name="one", shows="", command="", dry=f'-c "{code}"'),))
    call(monkeypatch, "--dry-run", "--out", str(pieces))
    assert "one: skipped (no reader)" in capsys.readouterr().out
    call(monkeypatch, "--dry-run", "--out", str(pieces))
    assert capsys.readouterr().out == "0 of 1 pieces are done; skipped are one\n"


def test_child_processes_of_a_stopped_piece_are_stopped(pieces: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    late = tmp_path / "late"
    inner = f"import time, pathlib; time.sleep(2); pathlib.Path('{late}').touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', \\\"{inner}\\\"])"
    monkeypatch.setattr(gpu, "PIECES", (gpu.Piece(name="one", shows="", command="", dry=f'-c "{code}"'),))
    monkeypatch.setattr(gpu, "DRY_SECONDS", 0.5)
    call(monkeypatch, "--dry-run", "--out", str(pieces))
    time.sleep(2)
    assert not late.exists()


def test_slow_piece_is_stopped_and_not_started_again(
    pieces: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = gpu.Piece(name="slow", shows="slow", command="", dry='-c "import time; print(1, flush=True); time.sleep(60)"')
    monkeypatch.setattr(gpu, "PIECES", (slow,))
    monkeypatch.setattr(gpu, "DRY_SECONDS", 1)
    call(monkeypatch, "--dry-run", "--out", str(pieces))
    assert json.loads((pieces / "slow.json").read_text())["state"] == "too long"
    call(monkeypatch, "--dry-run", "--out", str(pieces), "--minutes", "0.001")
    assert "slow: not started" in capsys.readouterr().out


def test_without_a_gpu_only_a_dry_run_starts(pieces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device here; --dry-run"):
        call(monkeypatch)
