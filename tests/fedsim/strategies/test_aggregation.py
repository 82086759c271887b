"""Tests of aggregation and recorded updates against independently computed means and gradients."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import strategy as flower
from tiny_experiments import Federate, make_tiny
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim import data as datasets
from fedsim import models
from fedsim.engine import engines as engine
from fedsim.engine.apps import make_client_app
from fedsim.engine.run import FederationRun
from fedsim.flower import records
from fedsim.recording import Observation, Recording
from fedsim.strategies import names as strategies
from fedsim.truth import TruthReader


def group_by_round(run: FederationRun) -> dict[int, list[Observation]]:
    seen: dict[int, list[Observation]] = {}
    for observation in Recording(run.out / "recording").read_observations():
        seen.setdefault(observation.round, []).append(observation)
    return seen


def compute_gradient(o: Observation, indices: tuple[int, ...]) -> dict[str, Tensor]:
    """Compute the gradient at the weights that the server sent, on the given examples of the data set."""
    data = datasets.load("digits")
    model = models.build(o.model, o.data)
    model.load_state_dict(dict(o.weights))
    x, y = data.train[np.array(indices)]
    cross_entropy(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_fedavg_is_the_mean_of_the_clients_weights_by_their_examples(federate: Federate) -> None:
    run = federate(
        rounds=4,
        partition={"name": "dirichlet", "alpha": 0.3},
        training={"learning_rate": 0.2, "batch_size": 64, "epochs": 1, "momentum": 0.5},
    )
    rounds = group_by_round(run)
    for number in (1, 2, 3):
        sizes = [o.num_examples or 0 for o in rounds[number]]
        assert len(set(sizes)) > 1
        for name, before in rounds[number][0].weights.items():
            local = [before.double() + o.update[name].double() for o in rounds[number]]
            weighted = sum(n * w for n, w in zip(sizes, local, strict=True)) / sum(sizes)
            after = rounds[number + 1][0].weights[name].double()
            assert torch.allclose(weighted, after, rtol=0, atol=1e-6)
            assert not torch.allclose(sum(local) / 3, after, rtol=0, atol=1e-4)  # an unweighted mean would differ


def test_the_first_round_starts_from_the_public_seed(federate: Federate) -> None:
    run = federate(rounds=1, seed=17)
    initial = models.build(run.make_model_spec(), run.load_data().spec, seed=17)
    (first, *_) = group_by_round(run)[1]
    assert all(torch.equal(p, first.weights[name]) for name, p in initial.named_parameters())


def test_an_update_of_one_step_is_minus_learning_rate_times_the_gradient_of_the_examples_in_truth(federate: Federate) -> None:
    run = federate(rounds=3, training={"learning_rate": 0.05, "batch_size": 3, "steps": 1})
    truth = TruthReader(run.out / "truth")
    for observations in group_by_round(run).values():
        assert len(observations) == 3
        for o in observations:
            (indices,) = truth.read_used(o.round, 1, o.client).steps
            assert o.num_examples == len(indices) == 3
            for name, g in compute_gradient(o, indices).items():
                assert torch.equal(o.update[name], -0.05 * g)
                assert g.abs().max() > 1e-4


def test_two_epochs_use_every_example_of_a_client_twice_and_no_others(federate: Federate) -> None:
    run = federate(rounds=1, clients={"count": 5}, training={"learning_rate": 0.1, "batch_size": 100, "epochs": 2})
    truth, size, everyones = TruthReader(run.out / "truth"), len(run.load_data().train), []
    for o in group_by_round(run)[1]:
        steps = truth.read_used(1, 1, o.client).steps
        assert o.num_examples is not None
        assert tuple(map(len, steps)) == o.training.count_step_examples(o.num_examples)
        flat = [index for step in steps for index in step]
        first, second = flat[: o.num_examples], flat[o.num_examples :]
        assert sorted(first) == sorted(second)
        assert first != second  # a new order
        assert len(set(first)) == o.num_examples
        everyones += first
    assert sorted(everyones) == list(range(size))


def test_steps_of_later_rounds_continue_the_epoch(federate: Federate) -> None:
    run = federate(rounds=4, clients={"count": 7}, training={"learning_rate": 0.1, "batch_size": 70, "steps": 1})
    truth = TruthReader(run.out / "truth")
    for client in {o.client for o in group_by_round(run)[1]}:
        used = [truth.read_used(number, 1, client).steps[0] for number in (1, 2, 3, 4)]
        assert [len(step) for step in used[:2]] == [70, 70]
        epoch = [index for step in used[:3] for index in step]
        assert len(set(epoch)) == len(epoch) in (205, 206)
        assert set(used[3]) <= set(epoch)


# --- recording does not change the strategy ---


def run_unrecorded(run: FederationRun, strategy: type, **arguments: Any) -> list[dict[str, Tensor]]:
    """Return the weights after each round of Flower's own strategy without recording; clients answer with weights.

    Replies are sorted by pseudonym, since floating-point sums depend on the order, and weights stay float32.
    """

    class Plain(strategy):
        def aggregate_train(self, server_round: int, replies: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
            ordered = sorted(replies, key=lambda reply: str(reply.content["client"]["pseudonym"]))
            arrays, metrics = super().aggregate_train(server_round, ordered)
            weights = {name: t.float() for name, t in records.to_tensors(arrays).items()}
            after.append(weights)
            return records.to_arrays(weights), metrics

    app = make_client_app(lambda _: run)

    def answer(message: Message, context: Any) -> Message:
        sent = records.to_tensors(message.content["arrays"])
        reply = app(message, context)
        update = records.take_payload(reply.content).tensors
        reply.content["arrays"] = records.to_arrays({name: sent[name] + update[name] for name in sent})
        return reply

    after: list[dict[str, Tensor]] = []
    initial = models.build(run.make_model_spec(), run.load_data().spec, seed=run.experiment.seed)
    Plain(fraction_evaluate=0.0, **arguments).start(
        engine.LocalGrid(answer, run.experiment.clients.count),
        records.to_arrays(dict(initial.named_parameters())),
        num_rounds=run.experiment.rounds,
        train_config=ConfigRecord({"attempt": 1}),
    )
    return after


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("FedAvg", {}), ("FedAdam", {"eta": 0.05, "tau": 0.01}), ("FedAvgM", {"server_momentum": 0.9}), ("FedMedian", {})],
)
def test_a_recorded_strategy_trains_bit_for_bit_as_without_recording(
    name: str, arguments: dict[str, float], federate: Federate, tmp_path: Path
) -> None:
    changes = {
        "rounds": 4,
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "training": {"learning_rate": 0.2, "batch_size": 50, "epochs": 1},
        "defense": "gaussian(0.01)",
    }
    recorded = group_by_round(federate(strategy={"name": name, **arguments}, **changes))
    same_clients = FederationRun(experiment=make_tiny(**changes), out=tmp_path / "alone", device="cpu", client_seed=5)
    alone = run_unrecorded(same_clients, getattr(flower, name), **arguments)
    for number in (2, 3, 4):
        for key, weights in recorded[number][0].weights.items():
            assert torch.equal(weights, alone[number - 2][key]), f"round {number}, {key}"


@pytest.mark.parametrize("name", strategies.STRATEGY_NAMES)
def test_every_strategy_runs_and_keeps_the_type_of_the_weights(name: str, federate: Federate) -> None:
    rounds = group_by_round(federate(rounds=3, clients={"count": 4}, strategy=name))
    assert [len(rounds[number]) for number in (1, 2, 3)] == [4, 4, 4]
    first, last = rounds[1][0].weights, rounds[3][0].weights
    assert {t.dtype for t in last.values()} == {torch.float32}
    assert all(t.isfinite().all() for t in last.values())
    assert any(not torch.equal(first[key], last[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("FedProx", {}, "unknown name 'FedProx'. Known: FedAdagrad, FedAdam, FedAvg"),
        ("FedAvg", {"etta": 1}, "strategy FedAvg: .*'etta'"),
        ("FedAvg", {"fraction_train": 0.1}, r"strategy\.fraction_train follows from clients\.count and clients\.fraction"),
    ],
)
def test_unknown_strategies_and_arguments_are_refused(name: str, arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategies.build(name, clients=3, fraction=1.0, **arguments)
