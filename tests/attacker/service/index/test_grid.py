"""Tests of the grid of clients by rounds, of means over examples, and of loss curves."""

from index_rows import make_row, make_score

from attacker.scoring.states import CaseState
from attacker.service.index.attack_folders import CaseEntry, Source
from attacker.service.index.grid import make_grid
from attacker.service.index.json_lines import ShownScore
from attacker.service.index.means import average_success
from attacker.service.index.reconstruction_files import thin_curve


def attack(name: str, *keys: tuple[str, str, tuple[int, ...]]) -> Source:
    cases = {key: CaseEntry(key, client, rounds, 1, "complete", "") for key, client, rounds in keys}
    facts = {"attack": "cpl", "spec": "cpl()", "seed": 0, "null": False, "oracles": (), "knows_defense": True}
    return Source(name=name, cases=cases, **facts)


def score(case: str, example: int, *, success: bool, rounds: tuple[int, ...] = (1,), state: CaseState = "done") -> ShownScore:
    return make_score(case, example, success=success, label_success=success, rounds=rounds, state=state)


def test_grid_cell_has_the_strongest_attack() -> None:
    weak, strong = attack("weak", ("1-a", "a", (1,))), attack("strong", ("1-a", "a", (1,)))
    scores = {"weak": {"1-a": [score("1-a", 0, success=False)]}, "strong": {"1-a": [score("1-a", 0, success=True)]}}
    (cell,) = make_grid({1: [make_row(1, "a")]}, [strong, weak], scores)["cells"]
    assert (cell["attack"], cell["leak"]) == ("strong", 1.0)


def test_case_of_several_rounds_fills_their_grid_cells() -> None:
    whole = attack("agic", ("1-2-a", "a", (1, 2)))
    rows = [score("1-2-a", 0, success=True, rounds=(1,)), score("1-2-a", 1, success=False, rounds=(1, 2))]
    cells = make_grid({1: [make_row(1, "a")], 2: [make_row(2, "a")], 3: [make_row(3, "a")]}, [whole], {"agic": {"1-2-a": rows}})[
        "cells"
    ]
    assert [cell["leak"] for cell in cells] == [0.5, 0.0, None]
    assert [cell["cases"] for cell in cells] == [["1-2-a"], ["1-2-a"], []]
    assert [cell["state"] for cell in cells] == ["waiting", "waiting", "none"]


def test_average_counts_an_example_once() -> None:
    rows = [score("a", 0, success=True), score("b", 0, success=True), score("c", 1, success=False)]
    assert average_success(rows) == 0.5
    assert average_success([]) is None


def test_thinned_curve_keeps_its_ends_and_drops_nan() -> None:
    import numpy as np

    losses = np.arange(10_000, dtype=float)
    points = thin_curve(losses)
    assert (len(points), points[0], points[-1]) == (200, (1, 0.0), (10_000, 9_999.0))
    assert thin_curve(np.array([np.nan, 1.0, np.inf])) == ((2, 1.0),)
    assert thin_curve(np.array([])) == ()
