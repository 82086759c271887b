"""Tests that a wrong report, a damaged row or missing true examples of one client do not affect the others."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from changed_recordings import change_index, change_manifest
from command_line import join_lines, run_attacker
from federations import federate, make_replay
from observations import make_image_case

from attacker.attacks import AttackSpec, Case, Need, cpl, find_unmet
from attacker.attacks.needs import MAX_EXAMPLES
from attacker.replay.chosen_rows import explain_misfit
from attacker.replay.replay import Replay
from attacker.scoring import Scorer, read_rows, summarise
from attacker.scoring.truth.run_truth import NoTruth
from fedsim.commands.console import EXIT_FAILURES
from fedsim.recording import DamagedFile, Recording


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", rounds=2, clients=3, batch_size=2)


@pytest.fixture
def bad(run: Path) -> str:
    """Name of the client whose data the tests damage."""
    return Recording(run / "recording").list_clients()[1]


def replay(run: Path, *, null: bool = False, **settings) -> Replay:
    spec = AttackSpec(name="cpl", arguments={"steps": 2}, null=null)
    return make_replay(run, spec, **settings)


def alter(run: Path, column: str, value: object, where: str = "1") -> None:
    change_index(run / "recording", f"UPDATE observations SET {column} = ? WHERE {where}", value)


def describe(run: Path, part: str, **changes: object) -> None:
    manifest = json.loads((run / "recording" / "manifest.json").read_text())
    change_manifest(run / "recording", **{part: manifest[part] | changes})


@pytest.mark.parametrize("reported", [MAX_EXAMPLES + 1, 2**52])
def test_client_that_reports_too_many_examples_fails_alone(run: Path, bad: str, reported: int) -> None:
    describe(run, "training", steps=None, epochs=1)  # an epoch of one batch: the same step
    cases, megabytes = replay(run).measure_extent()
    assert cases == 6
    alter(run, "num_examples", reported, f"client = '{bad}'")
    assert replay(run).measure_extent() == (4, pytest.approx(megabytes * 4 / 6))
    done = replay(run).run()
    assert (done.done, sorted(done.failed)) == (4, [f"0000{round}-{bad}" for round in (1, 2)])
    refusals = ("the client reported more than 100,000", f"{reported:,} examples of 64 values")
    assert all(any(words in reason for words in refusals) for reason in done.failed.values()), done.failed
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    assert len(rows) == 12
    assert {row.client for row in rows if row.failure} == {bad}


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("data", {"shape": [1, 9000, 9000]}, "'1.weight' has shape (8, 64), but (8, 81000000) in the model"),
        ("data", {"num_classes": 10**7}, "'3.bias' has shape (10,), but (10000000,) in the model"),
        ("model", {"arguments": {"hidden": [8, 8]}}, "'3.bias' has shape (10,), but (8,) in the model"),
    ],
)
def test_manifest_of_another_model_is_refused(run: Path, part: str, changes: dict[str, object], words: str) -> None:
    describe(run, part, **changes)
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        replay(run).run()
    assert str(error.value).startswith(str(run / "recording" / "manifest.json"))
    assert str(error.value).endswith("restore the manifest and the model's code as of the time of the recording")


def test_unknown_and_missing_weights_are_named() -> None:
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    assert explain_misfit(weights, {"a": (2,), "b": (3,), "alias": (2,)}, {"a", "b"}) == ""
    assert explain_misfit(weights, {"a": (2,)}, {"a"}) == "'b' is not a parameter of the model"
    lacking = {"a": (2,), "b": (3,), "c": (1,)}
    assert explain_misfit(weights, lacking, lacking.keys()) == "'c' is missing, a parameter of the model"


def test_command_line_announces_megabytes_and_states_failures(run: Path, bad: str) -> None:
    describe(run, "training", steps=None, epochs=1)
    alter(run, "num_examples", 2**52, f"client = '{bad}'")
    result = run_attacker("replay", run, "--attack", "cpl", "--set", "steps=2", "--no-null", "--device", "cpu", "--json")
    assert result.exit_code == EXIT_FAILURES, result.stderr
    assert "4 observations to attack" in result.stderr
    assert float(re.findall(r"writes up\s+to\s+([\d.]+)\s+MB", result.stderr)[0]) < 0.1
    (part,) = json.loads(result.stdout)
    assert (part["done"], len(part["failed"])) == (4, 2)


def test_largest_number_of_examples_is_accepted_and_one_more_refused() -> None:
    case, _, _ = make_image_case(0)
    most, more = (Case((replace(case.observations[0], num_examples=MAX_EXAMPLES + extra),)) for extra in (0, 1))
    assert find_unmet(cpl(), most) == []
    assert find_unmet(cpl(), more) == [Need.FEW_EXAMPLES.value]
    unknown = Case((replace(case.observations[0], num_examples=None),))
    assert find_unmet(cpl(), unknown) == [Need.NUM_EXAMPLES.value]
    assert find_unmet(replace(cpl(), needs=frozenset({Need.ONE_OBSERVATION})), more) == []


@pytest.mark.parametrize(("column", "value"), [("attempt", 0), ("metrics", "[]"), ("file", "../elsewhere")])
def test_altered_row_fails_alone(run: Path, bad: str, column: str, value: object) -> None:
    alter(run, column, value, f"round = 2 AND client = '{bad}'")
    assert replay(run).measure_extent()[0] == 5
    done = replay(run).run()
    assert done.done == 5
    assert list(done.failed) == [f"row 2, {bad!r}"]
    (reason,) = done.failed.values()
    assert str(run / "recording" / "index.sqlite") in reason
    assert column in reason
    listed = [case["key"] for case in json.loads((done.folder / "attack.json").read_text())["cases"]]
    assert len(listed) == 5
    assert f"00002-{bad}" not in listed
    assert sorted(path.stem for path in done.folder.glob("*.safetensors")) == listed
    assert len(Scorer(run, [run / "truth"]).score(done.folder)) == 10
    again = replay(run).run()
    assert (again.done, again.skipped, list(again.failed)) == (0, 5, list(done.failed))
    elsewhere = replay(run, rounds=frozenset({1})).run()
    assert (elsewhere.skipped, elsewhere.failed) == (3, {})


def test_a_round_is_absent_only_where_the_index_has_no_row_of_it(run: Path, bad: str) -> None:
    both = frozenset({1, 2})
    change_index(run / "recording", "DELETE FROM observations WHERE round = 2 AND client = ?", bad)
    assert replay(run, rounds=both).run().notes == []
    alone = replay(run, rounds=both, clients=frozenset({bad})).run()
    assert alone.notes == ["the recording holds nothing of the chosen clients in round 2"]
    alter(run, "attempt", 0, "round = 2")
    unread = replay(run, rounds=both).run()
    assert (unread.notes, len(unread.failed)) == ([], 2)


def test_index_with_altered_rows_only_is_refused(run: Path) -> None:
    alter(run, "attempt", 0)
    with pytest.raises(DamagedFile, match=r"index\.sqlite: row 1, .*: 0 is not a valid value of attempt"):
        replay(run).run()
    assert not (run / "reconstructions").exists()


def test_altered_rows_with_equal_short_names_are_all_counted(run: Path, bad: str) -> None:
    for round in (1, 2):
        alter(run, "client", f"{'x' * 100}{round}", f"round = {round} AND client = '{bad}'")
    alter(run, "round", 1, f"client = '{'x' * 100}2'")
    done = replay(run).run()
    assert done.done == 4
    assert len(done.failed) == 2
    assert all(key.startswith("row 1, 'xxx") for key in done.failed)


def test_client_without_true_examples_is_left_out_of_the_scores(run: Path, bad: str) -> None:
    done, null = replay(run).run(), replay(run, null=True).run()
    whole = Scorer(run, [run / "truth"])
    before = [row for folder in (done.folder, null.folder) for row in whole.score(folder) if row.client != bad]
    assert whole.without_truth == {done.folder.name: [], null.folder.name: []}
    (run / "truth" / f"{bad}.jsonl").unlink()
    scorer = Scorer(run, [run / "truth"])
    rows = [row for folder in (done.folder, null.folder) for row in scorer.score(folder)]
    assert rows == before == read_rows(run / "scores.jsonl")
    keys = [f"0000{round}-{bad}" for round in (1, 2)]
    assert scorer.without_truth == {done.folder.name: keys, null.folder.name: keys}
    (summary,) = summarise(rows)
    assert summary.examples == summary.null.examples == 8


def test_command_line_counts_cases_without_true_examples(run: Path, bad: str) -> None:
    for null in (False, True):
        replay(run, null=null).run()
    assert "truth" not in run_attacker("score", run).stderr
    (run / "truth" / f"{bad}.jsonl").unlink()
    result = run_attacker("score", run, "--json")
    assert result.exit_code == 0, result.stderr
    words = join_lines(result.stderr)
    assert f"2 cases have no truth and are not scored, the first: 00001-{bad};" in words
    assert "--truth" in words
    (summary,) = json.loads(result.stdout)
    assert (summary["examples"], summary["untold"]) == (8, [f"0000{round}-{bad}" for round in (1, 2)])
    assert "2 cases have no truth" in " ".join(run_attacker("score", run).stderr.split())


def test_attack_without_true_examples_does_not_prevent_scoring_others(run: Path, bad: str) -> None:
    replay(run).run()
    spec = AttackSpec(name="cpl", arguments={"steps": 3})  # on this client alone
    alone = Replay(recording=replay(run).recording, spec=spec, out=run / "reconstructions", clients=frozenset({bad})).run()
    (run / "truth" / f"{bad}.jsonl").unlink()
    result = run_attacker("score", run, "--json")
    assert result.exit_code == 0, result.stderr
    (summary,) = json.loads(result.stdout)
    assert (summary["spec"], summary["examples"]) == ("cpl(steps=2)", 8)
    assert "2 cases have no truth" in join_lines(result.stderr)
    result = run_attacker("score", alone.folder)
    assert result.exit_code == 2
    assert f"no truth of client {bad} in round 1" in join_lines(result.stderr)


def test_scoring_without_any_true_examples_fails_and_keeps_earlier_scores(run: Path) -> None:
    done = replay(run).run()
    rows = Scorer(run, [run / "truth"]).score(done.folder)
    for path in (run / "truth").glob("*.jsonl"):
        path.unlink()
    with pytest.raises(NoTruth, match="no truth of client"):
        Scorer(run, [run / "truth"]).score(done.folder)
    result = run_attacker("score", run)
    assert result.exit_code == 2
    assert "no truth of client" in join_lines(result.stderr)
    assert read_rows(run / "scores.jsonl") == rows


@pytest.mark.parametrize(("name", "more"), [("mlp", ""), ("theirs:network", " --model theirs:network"), ("a:b; echo $HOME", "")])
def test_advice_of_score_is_a_complete_command(run: Path, name: str, more: str) -> None:
    describe(run, "model", name=name)
    for asked in (run, run / "reconstructions"):
        result = run_attacker("score", asked)
        assert result.exit_code == 2
        assert join_lines(result.stderr).endswith(f"make some with: attacker replay {run} --attack cpl{more}")
        (run / "reconstructions").mkdir(exist_ok=True)


def test_truth_of_another_data_set_is_refused_by_its_file(run: Path) -> None:
    replay(run).run()
    path = next((run / "truth").glob("*.jsonl"))
    rows = [json.loads(line) | {"indices": [99_999]} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run_attacker("score", run)
    assert result.exit_code in (1, 2)
    assert f"{path.name}: names example 99999" in join_lines(result.stderr)
