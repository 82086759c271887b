"""Tests of clipping and noise on the server: the mean, the recorded updates, and the state that is kept between rounds."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from tiny_experiments import Federate, make_tiny
from torch import Tensor

from fedsim.config.experiment import ExperimentError
from fedsim.engine import engines as engine
from fedsim.flower import records
from fedsim.recording import Recording
from fedsim.server.checkpoint import read_strategy, restore_strategy
from fedsim.strategies import names as strategies
from fedsim.strategies.averaging import Averaging

SIZE = 20_000
NOISELESS = {"noise_multiplier": 0.0, "clipping_norm": 1e6}


@pytest.fixture(autouse=True)
def _seeded_noise() -> Any:
    state = np.random.get_state()
    np.random.seed(7)
    yield
    np.random.set_state(state)


def strategy(clients: int = 4, name: str = "FedAvg", **central: Any) -> Any:
    return strategies.build(name, clients=clients, fraction=1.0, central=central)


def make_weights(values: Any) -> ArrayRecord:
    return ArrayRecord({"w": Array(np.asarray(values, np.float32)), "b": Array(np.float32([0.25]))})


def one_round(
    server: Any, updates: list[Any], *, examples: list[int] | None = None, failed: int = 0, start: Any = None, number: int = 1
) -> Any:
    """Run one round in which clients send `updates` and `failed` more clients fail; return the weights by name."""
    count = len(updates) + failed
    begun = np.zeros(SIZE, np.float32) if start is None else start
    grid: Any = engine.LocalGrid(lambda message, context: message, count)
    messages = list(server.configure_train(number, make_weights(begun), ConfigRecord(), grid))
    for message in messages:
        message.metadata.__dict__["_message_id"] = "m"
    shares = examples or [1] * len(updates)
    replies = [
        Message(
            RecordDict({"arrays": make_weights(begun + update), "metrics": MetricRecord({"num-examples": share})}),
            reply_to=message,
        )
        for message, update, share in zip(messages, updates, shares, strict=False)
    ]
    replies += [Message(Error(1, "unplugged"), reply_to=message) for message in messages[len(updates) :]]
    aggregated, _ = server.aggregate_train(number, replies)
    return None if aggregated is None else {name: t.double() for name, t in records.to_tensors(aggregated).items()}


def along(axis: int, length: float) -> Any:
    update = np.zeros(SIZE, np.float32)
    update[axis] = length
    return update


# --- the mean ---


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_the_mean_is_that_of_clipped_updates_with_equal_weights(kind: str) -> None:
    server = strategy(3, kind=kind, noise_multiplier=0.0, clipping_norm=1.0)
    after = one_round(server, [along(0, 50.0), along(1, -0.5), along(2, 2.0)], examples=[1, 1000, 5])
    assert after["w"][:3] == pytest.approx(np.array([1.0, -0.5, 1.0]) / 3, abs=1e-6)
    assert not after["w"][3:].any()
    assert after["b"] == 0.25


@pytest.mark.parametrize("failed", [0, 2])
def test_the_noise_on_the_mean_has_the_deviation_that_is_accounted_for(failed: int) -> None:
    """The deviation is z * S / m for noise multiplier z, norm S and m answers, as a client changes the mean by S / m at most."""
    server = strategy(4 + failed, noise_multiplier=3.0, clipping_norm=0.5)
    after = one_round(server, [along(0, 9.0), along(1, 9.0), along(2, 9.0), along(3, 9.0)], failed=failed)
    noise = after["w"][4:]
    assert float(noise.std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.03)
    assert abs(float(noise.mean())) < 4 * 3.0 * 0.5 / 4 / math.sqrt(SIZE)
    assert float(torch.linalg.vector_norm(after["w"])) < 2 * 3.0 * 0.5 / 4 * math.sqrt(SIZE)


def test_every_round_has_fresh_noise() -> None:
    server = strategy(1, noise_multiplier=1.0, clipping_norm=1.0)
    first, second = (one_round(server, [along(0, 1.0)], number=number)["w"][1:] for number in (1, 2))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 4 / math.sqrt(SIZE)


def test_a_round_of_failures_gives_no_new_weights() -> None:
    assert one_round(strategy(2, noise_multiplier=1.0, clipping_norm=1.0), [], failed=2) is None


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
@pytest.mark.parametrize("start", [0.0, 0.37])
def test_an_update_of_zero_is_averaged_without_an_error(kind: str, start: float) -> None:
    begun = np.full(SIZE, start, np.float32)
    server = strategy(2, kind=kind, noise_multiplier=0.0, clipping_norm=1.0)
    after = one_round(server, [along(0, 0.5), along(0, 0.0)], start=begun)
    assert after["w"][0] == pytest.approx(start + 0.25, abs=1e-6)
    assert after["w"][1:] == pytest.approx(begun[1:], abs=1e-6)
    tiny = one_round(server, [along(0, 0.5), along(1, 1e-30)], start=np.zeros(SIZE, np.float32))  # its square is 0 in float32
    assert tiny["w"][0] == pytest.approx(0.25, abs=1e-6)


# --- the adaptive norm ---


def test_the_adaptive_norm_approaches_the_median_of_the_norms() -> None:
    lengths = [0.5, 1.0, 2.0, 4.0, 8.0]
    for first in (0.01, 100.0):
        server = strategy(5, kind="adaptive", noise_multiplier=0.0, clipping_norm=first, norm_learning_rate=0.5)
        for number in range(1, 80):
            one_round(server, [along(0, length) for length in lengths], number=number)
        assert 1.0 < server.inner.clipping_norm < 4.0, first


@pytest.mark.parametrize("first", [0.01, 100.0])
def test_the_noise_suffices_for_the_norm_before_and_after_its_change(first: float) -> None:
    server = strategy(100, kind="adaptive", noise_multiplier=2.0, clipping_norm=first, norm_learning_rate=2.0)
    noise = one_round(server, [along(0, 1.0)] * 100)["w"][1:]
    after, on_the_mean = server.inner.clipping_norm, server.inner.noise_multiplier
    assert (after > 2 * first) if first < 1 else (after < first / 2)
    assert float(noise.std()) == pytest.approx(on_the_mean * max(first, after) / 100, rel=0.03)
    # the noise on the mean and on the count of clipped updates, to which a client adds +-1/2, together give multiplier 2
    assert on_the_mean**-2 + (2 * server.inner.clipped_count_stddev) ** -2 == pytest.approx(2.0**-2)


# --- in a federation ---


def read_last_weights(run: Any) -> dict[str, Tensor]:
    *_, last = Recording(run.out / "recording").read_observations()
    return dict(last.weights)


def test_without_noise_and_with_a_large_norm_training_is_unchanged(federate: Federate) -> None:
    """All clients use the same number of examples, so that their weights are equal in both runs."""
    plain = read_last_weights(federate("plain", rounds=3))
    for kind in ("fixed", "adaptive"):
        central = read_last_weights(federate(kind, rounds=3, strategy={"name": "FedAvg", "central": {"kind": kind, **NOISELESS}}))
        for name, tensor in plain.items():
            assert torch.allclose(central[name], tensor, rtol=0, atol=1e-6)
            assert central[name].dtype == tensor.dtype


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_updates_are_recorded_before_clipping_and_noise(federate: Federate, kind: str) -> None:
    """Updates of the first round equal those of a run without noise bit for bit, but the resulting model differs."""
    central = {"kind": kind, "noise_multiplier": 0.1, "clipping_norm": 1e-3}
    runs = [
        federate(name, rounds=2, strategy=s)
        for name, s in (("plain", "FedAvg"), ("noisy", {"name": "FedAvg", "central": central}))
    ]
    (plain, plain_2), (noisy, noisy_2) = (
        [list(Recording(run.out / "recording").read_observations(rounds={number})) for number in (1, 2)] for run in runs
    )
    for ours, theirs in zip(noisy, plain, strict=True):
        assert (ours.client, ours.num_examples) == (theirs.client, 4)
        assert all(torch.equal(ours.update[name], theirs.update[name]) for name in theirs.update)
        assert math.sqrt(sum(float(t.square().sum()) for t in ours.update.values())) > 0.01
    moved = {name: noisy_2[0].weights[name] - noisy[0].weights[name] for name in noisy[0].weights}
    assert math.sqrt(sum(float(t.square().sum()) for t in moved.values())) < 0.01
    assert any(not torch.equal(noisy_2[0].weights[name], plain_2[0].weights[name]) for name in moved)


def test_shared_statistics_are_averaged_by_examples_and_get_no_noise() -> None:
    def sent(weight: float, variance: float) -> ArrayRecord:
        return ArrayRecord({"w": Array(np.float32([weight])), "var": Array(np.float32([variance]))})

    server = Averaging(strategy(2, noise_multiplier=5.0, clipping_norm=1.0), frozenset({"var"}))
    grid: Any = engine.LocalGrid(lambda message, context: message, 2)
    messages = list(server.configure_train(1, sent(0, 1), ConfigRecord(), grid))
    for message in messages:
        message.metadata.__dict__["_message_id"] = "m"
    replies = [
        Message(RecordDict({"arrays": sent(1, variance), "metrics": MetricRecord({"num-examples": share})}), reply_to=message)
        for message, variance, share in zip(messages, (2.0, 6.0), (1, 3), strict=True)
    ]
    after = records.to_tensors(server.aggregate_train(1, replies)[0])
    assert after["var"] == 5.0
    assert after["w"] not in (0.0, 1.0)


@pytest.mark.parametrize("name", strategies.STRATEGY_NAMES)
@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_every_strategy_under_noise_can_be_restored(name: str, kind: str) -> None:
    old, new = (strategy(4, name, kind=kind, noise_multiplier=0.1, clipping_norm=0.5) for _ in range(2))
    for number in (1, 2):
        assert one_round(old, [along(i, 1.0 + i) for i in range(4)], number=number) is not None
    memory = read_strategy(old)
    assert memory.unsaved == ()
    restore_strategy(new, memory)
    assert new.inner.clipping_norm == old.inner.clipping_norm
    again = []
    for server in (old, new):
        np.random.seed(1)
        again.append(one_round(server, [along(i, 1.0 + i) for i in range(4)], number=3)["w"])
    assert torch.equal(*again)


# --- invalid settings ---


@pytest.mark.parametrize(
    ("central", "words"),
    [
        ({"noise_multiplier": -1.0, "clipping_norm": 1.0}, "noise_multiplier must be finite and not negative, got -1"),
        ({"noise_multiplier": 1.0, "clipping_norm": 0.0}, r"clipping_norm must be positive and finite, got 0\.0"),
        ({"noise_multiplier": 1.0}, "strategy.central: missing .*'clipping_norm'"),
        ({"kind": "fixed", "noise_multiplier": 1.0, "clipping_norm": 1.0, "clipped_quantile": 0.5}, "clipped_quantile"),
        ({"kind": "moving", "noise_multiplier": 1.0}, "kind must be one of fixed, adaptive, got 'moving'"),
        ({"kind": "adaptive", "noise_multiplier": 1.0, "clipped_quantile": 2}, r"clipped_quantile must be in \[0, 1\], got 2"),
        ({"kind": "adaptive", "noise_multiplier": 1.0, "norm_learning_rate": 0}, "norm_learning_rate must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(central: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategy(40, **central)


def test_a_value_that_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strategy\.central must be a table"):
        strategies.build("FedAvg", clients=2, fraction=1.0, central=1.0)


def test_secure_aggregation_is_refused_with_clipping_on_the_server() -> None:
    with pytest.raises(ExperimentError, match=r"strategy\.central clips each client's own update"):
        make_tiny(strategy={"name": "FedAvg", "central": NOISELESS}, secure_aggregation=True)
