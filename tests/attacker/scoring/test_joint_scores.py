"""Tests of score rows of attacks on several rounds of a client, with constructed originals and links."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reconstructions import make_reconstruction

from attacker.reconstruction import Reconstruction, Slot
from attacker.scoring import Scorer, ScoreRow, read_rows, summarise
from attacker.scoring.superseded_cases import find_superseded
from attacker.scoring.truth.originals import CaseObservation, Original, list_originals, list_uses, make_link_fields
from fedsim import data as datasets
from fedsim.recording.files import write_json
from fedsim.truth import RoundUsage, TruthWriter, describe_dataset

USED = {1: [[3, 5]], 2: [[7, 9]], 4: [[5, 7]]}
"""Indices by round, batch by batch: 5 is used in rounds 1 and 4, 7 in rounds 2 and 4."""
CLAIMS = {3: (1,), 5: (1, 4), 7: (2, 1), 9: (2,)}
"""Rounds that the attack claims for each example: those of 7 are wrong, and a fifth example has its place in round 4."""


class Joint:
    """A run whose only attack used three rounds of one client together, and recovered every image exactly."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / "reconstructions" / "agic-00000000"
        self.data = datasets.load("digits")
        self.folder.mkdir(parents=True)
        describe_dataset(run / "truth", lambda: datasets.describe(self.data, "digits", {}))
        writer = TruthWriter(run / "truth", "ada")
        for round, steps in USED.items():
            writer.write(round, 1, steps)
        self.case: dict[str, Any] = {
            "key": "joint", "round": 1, "attempt": 1, "client": "ada", "status": "complete", "num_examples": 6, "codec": "dense",
            "rounds": [[1, 1], [2, 1], [4, 1]], "left_out": [[3, "its update holds NaN"]], "cohorts": [["ada"]] * 3,
        }  # fmt: skip
        facts = {"attack": "agic", "spec": "agic()", "null": False, "knows_defense": True, "oracles": [], "seed": 0}
        known = dict.fromkeys(("model", "defense", "gradient", "network", "inputs"), "") | {"secure_aggregation": False}
        write_json(self.folder / "attack.json", {**facts, "run": {"name": "run", **known}, "cases": [self.case]})
        self.write()

    @property
    def found(self) -> Reconstruction:
        x, y = self.data.train[[*CLAIMS, 11]]
        claims = [*CLAIMS.values(), (4,)]
        slots = tuple(Slot(round, "ada", 1, 0, example) for example, rounds in enumerate(claims) for round in rounds)
        return make_reconstruction("joint", x, y, slots=slots, notes=("pass 1",))

    def write(self, **changes: Any) -> None:
        replace(self.found, **changes).write(self.folder / "joint.safetensors")

    def add_case(self, key: str, rounds: tuple[int, ...]) -> None:
        """Add a case of the same client with other rounds and the same reconstruction."""
        facts = json.loads((self.folder / "attack.json").read_text())
        case = {**self.case, "key": key, "rounds": [[round, 1] for round in rounds], "cohorts": [["ada"]] * len(rounds)}
        write_json(self.folder / "attack.json", {**facts, "cases": [*facts["cases"], case]})
        replace(self.found, case=key).write(self.folder / f"{key}.safetensors")

    def rows(self) -> dict[int, ScoreRow]:
        rows = Scorer(self.run, [self.run / "truth"]).score(self.folder)
        assert len({row.index for row in rows}) == len(rows)
        return {row.index: row for row in rows}


@pytest.fixture
def joint(tmp_path: Path) -> Joint:
    return Joint(tmp_path)


def test_example_of_several_rounds_has_one_row(joint: Joint) -> None:
    rows = joint.rows()
    assert {index: row.rounds for index, row in rows.items()} == {3: (1,), 5: (1, 4), 7: (2, 4), 9: (2,)}
    assert {index: (row.batch, row.position) for index, row in rows.items()} == {3: (1, 0), 5: (1, 1), 7: (1, 0), 9: (1, 1)}
    assert all(row.success and row.mse == 0 for row in rows.values())


def test_link_is_right_if_the_example_was_in_all_claimed_rounds(joint: Joint) -> None:
    rows = joint.rows()
    assert {index: row.rounds_claimed for index, row in rows.items()} == {3: (1,), 5: (1, 4), 7: (1, 2), 9: (2,)}
    assert {index: row.link_correct for index, row in rows.items()} == {3: None, 5: True, 7: False, 9: None}
    (summary,) = summarise(rows.values())
    assert (summary.linked_right.value, summary.linked_right.count) == (0.5, 2)


def test_each_example_has_its_own_image_pair(joint: Joint) -> None:
    files = [row.pair for row in joint.rows().values()]
    assert len(set(files)) == 4
    assert all((joint.run / file).is_file() for file in files)


def test_examples_without_a_reconstruction_have_no_links(joint: Joint) -> None:
    (joint.folder / "joint.safetensors").unlink()
    write_json(joint.folder / "joint.failed.json", {"reason": "no time"})
    rows = joint.rows()
    assert {row.failure for row in rows.values()} == {"no time"}
    assert {(str(row.rounds_claimed), row.link_correct) for row in rows.values()} == {("None", None)}
    (summary,) = summarise(rows.values())
    assert summary.linked_right is None


def test_case_of_one_round_has_no_links(joint: Joint) -> None:
    facts = json.loads((joint.folder / "attack.json").read_text())
    case = {key: value for key, value in joint.case.items() if key not in ("rounds", "cohorts", "left_out")}
    write_json(joint.folder / "attack.json", {**facts, "cases": [case]})
    joint.write(slots=(Slot(1, "ada", 1, 0, 0), Slot(1, "ada", 1, 1, 1)))
    rows = joint.rows()
    assert {index: (row.rounds, row.rounds_claimed, row.link_correct) for index, row in rows.items()} == {
        3: ((1,), (1,), None),
        5: ((1,), (1,), None),
    }


def score_and_list(joint: Joint, only: set[str] | None = None) -> set[tuple[str, int]]:
    """Score cases, and return (case, index) of all rows in the file of scores."""
    Scorer(joint.run, [joint.run / "truth"]).score(joint.folder, only)
    return {(row.case, row.index) for row in read_rows(joint.run / "scores.jsonl")}


ALL_JOINT = {("joint", 3), ("joint", 5), ("joint", 7), ("joint", 9)}


def test_case_of_more_rounds_supersedes_that_of_fewer(joint: Joint) -> None:
    joint.add_case("fewer", (1, 2))
    assert score_and_list(joint) == ALL_JOINT
    scorer = Scorer(joint.run, [joint.run / "truth"])
    scorer.score(joint.folder)
    assert scorer.superseded[joint.folder.name] == {"fewer": "not scored: the examples of its rounds are scored in case joint"}


def test_finished_case_is_preferred_to_a_larger_unfinished_one(joint: Joint) -> None:
    joint.add_case("fewer", (1,))
    joint.write(interrupted=True)
    assert score_and_list(joint) == {("fewer", 3), ("fewer", 5), ("joint", 7), ("joint", 9)}
    (joint.folder / "joint.safetensors").unlink()
    assert score_and_list(joint) == {("fewer", 3), ("fewer", 5), ("joint", 7), ("joint", 9)}


def test_examples_of_overlapping_cases_count_once(joint: Joint) -> None:
    writer = TruthWriter(joint.run / "truth", "ada")
    writer.write(5, 1, [[13, 3]])
    joint.add_case("later", (4, 5))
    assert score_and_list(joint) == {*ALL_JOINT, ("later", 13), ("later", 3)}
    found = find_superseded(joint.folder, json.loads((joint.folder / "attack.json").read_text())["cases"])
    assert found["later"].words == "scored only on examples of round 5: those of its other rounds are scored in case joint"


def test_scores_of_a_superseded_case_are_removed(joint: Joint) -> None:
    facts = json.loads((joint.folder / "attack.json").read_text())
    write_json(joint.folder / "attack.json", {**facts, "cases": []})
    joint.add_case("fewer", (1, 2))
    assert {case for case, _ in score_and_list(joint, {"fewer"})} == {"fewer"}
    joint.add_case("joint", (1, 2, 4))
    assert score_and_list(joint, {"joint"}) == ALL_JOINT


def test_originals_are_listed_by_first_use() -> None:
    used = [(2, RoundUsage(((4, 6), (4,)))), (5, RoundUsage(((6,), (8, 4))))]
    assert list_originals(used) == [Original((2, 5), 1, 0, 4), Original((2, 5), 1, 1, 6), Original((5,), 2, 0, 8)]


def test_observations_of_a_case_are_listed_with_attempts_and_cohorts() -> None:
    case = {"round": 1, "attempt": 2, "client": "ada"}
    assert list_uses(case) == [CaseObservation(1, 2, ("ada",))]
    assert list_uses({**case, "client": "sum", "cohort": ["ada", "bob"]}) == [CaseObservation(1, 2, ("ada", "bob"))]
    several = {**case, "client": "sum", "rounds": [[1, 2], [3, 1]], "cohorts": [["ada"], ["ada", "bob"]]}
    assert list_uses(several) == [CaseObservation(1, 2, ("ada",)), CaseObservation(3, 1, ("ada", "bob"))]


def test_claim_of_one_round_is_no_link() -> None:
    original = Original((2, 5), 1, 0, 4)
    assert make_link_fields(original, {1}) == {"rounds_claimed": (1,), "link_correct": None}
    assert make_link_fields(original, {2, 5})["link_correct"] is True
    assert make_link_fields(original, {2, 3, 5})["link_correct"] is False
