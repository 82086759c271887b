"""Tests of the estimated cost of a replay, which is printed before it begins."""

import time
from pathlib import Path

import pytest
from federations import federate, make_replay
from torch import Tensor, nn

from attacker.attacks import AttackSpec
from attacker.attacks.base import estimate_effort
from attacker.attacks.closed_form import layer_input, routing
from attacker.commands.progress_bar import describe_cost
from attacker.replay import batching
from attacker.replay.batching import CaseFootprint
from attacker.replay.executors import process_pool
from attacker.replay.forecast import Forecast, describe_routes
from attacker.replay.replay import Replay
from attacker.replay.tasks import Task, TaskCase
from fedsim import models
from fedsim.recording import Recording

FORWARD_SECONDS = 0.05


class Slow(nn.Module):
    """A small network whose forward pass takes `FORWARD_SECONDS` of processor time, which its sizes do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Sigmoid(), nn.Linear(4, 10))

    def forward(self, x: Tensor) -> Tensor:
        end = time.process_time() + FORWARD_SECONDS * (x.device.type != "meta")
        while time.process_time() < end:
            pass
        logits: Tensor = self.layers(x)
        return logits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return federate(tmp_path_factory.mktemp("runs") / "digits", clients=3, model={"name": "mlp", "hidden": [4]})


def replay(run: Path, out: Path, steps: int) -> Replay:
    spec = AttackSpec(name="inverting_gradients", arguments={"steps": steps})
    return make_replay(run, spec, out=out, chunk=2)


def test_estimated_cost_grows_with_steps_and_is_zero_at_the_end(run: Path, tmp_path: Path) -> None:
    short, long = (replay(run, tmp_path / "out", steps).estimate_work() for steps in (2, 200))
    assert (short.cases, short.chunks, short.evaluations) == (3, 2, 2)
    assert long.core_seconds == pytest.approx(100 * short.core_seconds)
    replay(run, tmp_path / "out", 2).run()
    after = replay(run, tmp_path / "out", 2).estimate_work()
    assert (after.cases, after.chunks, after.core_seconds) == (0, 0, 0)
    assert describe_cost(after) == ""


def test_restarts_are_part_of_the_cost_of_an_attack_and_not_of_its_null(run: Path, tmp_path: Path) -> None:
    def forecast(name: str, restarts: int, *, null: bool = False) -> Forecast:
        spec = AttackSpec(name=name, arguments={"steps": 2, "restarts": restarts}, null=null)
        return make_replay(run, spec, out=tmp_path / "out").estimate_work()

    for name in ("cpl", "accumulate"):
        single, triple = forecast(name, 1), forecast(name, 3)
        assert triple.evaluations == 3 * single.evaluations
        assert triple.core_seconds == pytest.approx(3 * single.core_seconds)
        assert forecast(name, 3, null=True).evaluations == single.evaluations


def test_rounds_of_a_case_are_estimated_one_after_the_other(run: Path) -> None:
    footprint = CaseFootprint(Recording(run / "recording").manifest, "cpu")
    assert footprint.estimate_seconds([1, 1, 1], 1) == pytest.approx(3 * footprint.estimate_seconds([1], 1))


@pytest.mark.parametrize("attack", ["cpl", "exact", "agic"])
def test_the_time_of_an_evaluation_is_measured(tmp_path: Path, attack: str) -> None:
    """A null without the gradient does not run the network, and takes less."""
    name = f"{__name__}:Slow"
    models.admit(name)
    out = federate(tmp_path / "slow", model=name, clients=1, rounds=1)
    recording = Recording(out / "recording")

    def forecast(*, null: bool) -> Forecast:
        spec = AttackSpec(name=attack, arguments={"steps": 10}, null=null)
        return Replay(recording=recording, spec=spec, out=out / "reconstructions").estimate_work()

    one, null = forecast(null=False), forecast(null=True)
    assert 0.9 * FORWARD_SECONDS <= one.core_seconds / one.evaluations <= 10 * FORWARD_SECONDS
    assert null.core_seconds / null.evaluations < FORWARD_SECONDS / 2


def test_a_search_from_a_closed_form_is_one_more_start() -> None:
    search, both = (estimate_effort(AttackSpec(name=name, arguments={"steps": 2}).build()) for name in ("cpl", "exact"))
    assert both.most_evaluations == search.most_evaluations + both.evaluations
    started = estimate_effort(AttackSpec(name="cpl", arguments={"steps": 2, "closed_form_start": True}).build())
    assert started.most_evaluations == 2 * search.most_evaluations


def test_cost_is_described_in_seconds_minutes_or_hours() -> None:
    def describe(seconds: float) -> str:
        return describe_cost(Forecast(cases=1, chunks=1, evaluations=300, core_seconds=seconds))

    assert "at most 300 evaluations" in describe(30)
    assert [words in describe(seconds) for words, seconds in (("30 s", 30), ("10 min", 600), ("3 h", 10800))] == [True] * 3
    assert "very roughly a second of one core" in describe(0.02)
    assert describe_cost(Forecast(cases=1, chunks=1, evaluations=1, core_seconds=1)) == ""
    many = [describe_cost(Forecast(cases=4, chunks=chunks, evaluations=300, core_seconds=1)) for chunks in (1, 2)]
    assert [words.split(",")[0] for words in many] == ["4 cases in 1 chunk", "4 cases in 2 chunks"]


def test_inapplicable_closed_forms_are_listed_before_the_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federate(tmp_path / "run", model="lenet_cpl", data="photos", batch_size=2)
    monkeypatch.setattr(routing.Routing, "answer", lambda self: pytest.fail("planning solves nothing"))
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    forecast = make_replay(tmp_path / "run", spec, out=tmp_path / "out").estimate_work()
    words = describe_routes(forecast)
    assert words[0] == "closed forms that may apply: features"
    assert [line.partition(" cannot: ")[0] for line in words[1:]] == ["linear", "layers, peeled", "layer_input"]
    assert "from 2 examples" in words[2]


def test_iterations_of_a_closed_form_are_part_of_the_cost(run: Path, tmp_path: Path) -> None:
    """With one step on one example, the closed form (route) `layer_input` may apply, which iterates."""
    spec = AttackSpec(name="exact", arguments={"fallback": "none", "route": "layer_input"})
    forecast = make_replay(run, spec, out=tmp_path / "out").estimate_work()
    assert forecast.reasons["layer_input"] == ""
    assert forecast.evaluations >= sum(layer_input.STAGE_STEPS)
    assert forecast.core_seconds > 1e-4 * sum(layer_input.STAGE_STEPS)


def test_iterations_are_not_expected_where_the_first_layer_shows_the_example(run: Path, tmp_path: Path) -> None:
    spec = AttackSpec(name="exact", arguments={"fallback": "none"})
    forecast = make_replay(run, spec, out=tmp_path / "out").estimate_work()
    assert (forecast.reasons["linear"], forecast.reasons["layer_input"]) == ("", "")
    assert forecast.evaluations == 1


def test_lack_of_memory_is_told_before_the_attack(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small memory also leaves one worker at a time, whatever the work is worth."""
    small = replay(run, tmp_path / "small", 2)
    assert small.estimate_work().memory == ""
    monkeypatch.setattr(batching, "read_memory", lambda device: 1000)
    monkeypatch.setattr(process_pool, "choose_workers", lambda *_: 4)
    tasks = [Task(members=(TaskCase(key=case.key, rows=()),)) for case in small.plan.cases]
    assert "its process may be killed" in small.estimate_work().memory
    assert small._choose_workers(tasks) == 1
    monkeypatch.setattr(batching, "read_memory", lambda device: 10**9)
    assert small._choose_workers(tasks) == 4
