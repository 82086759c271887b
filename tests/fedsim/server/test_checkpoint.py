"""Tests of server checkpoints: attributes of Flower's strategies, random generators and weights are restored exactly."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM

from fedsim.server import checkpoint
from fedsim.server.checkpoint import ServerCheckpoint, StrategyMemory, count_rounds, read_strategy, restore_strategy


def same(one: Any, other: Any) -> bool:
    if isinstance(one, ArrayRecord):
        return list(one) == list(other) and all(one[k].data == other[k].data for k in one)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    return bool(one == other)


def write_and_read(memory: StrategyMemory, folder: Path) -> StrategyMemory:
    ServerCheckpoint(round=3, attempt=2, arrays={}, memory=memory, generators=checkpoint.read_generators()).write(folder)
    found = ServerCheckpoint.read(folder)
    return found.memory


def age(strategy: Any) -> Any:
    """Give a strategy attributes as it has after some rounds, and return it."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.normal(size=(2, 3)).astype(np.float32), "b": np.float64(rng.normal())}
    strategy.current_arrays = arrays if isinstance(strategy, FedAdam) else ArrayRecord({"w": Array(arrays["w"])})
    strategy.m_t = {key: value * 2 for key, value in arrays.items()}
    strategy.momentum_vector = [arrays["w"], arrays["w"][:1] * 3]
    strategy.clipping_norm = 0.1 + 0.2
    strategy.alone = arrays["w"]
    return strategy


@pytest.mark.parametrize("make", [FedAvg, FedAdam, lambda: FedAvgM(server_momentum=0.9)])
def test_a_new_strategy_gets_the_attributes_of_the_old_one(make: Any, tmp_path: Path) -> None:
    old, new = age(make()), make()
    restore_strategy(new, write_and_read(read_strategy(old), tmp_path))
    for name, value in vars(old).items():
        assert callable(value) or same(getattr(new, name), value), name


def test_the_strategy_inside_a_wrapper_is_restored_as_well(tmp_path: Path) -> None:
    def make() -> Any:
        return flower.DifferentialPrivacyServerSideFixedClipping(FedAdam(), 0.5, 1.0, 3)

    old, new = make(), make()
    age(old.strategy)
    restore_strategy(new, write_and_read(read_strategy(old), tmp_path))
    assert same(new.strategy.m_t, old.strategy.m_t)


def test_a_strategy_with_an_attribute_that_cannot_be_saved_is_not_resumed(tmp_path: Path) -> None:
    odd = FedAvg()
    odd.history = {"losses": object()}
    memory = write_and_read(read_strategy(odd), tmp_path)
    with pytest.raises(ValueError, match="cannot be resumed: its attribute history, of type dict"):
        restore_strategy(FedAvg(), memory)


def test_every_strategy_that_an_experiment_may_name_can_be_resumed() -> None:
    from fedsim.strategies import names as strategies

    for name in strategies.STRATEGY_NAMES:
        assert read_strategy(strategies.build(name, clients=4, fraction=1.0)).unsaved == (), name


def test_restored_generators_draw_the_same_numbers(tmp_path: Path) -> None:
    before = np.random.get_state()
    try:
        random.seed(1)
        np.random.seed(2)
        random.gauss(0, 1)
        np.random.normal()  # NumPy draws two numbers and keeps the second
        ServerCheckpoint(round=0, attempt=1, arrays={}, generators=checkpoint.read_generators()).write(tmp_path)
        expected = [random.random(), random.gauss(0, 1), np.random.normal(), np.random.normal()]
        random.seed(9)
        np.random.seed(9)
        found = ServerCheckpoint.read(tmp_path)
        checkpoint.restore_generators(found.generators)
        assert [random.random(), random.gauss(0, 1), np.random.normal(), np.random.normal()] == expected
    finally:
        np.random.set_state(before)


def test_names_order_types_and_bits_of_the_weights_are_kept(tmp_path: Path) -> None:
    arrays = {
        "z": torch.randn(2, 2, generator=torch.Generator().manual_seed(0)),
        "a": torch.tensor(3),
        "half": torch.tensor([1.5], dtype=torch.float16),
        "odd": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    ServerCheckpoint(round=7, attempt=4, arrays=arrays, generators=checkpoint.read_generators()).write(tmp_path)
    found = ServerCheckpoint.read(tmp_path)
    assert (found.round, found.attempt, list(found.arrays)) == (7, 4, list(arrays))
    for name, tensor in arrays.items():
        assert found.arrays[name].dtype == tensor.dtype
        assert found.arrays[name].numpy().tobytes() == tensor.numpy().tobytes()
    assert count_rounds(tmp_path) == 7


def test_a_missing_checkpoint_gives_none_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert ServerCheckpoint.read(tmp_path) is None
    assert count_rounds(tmp_path) is None
    (tmp_path / "server.safetensors").write_bytes(b"rubbish")
    for read in (ServerCheckpoint.read, count_rounds):
        with pytest.raises(ValueError, match=r"server\.safetensors: not a checkpoint"):
            read(tmp_path)
