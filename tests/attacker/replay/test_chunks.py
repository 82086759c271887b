"""Tests of how many cases are attacked at once (a chunk), which depends on memory, including that of the optimiser."""

import pytest
import torch

from attacker.attacks import AttackSpec
from attacker.attacks.base import estimate_effort
from attacker.attacks.optimisers.first_order import SGD, Adagrad, Adam, Optimiser
from attacker.attacks.optimisers.lbfgs import LBFGS
from attacker.replay import batching as chunks
from attacker.replay.batching import CaseFootprint
from defenses import DefenseSpec
from fedsim.recording import DataSpec, Manifest, ModelSpec, Training

GB = 10**9
LENET = ModelSpec(name="lenet_cpl")
CIFAR = DataSpec(shape=(3, 32, 32), num_classes=10)


ONE_STEP = Training(learning_rate=0.1, batch_size=1, steps=1)


def make_footprint(attack: str, training: Training = ONE_STEP, **arguments: object) -> CaseFootprint:
    manifest = Manifest(name="run", model=LENET, data=CIFAR, training=training, defense=DefenseSpec.parse(""), software={})
    effort = estimate_effort(AttackSpec(name=attack, arguments=arguments).build())
    return CaseFootprint(manifest, "cpu", effort)


@pytest.mark.parametrize("optimiser", [Adam(), SGD(), Adagrad(), LBFGS(history=5), LBFGS(history=5, line_search=True)], ids=str)
def test_optimisers_keep_the_stated_number_of_vectors(optimiser: Optimiser) -> None:
    size, stepper, z = 10_000, optimiser.start(), torch.zeros(1, 10_000)
    stretch = torch.linspace(0.1, 10, size)
    for _ in range(60):
        z = stepper.step(z, stretch * (z - 1), (stretch * (z - 1).square()).sum(dim=1) / 2, 0.5)
    kept = sum(t.numel() for t in stepper.get_state().values())
    assert round(kept / size) == optimiser.remembers


def test_starts_that_are_searched_at_once_add_their_memory() -> None:
    single, in_turn = make_footprint("inverting_gradients"), make_footprint("inverting_gradients", restarts=3)
    at_once = make_footprint("inverting_gradients", restarts=3, consistency=0.1)
    assert in_turn.estimate_bytes([2]) == single.estimate_bytes([2])
    assert at_once.estimate_bytes([2]) == 3 * single.estimate_bytes([2])


@pytest.mark.parametrize(("batch_size", "steps"), [(2, 3), (1, 6)])
def test_each_local_step_that_is_simulated_takes_memory(batch_size: int, steps: int) -> None:
    """Two examples in three epochs: three steps on both, or six steps on one each; both are simulated by default."""
    training = Training(learning_rate=0.1, batch_size=batch_size, epochs=3)
    first = make_footprint("agic", local_steps="one_batch")
    step = 4 * chunks.STEP_TENSORS * (first.parameters + 2 * first.activations)
    for way, count in (("one_batch", 1), ("auto", steps), ("simulated", steps)):
        found = make_footprint("agic", training, local_steps=way).estimate_bytes([2])
        assert found == first.estimate_bytes([2]) + (count - 1) * step


@pytest.mark.parametrize("way", ["auto", "simulated"])
def test_a_client_that_reports_too_many_examples_does_not_stop_the_estimate(way: str) -> None:
    training = Training(learning_rate=0.1, batch_size=1, epochs=3)
    assert make_footprint("agic", training, local_steps=way).estimate_bytes([10**9]) > 0


def test_memory_of_a_case_includes_the_history_and_its_copy() -> None:
    history = 2 * 100 * 4 * 64 * CIFAR.size
    more = make_footprint("cpl").estimate_bytes([64]) - make_footprint("cpl", optimiser="adam").estimate_bytes([64])
    assert 2 * history < more < 3 * history


def test_chunk_size_depends_on_the_memory_with_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "divide_memory", lambda device: (6 * GB, 2))
    history = 2 * 100 * 4 * 64 * CIFAR.size
    assert 4 < make_footprint("cpl").choose_chunk_size([64], 600) < 6 * GB / (2 * history)
    assert make_footprint("cpl", optimiser="adam").choose_chunk_size([64], 600) == chunks.MAX_CASES_AT_ONCE
    assert make_footprint("cpl").choose_chunk_size([1], 600) == chunks.MAX_CASES_AT_ONCE  # enough memory for all


@pytest.mark.parametrize(
    ("attack", "arguments", "vectors"),
    [
        ("cpl", {}, 202),
        ("cpl", {"optimiser": "wolfe"}, 205),
        ("inverting_gradients", {}, 202),
        ("inverting_gradients", {"polish": 0.0}, 2),
        ("agic", {"optimiser": "lbfgs"}, 202),
        ("exact", {}, 202),
        ("hgap", {}, 202),
        ("rgap", {}, 0),
    ],
)
def test_number_of_vectors_is_that_of_the_search(attack: str, arguments: dict[str, object], vectors: int) -> None:
    assert estimate_effort(AttackSpec(name=attack, arguments=arguments).build()).vectors == vectors


def test_only_used_places_of_a_history_are_stored() -> None:
    settings, z = LBFGS(history=100), torch.zeros(2, 1000)
    stepper, other = settings.start(), settings.start()
    for _ in range(4):
        z = stepper.step(z, 2 * z - 1 + 0.1 * torch.cos(3 * z), z.square().sum(dim=1), 0.5)
    state = stepper.get_state()
    assert state["history.steps"].shape == (2, 3, 1000)
    other.load(state)
    assert other.history.steps.shape == stepper.history.steps.shape
    assert torch.equal(other.history.steps, stepper.history.steps)
    assert torch.equal(other.history.products, stepper.history.products)


def test_case_larger_than_the_memory_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "read_memory", lambda device: 8 * GB)
    assert make_footprint("cpl").explain_too_large([64]) == ""
    words = make_footprint("cpl").explain_too_large([10**9])
    assert "1,000,000,000 examples of 3,072 values" in words
    assert "take at least 36,86" in words
    assert "cpu has 8.0 GB; attack fewer rounds" in words


def test_chunk_that_may_be_too_large_is_announced_and_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "read_memory", lambda device: 8 * GB)
    own = make_footprint("cpl")
    assert own.explain_risk(8 * GB) == ""
    assert "may take up to 9 GB of memory, and cpu has 8 GB" in own.explain_risk(9 * GB)
    assert [own.count_concurrent(n * GB) for n in (2, 3, 4, 5, 9)] == [4, 2, 2, 1, 1]
