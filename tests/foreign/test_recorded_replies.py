"""Tests of recordings of replies with other names, without metrics, or with further records, as third-party clients send them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_replies import rewrite
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedsim.recording import Training


def test_records_of_a_reply_may_have_any_name(app: Any, tmp_path: Path) -> None:
    def rename(content: RecordDict) -> None:
        content["net"], content["figures"] = content.pop("arrays"), content.pop("metrics")
        content["figures"]["num-examples"] = 0.5  # a weight and no number of examples

    app.run(app.record(), mods=[rewrite(rename)], rounds=1)
    for o in app.observations():
        assert (o.num_examples, o.metrics["num-examples"]) == (None, 0.5)
        assert o.payload.codec == "weights"


class KeepFirst(FedAvg):
    """A strategy that takes over the first client's weights, whatever else its reply holds."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return next(iter(replies)).content["arrays"], None


def drop_metrics(content: RecordDict) -> None:
    del content["metrics"]


def add_metrics(content: RecordDict) -> None:
    content["timing"] = MetricRecord({"seconds": 2.0})


def add_arrays(content: RecordDict) -> None:
    content["control"] = ArrayRecord({name: Array(array.numpy() * 0) for name, array in content["arrays"].items()})


def add_arrays_under_other_names(content: RecordDict) -> None:
    add_arrays(content)
    content["net"] = content.array_records["control"]
    del content["arrays"]


@pytest.mark.parametrize(
    ("change", "count", "metrics"),
    [(drop_metrics, None, set()), (add_metrics, 1, {"train_loss", "seconds"}), (add_arrays, 1, {"train_loss"})],
)
def test_replies_without_metrics_or_with_further_records_are_recorded(
    app: Any, change: Callable[[RecordDict], None], count: int | None, metrics: set[str]
) -> None:
    app.run(app.record(KeepFirst(fraction_evaluate=0.0)), mods=[rewrite(change)], rounds=1)
    seen = app.observations()
    assert [(o.num_examples, set(o.metrics)) for o in seen] == [(count, metrics)] * 3
    for o in seen:
        _, after = app.matched(o)
        assert all(torch.equal(o.payload.tensors[name], tensor) for name, tensor in after.items())


def keep_statistics(content: RecordDict) -> None:
    kept = {name: array for name, array in content["arrays"].items() if "running" not in name and "num_batches" not in name}
    content["arrays"] = ArrayRecord(kept)


def test_clients_may_keep_the_statistics_of_batch_norm_that_the_server_sends(app: Any) -> None:
    app.run(app.record(net="NormedNet"), net="NormedNet", mods=[rewrite(keep_statistics)], rounds=1)
    assert {row.status for row in app.recording.read_rows()} == {"complete"}
    for o in app.observations():
        assert o.buffers
        assert not o.buffers_after
        _, after = app.matched(o, net="NormedNet")
        assert all(torch.equal(tensor, after[name]) for name, tensor in o.payload.tensors.items())


def keep_weights_of_body(content: RecordDict) -> None:
    *body, _, _ = content["arrays"].items()
    content["arrays"] = ArrayRecord(dict(body))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_arrays, "cannot record part of the reply of client {}: besides the weights, it has the arrays control"),
        (
            add_arrays_under_other_names,
            "cannot record the reply of client {}: malformed reply: the client's reply has the array records 'control', 'net'; "
            "send the weights in one record, or beside others under the strategy's arrayrecord_key, 'arrays'",
        ),
        (
            keep_weights_of_body,
            "cannot record the reply of client {}: malformed reply: tensor 'fc3.bias': the client returned no such tensor, "
            "but the weights that it was sent have shape (10,) with floating-point values; if clients return only a part of "
            "the weights on purpose, let the server send only this part, and name a function whose network holds the other "
            "weights as buffers that are not saved (docs/tutorials/flower-app.md shows one)",
        ),
    ],
)
def test_what_is_not_recorded_of_replies_is_logged_once(
    app: Any, change: Callable[[RecordDict], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Stay(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            return None, None

    with caplog.at_level(logging.WARNING, logger="flwr"):
        app.run(app.record(Stay(fraction_evaluate=0.0)), mods=[rewrite(change)])
    logged = [message for record in caplog.records if "cannot record" in (message := record.getMessage())]
    assert logged == [f"fedleak: {words.format(app.recording.read_rows()[0].node)}"]


def test_a_reported_number_of_examples_is_limited_by_the_prescribed_steps(app: Any) -> None:
    """The client takes one step on one example and reports 20 examples."""

    def report_all(content: RecordDict) -> None:
        content["metrics"]["num-examples"] = 20

    app.run(app.record(), mods=[rewrite(report_all)], rounds=1)
    assert {(row.num_examples, row.reported) for row in app.recording.read_rows()} == {(1, 20)}
    assert {o.num_examples for o in app.observations()} == {1}


def test_a_server_can_state_the_number_of_examples(app: Any) -> None:
    app.run(app.record(training=Training(learning_rate=0.05, batch_size=1, epochs=1, examples=1)), rounds=1)
    assert {o.num_examples for o in app.observations()} == {1}
