"""Tests of grids of settings in TOML, and of sweeps by the command line: tables, interruption, and time budget."""

import csv
from pathlib import Path
from typing import Any

import pytest
from command_line import run_attacker
from typer.testing import Result

from attacker.replay.replay import Replay
from attacker.scoring import Scorer
from attacker.sweep import GridError, federations, read_grid, run_sweep
from fedsim.commands.console import EXIT_FAILURES, EXIT_UNFINISHED
from fedsim.engine import engines
from fedsim.engine.run import FederationRun

EXPERIMENT = """
rounds = 1
model = { name = "mlp", hidden = [16] }
data = "digits"
clients = { count = 3 }
training = { learning_rate = 0.1, batch_size = 1, steps = 1 }
"""
GRID = """
experiment = "base.toml"
attacked = { clients = 2, tuning_clients = 1 }
[defenses]
sent = [{ defense = "top_k(0.5)" }]
[attacks]
exact = { fallback = "none" }
inverting_gradients = { steps = 2, settings = [{ tv = 0.0 }, { tv = 0.1 }] }
"""
AXES = ("seeds", "batch_sizes", "local_steps", "rounds")


def write(folder: Path, grid: str = GRID, experiment: str = EXPERIMENT) -> Path:
    (folder / "base.toml").write_text(experiment)
    (folder / "grid.toml").write_text(grid)
    return folder / "grid.toml"


def call(*words: object) -> Result:
    return run_attacker("sweep", *words)


def read_rows(out: Path) -> list[dict[str, str]]:
    with (out / "sweep.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("grid", "advice"),
    [
        (GRID.replace("[defenses]", "[defences]"), "unknown key. Did you mean 'defenses'?"),
        (GRID.replace("top_k(0.5)", "topk(0.5)"), "top_k"),
        (GRID.replace("sent =", "none ="), "every grid has the undefended federation as its baseline"),
        (GRID.replace("tuning_clients = 1", "tuning_clients = 0"), "set attacked.tuning_clients to 1"),
        (GRID + "cpl = { settings = [{}, {}, {}] }\n", "attacks with several settings must all list the same number"),
        (GRID.replace("exact = ", "exakt = "), "exakt"),
        (GRID.replace('"base.toml"', '"other.toml"'), "other.toml: no such file"),
        (GRID.replace("steps = 2,", "steps = 0,"), "attacks.inverting_gradients"),
        *((f"{key} = [2, 1, 2]\n{GRID}", f"{key} lists 2 more than once") for key in AXES),
    ],
)
def test_wrong_grid_is_refused_with_file_and_advice(tmp_path: Path, grid: str, advice: str) -> None:
    path = write(tmp_path, grid)
    with pytest.raises(GridError, match=r"grid\.toml") as caught:
        read_grid(path)
    assert advice in str(caught.value)


def test_a_grid_is_the_product_of_its_axes(tmp_path: Path) -> None:
    text = "batch_sizes = [1, 2]\nlocal_steps = [1, 3]\nrounds = [1, 2, 3]\nseeds = [0, 1]\n" + GRID
    grid = read_grid(write(tmp_path, text))
    assert len(grid.federations) == 2 * 2 * 3 * 2 * 2
    assert len({one.name for one in grid.federations}) == len(grid.federations)
    assert {one.training for one in grid.federations} >= {(1, "1 step", 1), (2, "3 steps", 3)}
    assert grid.trials == 2


def test_the_shipped_grid_can_be_read() -> None:
    grid = read_grid(Path(__file__).parents[3] / "deploy" / "grids" / "digits.toml")
    assert len(grid.federations) == 2 * 2 * (1 + 3 * 2)


@pytest.mark.parametrize(
    ("attack", "defense", "knows"),
    [
        ("cpl = {}", 'defense = "clip(1)"', True),
        ("cpl = { knows_defense = false }", 'defense = "clip(1)"', False),
        ('exact = { fallback = "none" }', 'defense = "clip(1)"', False),
        ("exact = {}", 'defense = "clip(1)"', True),
        ("cpl = {}", 'inputs = "mixup(0.4)"', False),
        ("cpl = {}", 'gradient = "dp_sgd(max_norm=1, noise=1)"', True),
    ],
)
def test_knowledge_of_defenses_by_attacks(tmp_path: Path, attack: str, defense: str, knows: bool) -> None:
    text = f'experiment = "base.toml"\n[defenses]\none = [{{ {defense} }}]\n[attacks]\n{attack}\n'
    grid = read_grid(write(tmp_path, text, EXPERIMENT.replace("batch_size = 1", "batch_size = 2")))
    assert grid.attacks[0].knows(grid.federations[1].experiment) is knows


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of a sweep that was not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    result = call(write(folder), "--out", folder / "out")
    assert result.exit_code == 0, result.output
    return folder / "out"


def test_a_sweep_writes_its_tables(whole: Path) -> None:
    rows = read_rows(whole)
    assert len(rows) == 2 * 2
    assert [row["defense"] for row in rows if row["counts"] == "True"] == ["none", "sent"]  # one attack of each setting counts
    assert all(row["audited"] == "True" and int(row["examples"]) == 2 for row in rows)
    assert r"\bottomrule" in (whole / "sweep.tex").read_text()
    page = (whole / "sweep.html").read_text()
    assert "<svg" in page
    assert "none" in page


def test_tuning_clients_and_reported_clients_are_disjoint(whole: Path) -> None:
    runs = list(whole.glob("*-*-*/"))
    assert runs
    for run in runs:
        names = [{file.stem for file in run.glob(f"{kind}/inverting*/0*.safetensors")} for kind in ("tuning", "reconstructions")]
        assert all(names)
        assert names[0].isdisjoint(names[1])


@pytest.mark.parametrize("stop", range(0, 5, 2))
def test_killed_sweep_continues_to_the_same_table(
    stop: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, left = read_grid(write(tmp_path)), [3 * stop]

    class Killed(BaseException):
        pass

    def stop_after(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in ((engines, "run"), (Replay, "run"), (Scorer, "score"), (federations, "write_json")):
        stop_after(owner, name)
    with pytest.raises(Killed):
        run_sweep(grid, tmp_path / "out")
    monkeypatch.undo()
    assert call(tmp_path / "grid.toml", "--out", tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "sweep.csv").read_text() == (whole / "sweep.csv").read_text()


def test_no_federation_starts_after_the_time_budget(tmp_path: Path) -> None:
    result = call(write(tmp_path), "--out", tmp_path / "out", "--budget", "0.0001s")
    assert result.exit_code == EXIT_UNFINISHED
    assert "2 of 2 federations are not finished" in result.stderr
    assert "not finished" in (tmp_path / "out" / "sweep.html").read_text()


def test_failed_federation_is_named_and_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = engines.run

    def fail(run: FederationRun, **options: Any) -> None:
        if run.experiment.defense:
            raise engines.EngineError("no client answered")
        original(run, **options)

    monkeypatch.setattr(engines, "run", fail)
    result = call(write(tmp_path), "--out", tmp_path / "out")
    assert result.exit_code == EXIT_FAILURES
    assert "sent 1 failed: no client answered" in result.stderr
    assert [row["defense"] for row in read_rows(tmp_path / "out") if row["counts"] == "True"] == ["none"]


@pytest.mark.parametrize("chosen", [0, 1])
def test_knowledge_of_the_defense_is_that_of_the_chosen_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    settings = "settings = [{ knows_defense = false }, { knows_defense = true }]"
    text, _, _ = GRID.partition("exact =")
    grid = read_grid(write(tmp_path, f"{text}inverting_gradients = {{ steps = 2, {settings} }}\n"))
    errors = iter([chosen, 1 - chosen])
    monkeypatch.setattr(federations, "_compute_mean_error", lambda rows: next(errors))
    scores = federations.measure_federation(grid, grid.federations[1], tmp_path / "out").attacks["inverting_gradients"]
    assert scores.spec == str(grid.attacks[0].candidates[chosen])
    assert scores.knows is bool(chosen)
