"""Tests of replays that hide from the attack which client sent an update."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import run_attacker
from federations import make_replay

from attacker.attacks import AttackSpec
from attacker.attacks.cases import UNNAMED_CLIENT
from attacker.attacks.multi_round.spans.attack import Spans
from attacker.replay.metadata_reader import read_metadata
from attacker.replay.replay import Replay
from attacker.report.conclusions import describe_summaries
from attacker.scoring import Scorer, read_growth, summarise
from fedsim.config.experiment import validate
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import DamagedFile, Recording

EXPERIMENT = {
    "rounds": 6,
    "model": {"name": "mlp", "hidden": [64]},
    "clients": {"count": 3},
    "training": {"learning_rate": 0.05, "batch_size": 2, "steps": 1},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three clients with six images each, in two epochs of three rounds."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (18, 8, 8), dtype=np.uint8), np.arange(18) % 4
    np.savez(folder / "noise.npz", images=images, labels=labels)
    experiment = {**EXPERIMENT, "data": {"name": "npz", "train": str(folder / "noise.npz")}}
    run = FederationRun(experiment=validate(experiment, source="test"), out=folder / "run", client_seed=1)
    engine.run(run, engine="local")
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def replay(run: Path, *, null: bool = False, **settings) -> Replay:
    spec = AttackSpec(name="spans", arguments={"anonymous": True}, null=null)
    return make_replay(run, spec, **settings)


def test_attack_sees_neither_names_nor_a_fixed_order(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    whole = Spans.__call__

    def record(self, cases, **options):
        seen.extend(cases)
        return whole(self, cases, **options)

    monkeypatch.setattr(Spans, "__call__", record)
    made = replay(run)
    made.run()
    (case,) = seen
    assert [one.round for one in case.observations] == [number for number in range(1, 7) for _ in range(3)]
    assert {(one.client, one.cohort) for one in case.observations} == {(UNNAMED_CLIENT, ())}
    (planned,) = made.plan.cases
    orders = {tuple(row.client for row in planned.rows[i : i + 3]) for i in range(0, 18, 3)}
    assert len(orders) > 1


def test_every_example_of_all_clients_is_scored_once_and_rows_name_the_weaker_attacker(run: Path) -> None:
    assert (replay(run).run().done, replay(run, null=True).run().done) == (1, 1)
    again = replay(run).run()
    assert (again.done, again.skipped) == (0, 1)
    scorer = Scorer(run, [run / "truth"])
    rows = scorer.score(replay(run).folder)
    used = {
        i
        for t in range(1, 7)
        for client in Recording(run / "recording").list_clients()
        for _, _, i in scorer.truth.read_used(t, 1, client).examples
    }
    assert sorted(row.index for row in rows) == sorted(used)
    assert {(row.spec, row.client, row.oracles) for row in rows} == {("spans(anonymous=True)", UNNAMED_CLIENT, ())}
    assert {row.withheld for row in rows} == {("client names",)}
    recovered = sum(row.success is True for row in rows)
    assert recovered > len(rows) / 2
    assert all(row.link_correct is not False for row in rows if row.success)
    null = scorer.score(replay(run, null=True).folder)
    assert sum(row.success is True for row in null) <= 1
    assert len(null) == len(rows)
    assert {row.withheld for row in null} == {("client names",)}
    (summary,) = summarise([*rows, *null])
    assert "without client names, recovered" in describe_summaries([summary], Recording(run / "recording").manifest)


def test_report_says_that_the_names_were_withheld(run: Path) -> None:
    replay(run).run()
    named = make_replay(run, AttackSpec(name="spans"))
    named.run()
    facts = [json.loads(path.read_text())["withheld"] for path in sorted((run / "reconstructions").glob("*/attack.json"))]
    assert sorted(facts) == [[], ["client names"]]
    assert run_attacker("score", run).exit_code == 0
    assert run_attacker("report", run).exit_code == 0
    page = next(run.rglob("*.html")).read_text()
    assert "without client names" in page
    path = replay(run).folder / "attack.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "withheld": "client names"}))
    with pytest.raises(DamagedFile, match=r"the entry withheld of attack\.json must be a list of texts"):
        read_metadata(path)


def test_growing_numbers_of_rounds_are_counted_as_one_line(run: Path) -> None:
    for last in (2, 6):
        replay(run, rounds=frozenset(range(1, last + 1))).run()
    scorer = Scorer(run, [run / "truth"])
    rows = scorer.score(replay(run).folder)
    assert {row.case for row in rows} == {case.key for case in replay(run).plan.cases}
    growth = sorted(read_growth(run), key=lambda one: one.rounds)
    assert [one.rounds for one in growth] == [(1, 2), (1, 2, 3, 4, 5, 6)]
    assert growth[0].recovered < growth[1].recovered


def test_damaged_update_is_left_out_with_the_reason(run: Path) -> None:
    client = Recording(run / "recording").list_clients()[0]
    (run / "recording" / "rounds" / "00002" / f"{client}.safetensors").write_bytes(b"damaged")
    done = replay(run).run()
    ((round, reason),) = next(iter(done.left_out.values()))
    assert round == 2
    assert client in reason
    (entry,) = json.loads((done.folder / "attack.json").read_text())["cases"]
    assert client not in entry["cohorts"][1]
    assert len(entry["cohorts"][1]) == 2


def test_clients_cannot_be_chosen_by_names_that_are_hidden(run: Path) -> None:
    client = Recording(run / "recording").list_clients()[0]
    with pytest.raises(ValueError, match="leave out --client"):
        replay(run, clients=frozenset({client})).run()


def test_option_of_the_command_withholds_the_names(run: Path) -> None:
    refused = run_attacker("replay", run, "--attack", "cpl", "--anonymous")
    assert refused.exit_code == 2
    assert "--anonymous is an option of the attack spans" in refused.output
    made = run_attacker(
        "replay", run, "--attack", "spans", "--anonymous", "--no-null", "--rounds", "1-3", "--workers", "1", "--json"
    )
    assert made.exit_code == 0, made.output
    (result,) = json.loads(made.stdout)
    assert read_metadata(Path(result["folder"]) / "attack.json")["withheld"] == ["client names"]
