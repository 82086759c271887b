"""Tests of the states of cases (done, failed, interrupted, waiting) in score rows and summaries."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from federations import federate

from attacker.attacks import AttackSpec
from attacker.reconstruction import Reconstruction
from attacker.replay.replay import Replay
from attacker.scoring import Scorer, ScoreRow, summarise
from fedsim.recording import DamagedFile, Recording
from fedsim.recording.files import write_json


@pytest.fixture
def attacked(tmp_path: Path) -> Path:
    """Folder of an attack that solved five observations of one example each."""
    federate(tmp_path / "run", clients=5)
    recording, out = Recording(tmp_path / "run" / "recording"), tmp_path / "run" / "reconstructions"
    return Replay(recording=recording, spec=AttackSpec(name="exact"), out=out).run().folder


def rows_of(folder: Path) -> list[ScoreRow]:
    run = folder.parents[1]
    return Scorer(run, [run / "truth"]).score(folder)


def mark_interrupted(path: Path) -> None:
    replace(Reconstruction.read(path), interrupted=True).write(path)


def mark_failed(path: Path) -> None:
    write_json(path.with_suffix("").with_suffix(".failed.json"), {"reason": "no way"})


def test_states_of_finished_failed_interrupted_and_waiting_cases(attacked: Path) -> None:
    done, failed, unreadable, interrupted, waiting = sorted(attacked.glob("*.safetensors"))
    failed.unlink()
    mark_failed(failed)
    unreadable.write_bytes(b"no tensors")
    mark_interrupted(interrupted)
    waiting.unlink()
    rows = {row.case: row for row in rows_of(attacked)}
    states = {done: "done", failed: "failed", unreadable: "failed", interrupted: "interrupted", waiting: "waiting"}
    assert {key: row.state for key, row in rows.items()} == {path.stem: state for path, state in states.items()}
    assert rows[failed.stem].success is False
    assert rows[failed.stem].failure == "no way"
    assert rows[interrupted.stem].psnr > 60
    unknown = {key: getattr(rows[waiting.stem], key) for key in ("success", "label_success", "psnr", "mse", "failure", "pair")}
    assert set(unknown.values()) == {None}


def test_share_is_of_finished_cases_only(attacked: Path) -> None:
    first, second, third, *_ = sorted(attacked.glob("*.safetensors"))
    first.unlink()
    mark_failed(first)
    second.unlink()
    mark_interrupted(third)
    (summary,) = summarise(rows_of(attacked))
    assert summary.cases == {"done": 2, "failed": 1, "interrupted": 1, "waiting": 1}
    assert (round(summary.success.value, 6), summary.success.count) == (round(2 / 3, 6), 3)
    assert (summary.examples, summary.failures) == (3, 1)


def test_no_finished_case_gives_no_share(attacked: Path) -> None:
    for path in attacked.glob("*.safetensors"):
        path.unlink()
    (summary,) = summarise(rows_of(attacked))
    assert (summary.success, summary.label_success, summary.psnr, summary.examples) == (None, None, None, 0)
    assert summary.cases == {"waiting": 5}


def test_interrupted_case_that_failed_later_is_failed(attacked: Path) -> None:
    path = min(attacked.glob("*.safetensors"))
    mark_interrupted(path)
    mark_failed(path)
    assert next(row for row in rows_of(attacked) if row.case == path.stem).state == "failed"


def test_effort_of_a_case_counts_once() -> None:
    efforts = [("a", 1, 10), ("b", 1, 20), ("c", 5, 900)]
    rows = [
        ScoreRow(case=case, index=index, iterations=iterations, seconds=2.0, route="optimisation")
        for case, examples, iterations in efforts
        for index in range(examples)
    ]
    (summary,) = summarise(rows)
    assert (summary.iterations, summary.seconds, summary.routes) == (20, 6.0, {"optimisation": 3})


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        *(("", key, value) for key in ("network_code", "attack_code") for value in ([], 5, None, "a\x1b[2J")),
        *(("run", "limits", value) for value in ("abc", 5, [5], ["a\nb"])),
        *(("run", "secure_aggregation", value) for value in ("x", 5, [])),
    ],
)
def test_invalid_facts_in_attack_json_are_refused(attacked: Path, where: str, key: str, value: object) -> None:
    facts = json.loads((attacked / "attack.json").read_text())
    (facts[where] if where else facts)[key] = value
    (attacked / "attack.json").write_text(json.dumps(facts))
    with pytest.raises(DamagedFile, match=rf"attack\.json: .*{key}.*; replay the attack again") as error:
        rows_of(attacked)
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in ("round", "attempt", "client", "status", "key") for value in (-7, None)),
        *(("client", "global"), ("status", "lost"), ("num_examples", -1), ("num_examples", True), ("codec", 5)),
        *(("rounds", []), ("rounds", [[1]]), ("rounds", [[1, 0]]), ("cohorts", []), ("cohorts", [["sum"]])),
        *(("cohort", "a"), ("left_out", [[1, 2]]), ("left_out", [[0, "late"]])),
    ],
)
def test_invalid_entry_of_a_case_is_refused_by_its_own_name(attacked: Path, key: str, value: object) -> None:
    """None: the entry is missing."""
    facts = json.loads((attacked / "attack.json").read_text())
    facts["cases"][0] = {name: v for name, v in {**facts["cases"][0], key: value}.items() if name != key or value is not None}
    (attacked / "attack.json").write_text(json.dumps(facts))
    named = "has a case named" if key == "key" else f": the entry {key} of the case .* in attack.json has the invalid value"
    with pytest.raises(DamagedFile, match=rf"{named} {re.escape(repr(value))}.*; replay the attack again"):
        rows_of(attacked)
