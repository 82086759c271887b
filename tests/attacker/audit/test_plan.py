"""Tests of the plan of an audit: which clients joint attacks use, and the budget that a left-out attack needs."""

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from federations import federate

from attacker.attacks import AttackSpec
from attacker.audit.findings import NotChecked
from attacker.audit.plan import ORDERED_STEPS, PlannedAttack, _share_budget, plan_attacks
from fedsim.recording import DamagedFile, Observation, Recording, Row

ROUNDS = 4


class Sampled(Recording):
    """A recording in which clients have only their first rounds.

    kept: number of rounds by client; all if it is not listed. damaged: round and client of updates that cannot be read.
    """

    kept: Mapping[str, int] = MappingProxyType({})
    damaged: frozenset[tuple[int, str]] = frozenset()

    def read_rows(self, **options: Any) -> list[Row]:
        return [row for row in super().read_rows(**options) if row.round <= self.kept.get(row.client, ROUNDS)]

    def read_observation(self, row: Row) -> Observation:
        if (row.round, row.client) in self.damaged:
            raise DamagedFile(Path("update"), "is damaged")
        return super().read_observation(row)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = federate(
        tmp_path_factory.mktemp("runs") / "sampled", rounds=ROUNDS, model={"name": "mlp", "hidden": [16]}, clients=3, batch_size=4
    )
    return out / "recording"


@pytest.fixture
def sampled(folder: Path) -> Sampled:
    """A recording whose first, second and third client have 1, 3 and 4 rounds."""
    one = Sampled(folder)
    names = list(dict.fromkeys(row.client for row in one.read_rows()))
    one.kept = dict(zip(names, (1, 3, 4), strict=True))
    return one


def plan(recording: Recording, out: Path, seconds: float) -> tuple[dict[str, PlannedAttack], list[str]]:
    """Return the planned attacks by name, and the reasons for the others."""
    results = list(plan_attacks(recording, out, seconds=seconds))
    planned = {one.spec.name: one for one in results if not isinstance(one, NotChecked)}
    return planned, [one.reason for one in results if isinstance(one, NotChecked)]


def find_smallest(recording: Recording, out: Path) -> set[str]:
    """Return the clients that `accumulate` uses under the smallest budget under which it is planned."""
    plans = cache(lambda step: plan(recording, out, 0.01 * 1.2**step)[0])  # a second client costs three quarters more
    first = bisect_left(range(80), True, key=lambda step: "accumulate" in plans(step))
    return {row.client for row in plans(first)["accumulate"].rows}


def test_joint_attacks_are_judged_by_the_client_with_the_most_rounds(sampled: Sampled, tmp_path: Path) -> None:
    planned, reasons = plan(sampled, tmp_path, 1e9)
    assert {"spans", "accumulate", "agic"} <= planned.keys()
    assert not any("several rounds" in reason for reason in reasons)
    assert planned["exact"].rows[0].round == 1  # attacks on single updates keep the first round


def test_joint_attacks_begin_with_the_client_with_the_most_rounds(sampled: Sampled, tmp_path: Path) -> None:
    assert find_smallest(sampled, tmp_path) == {list(sampled.kept)[2]}


def test_attacks_on_single_updates_begin_with_the_fewest_examples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, read = Recording(folder), Recording.read_rows
    names = list(dict.fromkeys(row.client for row in recording.read_rows()))
    sizes = dict(zip(names, (4, None, 1), strict=True))
    monkeypatch.setattr(
        Recording,
        "read_rows",
        lambda self, **options: [replace(row, num_examples=sizes[row.client]) for row in read(self, **options)],
    )
    planned, _ = plan(recording, tmp_path, 1e9)
    for name in ("exact", "inverting_gradients"):
        assert [row.client for row in planned[name].rows] == [names[2], names[0], names[1]]


def test_damaged_rounds_do_not_count(sampled: Sampled, tmp_path: Path) -> None:
    _, second, third = sampled.kept
    sampled.damaged = frozenset((number, third) for number in (1, 2, 3))
    assert find_smallest(sampled, tmp_path) == {second}


def test_a_damaged_first_update_does_not_decide_which_attacks_suit(folder: Path, tmp_path: Path) -> None:
    damaged = Sampled(folder)
    first = damaged.read_rows()[0]
    damaged.damaged = frozenset({(first.round, first.client)})
    assert "robbing_the_fed" not in plan(damaged, tmp_path, 1e9)[0]
    assert plan(damaged, tmp_path, 1e9)[0].keys() == plan(Recording(folder), tmp_path, 1e9)[0].keys()


def test_clients_with_one_round_each_do_not_suit_joint_attacks(folder: Path, tmp_path: Path) -> None:
    recording = Sampled(folder)
    recording.kept = dict.fromkeys((row.client for row in recording.read_rows()), 1)
    planned, reasons = plan(recording, tmp_path, 1e9)
    assert "accumulate" not in planned
    assert "accumulate: it needs several rounds, and only one is recorded" in reasons


def test_the_named_budget_is_enough(folder: Path, tmp_path: Path) -> None:
    recording, needs = Recording(folder), r"^(\w+)\(.*give --budget (\d+)s or more$"
    needed = [match.groups() for reason in plan(recording, tmp_path, 0.001)[1] if (match := re.search(needs, reason))]
    assert {"inverting_gradients", "cpl", "accumulate", "agic"} <= {name for name, _ in needed}
    for name, seconds in needed:
        assert name in plan(recording, tmp_path, float(seconds))[0]


def test_inverting_gradients_is_shortened_before_it_is_left_out(folder: Path, tmp_path: Path) -> None:
    """All of the tuned 1,200 iterations are made while they fit for one client, and a quarter of them under smaller budgets."""
    recording, name = Recording(folder), "inverting_gradients"
    plans = cache(lambda step: plan(recording, tmp_path, 0.01 * 1.2**step)[0])
    first = bisect_left(range(80), True, key=lambda step: name in plans(step))
    whole = bisect_left(range(80), True, key=lambda step: step >= first and plans(step)[name].spec.arguments["steps"] == 1200)
    assert first < whole < 80
    for step in (first, (first + whole) // 2, whole - 1):
        assert plans(step)[name].spec.arguments["steps"] == 300
        assert len({row.client for row in plans(step)[name].rows}) == 1


def test_a_search_for_orders_is_halved_before_it_is_left_out(tmp_path: Path) -> None:
    training = {"learning_rate": 0.1, "batch_size": 4, "epochs": 2}
    run = federate(tmp_path / "run", clients={"count": 150, "fraction": 0.02}, training=training)
    recording = Recording(run / "recording")
    plans = [plan(recording, tmp_path, 1.3**step)[0].get("agic") for step in range(25)]
    steps = [None if one is None else one.spec.arguments["steps"] for one in plans]
    assert list(dict.fromkeys(steps)) == [None, ORDERED_STEPS // 2, ORDERED_STEPS]


def test_exact_is_left_out_if_no_closed_form_applies(folder: Path, tmp_path: Path) -> None:
    model = {"name": "resnet18", "batch_norm": True}
    training = {"learning_rate": 0.1, "batch_size": 2, "steps": 1, "mode": "train"}
    run = federate(tmp_path / "run", model=model, training=training)
    planned, reasons = plan(Recording(run / "recording"), tmp_path, 1e9)
    (reason,) = (reason for reason in reasons if reason.startswith("exact: "))
    assert "none of its closed forms applies" in reason
    assert "add joins 2 paths" in reason
    assert "exact" not in planned
    assert "exact" in plan(Recording(folder), tmp_path, 1e9)[0]


@pytest.mark.parametrize(
    ("steps", "defense", "surrogate"), [(1, "", False), (2, "", False), (2, "gaussian(1e-3)", True), (11, "", True)]
)
def test_several_local_steps_are_searched_with_surrogate_weights_only_beside_the_truth(
    steps: int, defense: str, surrogate: bool, tmp_path: Path
) -> None:
    """Two steps on eight examples are simulated instead, after a search for the order of the examples, but not behind noise."""
    model = {"name": "mlp", "hidden": [16]}
    training = {"learning_rate": 0.1, "batch_size": 4, "steps": steps}
    run = federate(tmp_path / "run", model=model, training=training, defense=defense)
    recording, found = Recording(run / "recording"), []
    for nulls in (True, False):
        planned = [one for one in plan_attacks(recording, tmp_path, seconds=1e9, nulls=nulls) if isinstance(one, PlannedAttack)]
        (search,) = (one for one in planned if one.spec.name == "inverting_gradients")
        found.append(search.spec.arguments.get("surrogate", False))
    assert found == [surrogate, False]


@pytest.mark.parametrize(
    ("batch_size", "defense", "separate", "steps"),
    [(4, "", False, ORDERED_STEPS), (64, "", False, None), (1, "", True, None), (4, "gaussian(1e-3)", True, None)],
)
def test_local_epochs_have_separate_examples_only_where_steps_are_not_simulated_in_an_order(
    batch_size: int, defense: str, separate: bool, steps: int | None, tmp_path: Path
) -> None:
    """Clients have nine or ten examples: six steps, two, or more than ten. Searches for an order have more iterations."""
    training = {"learning_rate": 0.1, "batch_size": batch_size, "epochs": 2}
    run = federate(tmp_path / "run", clients={"count": 150, "fraction": 0.02}, training=training, defense=defense)
    planned, _ = plan(Recording(run / "recording"), tmp_path, 1e9)
    arguments = planned["agic"].spec.arguments
    assert ("order_invariant" in arguments) == separate
    assert arguments.get("steps") == steps


def test_an_attack_for_which_nothing_is_left_is_not_told_a_negative_share() -> None:
    sizes = [[PlannedAttack(spec=AttackSpec(name="cpl"), rows=(), core_seconds=seconds)] for seconds in (12.0, 60.0)]
    first, second = _share_budget(sizes, 10.0)
    assert isinstance(first, PlannedAttack)
    assert isinstance(second, NotChecked)
    assert "more than earlier attacks leave of the budget of 10 seconds: give --budget 73s or more" in second.reason
    _, second = _share_budget(sizes, 20.0)
    assert isinstance(second, NotChecked)
    assert "more than its share (8.0 seconds) of the budget of 20 seconds" in second.reason
