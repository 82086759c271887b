"""Tests of the headline of a run in the service: its examples, coverage and failures, and the null's results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from index_rows import make_row, make_score

from attacker.service.index.attack_folders import CaseEntry, Source, find_null, read_source
from attacker.service.index.grid import make_grid
from attacker.service.index.headline import NUM_HEADLINE_EXAMPLES, find_worst_examples, make_headline
from attacker.service.index.json_lines import ShownScore
from attacker.service.index.verdicts import RunVerdicts, VerdictSummary

ROWS = {1: [make_row(1, "a"), make_row(1, "b", status="late")]}


def attack(name: str = "cpl-1", *, null: bool = False, seed: int = 0, failures: tuple[str, ...] = ()) -> Source:
    case = CaseEntry("1-a", "a", (1,), 9, "complete", "")
    return Source(
        name=name,
        attack="cpl",
        spec="cpl()" + " without gradient" * null,
        seed=seed,
        null=null,
        oracles=(),
        knows_defense=True,
        cases={"1-a": case},
        failures=dict.fromkeys(failures, "out of memory"),
    )


def score(position: int, *, example: int | None = None, success: bool = False, psnr: float | None = None) -> ShownScore:
    return make_score("1-a", position if example is None else example, position=position, success=success, psnr=psnr)


def test_recovered_examples_come_first_then_the_nearest() -> None:
    rows = [
        score(0, psnr=30.0),
        score(1, success=True, psnr=20.0),
        score(2, example=1, success=True, psnr=25.0),
        score(3),
        score(4, psnr=35.0),
    ]
    assert find_worst_examples(attack(), {"1-a": rows}) == [("1-a", 2), ("1-a", 4), ("1-a", 0), ("1-a", 3)]
    many = [score(n, psnr=float(n)) for n in range(20)]
    assert find_worst_examples(attack(), {"1-a": many}) == [("1-a", n) for n in range(19, 19 - NUM_HEADLINE_EXAMPLES, -1)]


def test_unfinished_rows_are_not_shown() -> None:
    rows = [score(0, success=True)._replace(state="interrupted"), score(1)]
    assert find_worst_examples(attack(), {"1-a": rows}) == [("1-a", 1)]


def test_null_of_an_attack_has_its_arguments_and_seed() -> None:
    mine, null, other = attack(), attack("null", null=True), attack("other", null=True, seed=1)
    assert find_null(mine, [other, mine, null]) is null
    for changes in ({"knows_defense": False}, {"network_code": "ab12"}, {"attack_code": "ab12"}):
        assert find_null(mine, [other, mine, replace(null, **changes)]) is None
    assert find_null(null, [mine, null]) is None


@pytest.mark.parametrize("entry", ["network_code", "attack_code"])
def test_null_of_an_attack_ran_the_same_code(tmp_path: Path, entry: str) -> None:
    """A changed network or attack of the user's gets a second pair of folders, which differ in nothing but these digests."""

    def read(name: str, *, null: bool, code: str) -> Source:
        facts = {"attack": "cpl", "spec": "cpl()" + " without gradient" * null, "null": null, "seed": 0, "knows_defense": True}
        content = {**facts, "oracles": [], "cases": [], "arguments": {}, "run": {}, entry: code}
        folder = tmp_path / "reconstructions" / name
        folder.mkdir(parents=True)
        (folder / "attack.json").write_text(json.dumps(content))
        return read_source(tmp_path, name, None)

    old, new = read("cpl-null-1", null=True, code="app:Net@1"), read("cpl-null-2", null=True, code="app:Net@2")
    first, second = read("cpl-1", null=False, code="app:Net@1"), read("cpl-2", null=False, code="app:Net@2")
    sources = [old, new, first, second]
    assert find_null(first, sources) is old
    assert find_null(second, sources) is new
    assert find_null(second, [first, second, old]) is None


def test_coverage_counts_finished_cases_of_attacks_and_replies_without_an_update() -> None:
    failed = attack("failed", failures=("1-a",))
    headline = make_headline(ROWS, [attack(), failed, attack("null", null=True)], {}, RunVerdicts(), truth=True, worst=[])
    assert (headline["attacks"], headline["cases"], headline["finished"], headline["failed"]) == (2, 2, 1, 1)
    assert (headline["attacked"], headline["updates"], headline["absent"]) == (1, 1, 1)


def test_sentence_states_why_there_is_no_verdict() -> None:
    def make_sentence(*sources: Source, truth: bool = True) -> str:
        return make_headline(ROWS, sources, {}, RunVerdicts(), truth=truth, worst=[])["sentence"]

    assert make_sentence() == "1 update was recorded, and none attacked yet: what leaks is not known."
    assert make_sentence(attack()) == "Attacks run, and nothing is finished yet: what leaks is not known."
    failed = attack(failures=("1-a",))
    one = "The only attacked case failed: it has no reconstruction. Reason: out of memory. What leaks is not known."
    assert make_sentence(failed) == one
    two = "All 2 attacked cases failed: none has a reconstruction. Most often because: out of memory. What leaks is not known."
    assert make_sentence(failed, failed) == two


def test_headline_has_the_means_of_the_strongest_attack_and_its_null() -> None:
    verdicts = RunVerdicts({"cpl-1": VerdictSummary("recovered", "recovered: all")}, "CPL recovered all.", "cpl-1")
    scores = {"cpl-1": {"1-a": [score(0, psnr=30.0)]}, "null": {"1-a": [score(0, psnr=10.0)]}}
    headline = make_headline(ROWS, [attack(), attack("null", null=True)], scores, verdicts, truth=True, worst=[])
    assert (headline["outcome"], headline["attack"], headline["examples"]) == ("recovered", "cpl-1", 1)
    assert (headline["psnr"], headline["null_psnr"]) == (30.0, 10.0)


def test_grid_cells_include_the_null() -> None:
    scores = {"cpl-1": {"1-a": [score(0, success=True, psnr=30.0)]}, "null": {"1-a": [score(0, psnr=10.0)]}}
    mine, null = attack(), attack("null", null=True)
    cell, _ = make_grid(ROWS, [mine], scores, [mine, null])["cells"]
    assert (cell["success"], cell["null_success"], cell["psnr"], cell["null_psnr"]) == (1.0, 0.0, 30.0, 10.0)
    cell, _ = make_grid(ROWS, [mine], scores, [mine])["cells"]
    assert cell["null_success"] is cell["null_psnr"] is None
