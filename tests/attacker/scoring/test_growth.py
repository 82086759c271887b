"""Tests of recovered examples against the number of attacked rounds (growth)."""

import json

import pytest
from test_joint_scores import Joint, joint  # noqa: F401

from attacker.scoring import CaseGrowth, Scorer, read_growth, summarise_growth
from attacker.scoring.growth import write_growth


def make_case(rounds: int, examples: int, recovered: int, *, client: str = "a", source: str = "spans-1") -> CaseGrowth:
    return CaseGrowth(
        source=source,
        case=f"{client}-{rounds}",
        client=client,
        rounds=tuple(range(1, rounds + 1)),
        examples=examples,
        recovered=recovered,
    )


def test_growth_counts_every_case(joint: Joint) -> None:  # noqa: F811
    joint.add_case("fewer", (1, 2))
    scorer = Scorer(joint.run, [joint.run / "truth"])
    rows = scorer.score(joint.folder)
    assert {row.case for row in rows} == {"joint"}
    assert [(case.case, case.rounds, case.examples, case.recovered) for case in read_growth(joint.run)] == [
        ("joint", (1, 2, 4), 4, 4),
        ("fewer", (1, 2), 4, 4),
    ]
    scorer.score(joint.folder)
    assert len(read_growth(joint.run)) == 2  # scoring again replaces the rows


def test_a_case_without_an_answer_recovers_nothing(joint: Joint) -> None:  # noqa: F811
    joint.add_case("fewer", (1, 2))
    (joint.folder / "fewer.safetensors").unlink()
    (joint.folder / "fewer.failed.json").write_text('{"reason": "no time"}')
    Scorer(joint.run, [joint.run / "truth"]).score(joint.folder)
    assert {case.case: case.recovered for case in read_growth(joint.run)} == {"joint": 4, "fewer": 0}


def test_the_share_is_of_all_examples_of_the_largest_cases_of_all_clients() -> None:
    cases = [make_case(1, 2, 0), make_case(4, 8, 4), make_case(1, 2, 1, client="b"), make_case(4, 8, 8, client="b")]
    points = summarise_growth(cases)
    assert [(point.rounds, point.share) for point in points] == [(1, 1 / 16), (4, 12 / 16)]


def test_number_of_rounds_that_one_client_lacks_is_left_out() -> None:
    points = summarise_growth([make_case(1, 2, 0), make_case(4, 8, 4), make_case(4, 8, 8, client="b")])
    assert [point.rounds for point in points] == [4]
    assert summarise_growth([]) == []


def test_rows_of_other_attacks_are_kept_and_damaged_ones_refused(tmp_path) -> None:
    write_growth(tmp_path, "spans-1", [make_case(1, 2, 1)])
    write_growth(tmp_path, "agic-1", [make_case(2, 2, 1, source="agic-1")])
    write_growth(tmp_path, "spans-1", [make_case(3, 2, 2)])
    assert [(case.source, len(case.rounds)) for case in read_growth(tmp_path)] == [("agic-1", 2), ("spans-1", 3)]
    (tmp_path / "growth.jsonl").write_text('{"source": "spans-1"}\n')
    with pytest.raises(ValueError, match=r"growth\.jsonl: a row cannot be read"):
        read_growth(tmp_path)


def test_without_cases_of_several_rounds_nothing_is_written(tmp_path) -> None:
    write_growth(tmp_path, "cpl-1", [])
    assert not (tmp_path / "growth.jsonl").exists()


def test_damaged_rows_of_other_attacks_do_not_prevent_scoring(joint: Joint) -> None:  # noqa: F811
    path = joint.run / "growth.jsonl"
    damaged = b'{"source": "agic-1"}\n{"source": "spans-1", "rou\n'
    path.write_bytes(damaged)
    write_growth(joint.run, "cpl-1", [])
    assert path.read_bytes() == damaged
    assert Scorer(joint.run, [joint.run / "truth"]).score(joint.folder)
    assert path.read_bytes().startswith(damaged)
    assert json.loads(path.read_bytes().removeprefix(damaged))["case"] == "joint"
    write_growth(joint.run, "agic-1", [make_case(2, 2, 1, source="agic-1")])
    assert b'{"source": "agic-1"}' not in path.read_bytes()
    with pytest.raises(ValueError, match=r"growth\.jsonl: row 1 cannot be read"):
        read_growth(joint.run)
