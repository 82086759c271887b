"""Tests of recordings of third-party apps: updates, buffers, failures, and settings that are refused before the start."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.server import strategy as older
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor

from fedsim.client import update_mod
from fedsim.engine import engines as engine
from fedsim.recording import ModelSpec, Observation, Training

TRAINING = Training(learning_rate=0.05, batch_size=1, steps=1)
CLIPPED: dict[str, Callable[[], Strategy]] = {
    "fixed": lambda: flower.DifferentialPrivacyServerSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 1e-3, 3),
    "adaptive": lambda: flower.DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(fraction_evaluate=0.0), 0.0, 3, initial_clipping_norm=1e-3
    ),
}


def norm(update: Any) -> float:
    return float(torch.cat([u.flatten() for u in update.values()]).norm())


def compute_gradient(app: Any, observation: Observation, client: int) -> dict[str, Tensor]:
    """Compute the gradient of cross-entropy at the client's example and the weights that it was sent."""
    model = app.task.Net()
    model.load_state_dict(dict(observation.weights))
    x, y = app.example(client)
    torch.nn.functional.cross_entropy(model(x * 2 - 1), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_returned_weights_are_recorded_bit_for_bit(app: Any) -> None:
    app.run(app.record())
    seen = app.observations()
    assert [o.round for o in seen] == [1, 1, 1, 2, 2, 2]
    for o in seen:
        assert (o.payload.codec, o.num_examples, len(o.cohort), o.buffers, o.buffers_after) == ("weights", 1, 3, {}, {})
        _, after = app.matched(o)
        for name, tensor in after.items():
            torch.testing.assert_close(o.payload.tensors[name], tensor, rtol=0, atol=0)
    assert {app.matched(o)[0] for o in seen if o.round == 1} == {0, 1, 2}
    assert len({o.client for o in seen}) == 3


def test_an_update_derived_from_weights_is_the_clients_step_within_its_rounding(app: Any) -> None:
    """One step of SGD is -lr * gradient. The client rounds weight plus step, and `rounding` bounds the error of that."""
    app.run(app.record(), rounds=1)
    lost = []
    for o in app.observations():
        step = {name: -0.05 * g.double() for name, g in compute_gradient(app, o, app.matched(o)[0]).items()}
        assert set(o.rounding) == set(o.update) == set(step)
        for name, change in step.items():
            error = (o.update[name].double() - change).abs()
            product = 2e-7 * change.abs()  # rounding of rate * gradient in float32
            assert (error <= o.rounding[name].double() + product).all(), name
            lost.append((error / o.rounding[name].double())[change.abs() > 1e-12])
    assert torch.cat(lost).max() > 0.5  # the bound is not too wide


def test_with_the_mod_the_update_is_recorded_as_the_client_subtracted_it(app: Any) -> None:
    app.run(app.record(), mods=[update_mod()])
    seen = app.observations()
    assert len(seen) == 6
    for o in seen:
        assert (o.payload.codec, o.rounding) == ("dense", {})
        _, after = app.matched(o)
        for name, tensor in after.items():
            torch.testing.assert_close(o.update[name], tensor - o.weights[name], rtol=0, atol=0)


@pytest.mark.parametrize("mods", [(), (update_mod(),)], ids=["weights", "mod"])
@pytest.mark.parametrize("name", CLIPPED)
def test_updates_are_recorded_before_the_server_clips_them(app: Any, name: str, mods: Any) -> None:
    strategy = CLIPPED[name]()
    result = app.run(app.record(strategy), rounds=1, mods=mods)
    seen = app.observations()
    for o in seen:
        _, after = app.matched(o)
        true = {key: tensor - o.weights[key] for key, tensor in after.items()}
        assert norm(true) > 0.02
        assert norm(o.update) == pytest.approx(norm(true), rel=1e-5)
    start = seen[0].weights
    moved = norm({key: torch.from_numpy(array.numpy()) - start[key] for key, array in result.arrays.items()})
    assert 0 < moved < 1.01e-3  # the server did clip


def test_a_strategy_that_sends_float64_is_recorded_as_clients_load_it(app: Any) -> None:
    """Flower's FedAdam sends float64 weights, which clients round to float32 before training."""
    for mods in ((), (update_mod(),)):
        result = app.run(app.record(flower.FedAdam(eta=0.01, fraction_evaluate=0.0)), mods=mods)
        assert {array.dtype for array in result.arrays.values()} == {"float64"}
        for o in app.observations(rounds=[2]):
            assert {w.dtype for w in o.weights.values()} == {torch.float32}
            _, after = app.matched(o)
            for name, tensor in after.items():
                torch.testing.assert_close(o.update[name], tensor - o.weights[name], rtol=0, atol=0)
        app.folder = app.folder.with_name("again")


@pytest.mark.parametrize("mods", [(), (update_mod("clip(1)"),)], ids=["weights", "mod"])
def test_batch_norm_statistics_are_kept_apart_and_counters_stay_whole_numbers(app: Any, mods: Any) -> None:
    app.run(app.record(net="NormedNet"), net="NormedNet", mods=mods, rounds=1)
    for o in app.observations():
        assert set(o.buffers) == {
            f"bn{i}.{part}" for i in (1, 2) for part in ("running_mean", "running_var", "num_batches_tracked")
        }
        assert set(o.weights) == set(o.update) == set(dict(app.task.NormedNet().named_parameters()))
        _, after = app.matched(o, net="NormedNet")
        assert int(o.buffers["bn1.num_batches_tracked"]) == 0
        for name, tensor in o.buffers_after.items():
            torch.testing.assert_close(tensor, after[name], rtol=0, atol=0)
        assert (o.buffers_after["bn1.num_batches_tracked"].dtype, int(o.buffers_after["bn1.num_batches_tracked"])) == (
            torch.int64,
            1,
        )


@pytest.mark.parametrize("mods", [(), (update_mod("clip(1)"),)], ids=["weights", "mod"])
def test_counters_that_flower_averages_are_recorded_in_every_round(app: Any, mods: Any) -> None:
    """From the second round on, Flower sends counters as float64, and clients return integers."""
    app.run(app.record(net="NormedNet"), net="NormedNet", mods=mods, rounds=3)
    assert [(row.round, row.status) for row in app.recording.read_rows()] == [
        (n, "complete") for n in (1, 2, 3) for _ in range(3)
    ]
    for o in app.observations():
        assert {int(b["bn1.num_batches_tracked"]) for b in (o.buffers,)} == {o.round - 1}
        assert o.buffers_after["bn1.num_batches_tracked"].dtype == torch.int64


def test_with_the_mod_the_inner_strategy_gets_names_in_the_order_that_was_sent(app: Any) -> None:
    """Flower's clipping matches tensors by position, so that another order would compare different tensors."""
    orders = []

    class Looking(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            orders.extend(list(message.content["arrays"]) for message in replies)
            return super().aggregate_train(server_round, replies)

    app.run(app.record(Looking(fraction_evaluate=0.0), net="NormedNet"), net="NormedNet", mods=[update_mod()], rounds=1)
    assert orders == [list(app.task.NormedNet().state_dict())] * 3


def fail_on_one_client(message: Message, context: Any, call_next: Any) -> Message:
    """Mod with which training fails on the client of partition 1."""
    if context.node_config["partition-id"] == 1 and message.metadata.message_type == "train":
        raise RuntimeError("out of memory")
    answer: Message = call_next(message, context)
    return answer


def test_a_client_that_fails_is_a_failed_row_and_the_others_are_averaged(app: Any) -> None:
    alone = app.run(FedAvg(), mods=[fail_on_one_client])
    recorded = app.run(app.record(FedAvg()), mods=[fail_on_one_client])
    assert {k: a.numpy().tobytes() for k, a in recorded.arrays.items()} == {
        k: a.numpy().tobytes() for k, a in alone.arrays.items()
    }
    rows = app.recording.read_rows()
    assert sorted(row.status for row in rows) == ["complete"] * 4 + ["failed"] * 2
    assert all("out of memory" in row.reason for row in rows if row.status == "failed")


def test_a_client_that_does_not_answer_in_time_is_a_late_row(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing(engine.LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            return list(super().send_and_receive(messages, timeout=timeout))[1:]

    monkeypatch.setattr(engine, "LocalGrid", Losing)
    app.run(app.record(), rounds=1)
    rows = app.recording.read_rows()
    assert sorted(row.status for row in rows) == ["complete", "complete", "late"]
    assert len({row.client for row in rows}) == 3


def test_only_the_chosen_rounds_and_clients_are_recorded(app: Any) -> None:
    app.run(app.record(rounds="2-3", clients="1"), rounds=3)
    rows = app.recording.read_rows()
    assert [row.round for row in rows] == [2, 3]
    assert len({row.client for row in rows}) == 1
    assert app.recording.list_rounds() == [2, 3]


def test_the_manifest_has_model_defense_data_and_software(app: Any) -> None:
    app.run(app.record(defense="clip(1)"), mods=[update_mod("clip(1)")], rounds=1)
    manifest = app.recording.manifest
    assert (manifest.name, manifest.model, str(manifest.defense)) == ("theirs", ModelSpec(name="task:Net"), "clip(1)")
    assert manifest.data.mean == (0.5, 0.5, 0.5)
    assert manifest.software["flwr"].startswith("1.")


def test_record_logs_its_folder_and_assumptions_at_the_start(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the absolute path, since an app may run in another folder, and the assumptions about training."""
    with caplog.at_level(logging.INFO, logger="flwr"):
        training = Training(learning_rate=0.05, batch_size=32, steps=2, momentum=0.9, mode="eval", augmentation="random crop")
        app.record(net="NormedNet", training=training)
    logged = [message for record in caplog.records if (message := record.getMessage()).startswith("fedleak")]
    assert logged[0] == f"fedleak: will record in {app.folder.absolute()}"
    assert "at most 64 (2 steps of 32), fewer where a client reports fewer; where it reports none" in logged[1]
    assert logged[2].endswith("SGD with learning rate 0.05, momentum 0.9, the network in mode 'eval'")
    assert "random crop" in logged[3]
    assert "if clients call net.train(), set mode='train'" in logged[4]


def test_the_proximal_term_of_several_steps_is_named_as_not_simulated(app: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In the first step the gradient of the term is zero."""
    with caplog.at_level(logging.INFO, logger="flwr"):
        for strategy, steps in ((flower.FedProx(proximal_mu=0.5), 1), (flower.FedProx(proximal_mu=0.0), 2), (FedAvg(), 2)):
            app.record(strategy, training=replace(TRAINING, steps=steps))
        assert not [record for record in caplog.records if "term of FedProx" in record.getMessage()]
        for strategy in (flower.FedProx(proximal_mu=0.5), older.FedProx(proximal_mu=0.5)):
            app.record(strategy, training=replace(TRAINING, steps=2))
    messages = [message for record in caplog.records if "term of FedProx" in (message := record.getMessage())]
    assert ["(proximal_mu=0.5)" in message for message in messages] == [True, True]
