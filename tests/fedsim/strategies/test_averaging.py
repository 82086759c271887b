"""Tests of batch-norm statistics: they are averaged beside the weights under any strategy, and keep their types."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian, Strategy

from fedsim import models
from fedsim.engine import engines as engine
from fedsim.flower import records
from fedsim.recording import Recording
from fedsim.strategies.averaging import Averaging, average
from fedsim.training.local import train
from fedsim.truth import TruthReader

BUFFERS = frozenset({"bn.running_var", "bn.num_batches_tracked"})


@pytest.fixture
def grid() -> engine.LocalGrid:
    return engine.LocalGrid(lambda message, context: message, 2)


def arrays(weight: float, variance: float, batches: int) -> ArrayRecord:
    return ArrayRecord(
        {
            "fc.weight": Array(np.full((2,), weight, np.float32)),
            "bn.running_var": Array(np.full((2,), variance, np.float32)),
            "bn.num_batches_tracked": Array(np.array(batches, np.int64)),
        }
    )


def one_round(strategy: Strategy, grid: Any, replies: list[tuple[ArrayRecord, int]]) -> tuple[list[Message], Any]:
    messages = list(strategy.configure_train(1, arrays(0.0, 1.0, 0), ConfigRecord(), grid))
    answers = [
        Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": count})}), reply_to=message)
        for message, (record, count) in zip(messages, replies, strict=True)
    ]
    for message in messages:
        message.metadata.__dict__["_message_id"] = "m"
    return messages, strategy.aggregate_train(1, answers)[0]


@pytest.mark.parametrize("inner", [FedAvg, FedMedian, FedAdam])
def test_buffers_are_means_weighted_by_examples_under_any_strategy(inner: Any, grid: engine.LocalGrid) -> None:
    made = inner(fraction_evaluate=0.0, min_available_nodes=2)
    messages, found = one_round(Averaging(made, BUFFERS), grid, [(arrays(1.0, 2.0, 3), 1), (arrays(5.0, 6.0, 4), 3)])
    assert all(set(m.content["arrays"]) == set(arrays(0, 0, 0)) for m in messages)  # clients get weights and buffers
    tensors = records.to_tensors(found)
    assert torch.equal(tensors["bn.running_var"], torch.full((2,), 5.0))  # (2 + 3 * 6) / 4
    assert tensors["bn.num_batches_tracked"].dtype == torch.int64
    assert int(tensors["bn.num_batches_tracked"]) == 4  # 3.75, rounded
    assert tensors["fc.weight"].dtype == torch.float32
    expected = {FedAvg: 4.0, FedMedian: 3.0}.get(inner)
    assert expected is None or torch.equal(tensors["fc.weight"], torch.full((2,), expected))


def test_without_buffers_the_strategy_is_unchanged(grid: engine.LocalGrid) -> None:
    replies = [(ArrayRecord({"w": Array(np.float32([0.1, 0.7]))}), 3), (ArrayRecord({"w": Array(np.float32([0.3, 0.2]))}), 5)]
    results = []
    for strategy in (FedAvg(fraction_evaluate=0.0), Averaging(FedAvg(fraction_evaluate=0.0))):
        strategy.configure_train(1, ArrayRecord({"w": Array(np.float32([0, 0]))}), ConfigRecord(), grid)
        messages = list(strategy.configure_train(1, ArrayRecord({"w": Array(np.float32([0, 0]))}), ConfigRecord(), grid))
        answers = []
        for message, (record, count) in zip(messages, replies, strict=True):
            message.metadata.__dict__["_message_id"] = "m"
            answers.append(
                Message(RecordDict({"arrays": record, "metrics": MetricRecord({"num-examples": count})}), reply_to=message)
            )
        results.append(strategy.aggregate_train(1, answers)[0])
    assert results[0]["w"].data == results[1]["w"].data


def test_an_average_is_weighted_and_keeps_the_type() -> None:
    assert torch.equal(average([(1, torch.tensor([2.0])), (3, torch.tensor([6.0]))], torch.float32), torch.tensor([5.0]))
    rounded = average([(1, torch.tensor(2)), (3, torch.tensor(5))], torch.int64)
    assert (rounded.dtype, int(rounded)) == (torch.int64, 4)  # 4.25


# --- a whole federation of a network with batch norm ---

BATCH_NORM = {
    "model": "resnet20_4",
    "data": "digits",
    "clients": {"count": 2},
    "rounds": 2,
    "training": {"learning_rate": 0.01, "batch_size": 4, "steps": 2, "mode": "train", "buffers": "shared"},
}


def test_shared_statistics_are_the_mean_of_the_clients_statistics(federate: Any) -> None:
    run = federate(**BATCH_NORM)
    recording, truth, data = Recording(run.out / "recording"), TruthReader(run.out / "truth"), run.load_data()
    model = models.build(run.make_model_spec(), data.spec)
    names = models.list_buffers(model)
    first = list(recording.read_observations(rounds={1}))
    for o in first:
        assert set(o.buffers) == set(o.buffers_after) == set(names)
        assert not set(names) & set(o.update)
        batches = [data.train[list(step)] for step in truth.read_used(1, 1, o.client).steps]
        oracle = train(model, o.weights, batches, run.experiment.training, data.spec, buffers=o.buffers)
        for name in names:
            assert torch.equal(o.buffers_after[name], oracle.buffers[name])
        for name, tensor in oracle.update.items():
            assert torch.equal(o.update[name], tensor)
    second = next(recording.read_observations(rounds={2}))
    for name in names:
        mean = average([(o.num_examples or 0, o.buffers_after[name]) for o in first], o.buffers_after[name].dtype)
        assert torch.equal(second.buffers[name], mean)
    tracked = next(name for name in names if name.endswith("num_batches_tracked"))
    assert int(second.buffers[tracked]) == 2


def test_local_statistics_are_kept_by_the_client_and_not_sent(federate: Any) -> None:
    training = {**BATCH_NORM["training"], "buffers": "local"}
    run = federate(**{**BATCH_NORM, "training": training})
    recording, truth, data = Recording(run.out / "recording"), TruthReader(run.out / "truth"), run.load_data()
    model = models.build(run.make_model_spec(), data.spec)
    assert recording.list_clients()
    for client in recording.list_clients():
        buffers: dict[str, torch.Tensor] = {}
        for o in recording.read_observations(clients={client}):
            assert not o.buffers
            assert not o.buffers_after
            batches = [data.train[list(step)] for step in truth.read_used(o.round, 1, client).steps]
            oracle = train(model, o.weights, batches, run.experiment.training, data.spec, buffers=buffers)
            buffers = oracle.buffers
            for name, tensor in oracle.update.items():
                assert torch.equal(o.update[name], tensor)
        assert buffers
