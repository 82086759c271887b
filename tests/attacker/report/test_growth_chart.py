"""Tests of the chart of leakage against the number of recorded rounds: its values, null and bound."""

from typing import Any

import pytest
from test_linked import put_together, score_as

from attacker.report.gather import gather_run
from attacker.scoring import CaseGrowth
from attacker.scoring.growth import write_growth
from defenses.privacy.accounting import compute_bound
from defenses.privacy.sensitivity import find_noise
from defenses.spec import DefenseSpec

SHARES = {1: 1, 2: 2, 4: 4}
"""Numbers of recovered examples, of four, by number of rounds."""


def count_cases(run: Any, source: str, recovered: dict[int, int]) -> None:
    cases = [
        CaseGrowth(source=source, case=f"c{n}", client="ada", rounds=tuple(range(1, n + 1)), examples=min(4, n), recovered=own)
        for n, own in recovered.items()
    ]
    write_growth(run.path, source, cases)


def make_joint_run(make_run: Any, **settings: Any) -> Any:
    run = make_run(**settings)
    source = put_together(run)
    score_as(run, source, [1, 2], [1, 2])
    count_cases(run, source, SHARES)
    return run


def list_points(points: Any) -> list[tuple[int, float]]:
    return [(point.rounds, point.share) for point in points]


def test_attack_on_several_rounds_is_drawn_by_the_counts_of_its_cases(make_run: Any, report: Any) -> None:
    run = make_joint_run(make_run)
    (line,) = gather_run(run.path).growth
    assert (line.attack, line.joint) == ("agic", True)
    assert list_points(line.points) == [(1, 0.25), (2, 0.5), (4, 1.0)]
    assert line.bound == ()
    page = report(run)
    assert "Leakage against the number of recorded rounds" in page.text
    assert "25 % after 1, 50 % after 2, 100 % after 4 rounds" in page.text


def test_attack_on_single_rounds_counts_examples_cumulatively(attacked: Any) -> None:
    """Each of two rounds has two examples; the attack recovers all of them, and its null none."""
    (line,) = gather_run(attacked.path).growth
    assert (line.attack, line.joint) == ("cpl", False)
    assert list_points(line.points) == [(1, 0.5), (2, 1.0)]
    assert list_points(line.null) == [(1, 0.0), (2, 0.0)]


def test_bound_follows_from_the_noise_and_grows_with_the_rounds(make_run: Any, report: Any) -> None:
    defense = "clip(1.0) | gaussian(2.0)"
    run = make_joint_run(make_run, defense=defense)
    (line,) = gather_run(run.path).growth
    noise = find_noise(DefenseSpec.parse(defense), tensors=1)
    distinct = 1
    expected = [(n, pytest.approx(compute_bound(noise, prior=1 / (distinct + 1), times=n))) for n in SHARES]
    assert list_points(line.bound) == expected
    assert list(line.bound) == sorted(line.bound, key=lambda point: point.share)
    assert "no attack can recover a larger share in expectation than the bound" in report(run).text


def test_without_several_numbers_of_rounds_there_is_no_chart(run: Any, report: Any) -> None:
    source = put_together(run)
    score_as(run, source, [1, 2], [1, 2])
    count_cases(run, source, {2: 2})
    assert gather_run(run.path).growth == ()
    assert "Leakage against the number" not in report(run).text


def test_damaged_counts_are_reported_and_the_rest_is_shown(make_run: Any, report: Any) -> None:
    run = make_joint_run(make_run)
    (run.path / "growth.jsonl").write_text('{"source": 3}\n')
    page = report(run)
    assert "growth.jsonl: a row cannot be read" in page.text
    assert "Attacks on several rounds together" in page.text
