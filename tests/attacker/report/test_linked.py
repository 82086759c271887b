"""Tests of how the report shows attacks on several rounds of a client, which link examples across rounds."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from attacker.reconstruction import Reconstruction, Slot
from attacker.report.linked_cases import LinkedCase, read_linked_cases
from fedsim.recording.files import write_json

NOTES = ("pass 1: round 1, 1 example", "round 3: its update holds <NaN>; its examples are not linked")


def put_together(run: Any, claims: Sequence[tuple[int, int]] = ((1, 0), (2, 0), (2, 1))) -> str:
    """Replace an attack's four cases by one case of both rounds of ada, with slots for `claims`, (round, example)."""
    run.attack("agic")
    (path,) = run.path.glob("reconstructions/agic-0*/attack.json")
    facts = json.loads(path.read_text())
    first = facts["cases"][0]
    joint = {**first, "key": "joint", "rounds": [[1, 1], [2, 1]], "left_out": [[3, "its update holds <NaN>"]]}
    write_json(path, {**facts, "cases": [joint]})
    for file in path.parent.glob("*.safetensors"):
        answer = Reconstruction.read(file)
        file.unlink()
    slots = tuple(Slot(round, "ada", 1, 0, example) for round, example in claims)
    twice = {"x": answer.x.repeat(2, 1, 1, 1), "y": answer.y.repeat(2), "confidence": torch.ones(2), "explained": None}
    replace(answer, **twice, case="joint", slots=slots, notes=NOTES).write(path.parent / "joint.safetensors")
    return str(path.parent.name)


def score_as(run: Any, source: str, rounds: Sequence[int], claimed: Sequence[int] | None) -> None:
    def change(row: dict[str, Any]) -> dict[str, Any] | None:
        if row["source"] != source:
            return row
        if row["index"] != 0:
            return None
        right = set(claimed or ()) <= set(rounds) if len(claimed or ()) > 1 else None
        return {**row, "case": "joint", "rounds": rounds, "rounds_claimed": claimed, "link_correct": right, "notes": NOTES}

    run.rewrite(change)


def test_table_of_linked_rounds_has_notes_and_omitted_rounds(run: Any, report: Any) -> None:
    score_as(run, put_together(run), [1, 2], [1, 2])
    page = report(run)
    assert "Attacks on several rounds together" in page.text
    assert "AGIC agic()" in page.text
    for words in (*NOTES, "round 3 is left out: its update holds <NaN>"):
        assert page.text.count(words) == 1
    assert "ada 21 to 2 2 1 pass 1" in page.text
    assert "Of the examples that the attack assigns to several rounds, 1 of 1 were used in all of these rounds" in page.text


@pytest.mark.parametrize(
    ("rounds", "claimed", "words"),
    [
        ([1, 2], [1, 2], "round 1, 2, ada linked: round 1, 2 ✓"),
        ([2], [1, 2], "round 2, ada linked: round 2, wrongly 1 ✗"),
        ([4], [1, 2], "round 4, ada linked: round none, wrongly 1, 2 ✗"),
        ([1, 2], [2], "round 1, 2, ada not linked, taken from round 2"),
    ],
    ids=["right", "one wrong", "all wrong", "missed"],
)
def test_caption_has_the_true_and_the_claimed_rounds(
    run: Any, report: Any, rounds: list[int], claimed: list[int], words: str
) -> None:
    score_as(run, put_together(run), rounds, claimed)
    page = report(run)
    assert words in page.text
    assert page.classed("wrong") == (len(set(claimed) - set(rounds)) > 0 and len(claimed) > 1)


def test_rounds_of_a_case_are_those_of_its_reconstruction(run: Any, report: Any) -> None:
    source = put_together(run, claims=((1, 0), (2, 0), (4, 1)))
    folder = run.path / "reconstructions" / source
    facts = json.loads((folder / "attack.json").read_text())
    rounds = [[number, 1] for number in (1, 2, 3, 4)]
    write_json(folder / "attack.json", {**facts, "cases": [{**facts["cases"][0], "rounds": rounds, "left_out": []}]})
    assert "ada 31 to 2, 4 2 1 pass 1" in report(run).text


def test_superseded_case_is_named_and_not_counted(run: Any, report: Any) -> None:
    source = put_together(run)
    score_as(run, source, [1, 2], [1, 2])
    folder = run.path / "reconstructions" / source
    facts = json.loads((folder / "attack.json").read_text())
    fewer = {**facts["cases"][0], "key": "fewer", "rounds": [[1, 1]], "left_out": []}
    write_json(folder / "attack.json", {**facts, "cases": [facts["cases"][0], fewer]})
    answer = Reconstruction.read(folder / "joint.safetensors")
    replace(answer, case="fewer", slots=(Slot(1, "ada", 1, 0, 0),)).write(folder / "fewer.safetensors")
    page = report(run)
    assert page.text.count("not scored: the examples of its rounds are scored in case joint") == 1
    assert "are not scored yet" not in page.text
    assert "Reconstructions without an original" not in page.text
    assert "1of several rounds each" in page.text


def test_attack_on_single_rounds_has_no_table_of_linked_rounds(attacked: Any, report: Any) -> None:
    page = report(attacked)
    assert "Attacks on several rounds together" not in page.text
    assert "linked" not in page.text


def test_without_true_examples_captions_have_the_claimed_rounds(run: Any, report: Any) -> None:
    put_together(run)
    run.forget_truth()
    page = report(run)
    assert "seen in rounds 1, 2, ada" in page.text
    assert "round 2, ada, example 2" in page.text
    assert page.text.count(NOTES[0]) == 1
    assert "Of the examples that the attack assigns" not in page.text


def test_case_without_a_reconstruction_is_in_the_table(run: Any, report: Any) -> None:
    source = put_together(run)
    (run.path / "reconstructions" / source / "joint.safetensors").unlink()
    facts = json.loads((run.path / "reconstructions" / source / "attack.json").read_text())
    (one,) = read_linked_cases(run.path / "reconstructions" / source, facts)
    assert one == LinkedCase(case="joint", client="ada", rounds=(1, 2), left_out=((3, "its update holds <NaN>"),))
    run.forget_truth()
    assert "round 3 is left out" in report(run).text
