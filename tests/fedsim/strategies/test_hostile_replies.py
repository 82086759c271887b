"""Tests of malicious replies: each is recorded as failed with a reason, and the federation continues with the others."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from tiny_experiments import Federate

from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.server.outcome import check_end


@pytest.fixture
def hostile(federate: Federate, clients: Any) -> Callable[..., FederationRun]:
    """A function that runs a federation in which `spoil` changes the reply of one client in round 2."""

    def go(spoil: Callable[[Message], None], **changes: Any) -> FederationRun:
        def between(app: Any, message: Message, context: Any, round: int) -> Message:
            reply = app(message, context)
            if round == 2 and context.node_config["partition-id"] == 1:
                spoil(reply)
            return reply

        clients(between)
        return federate(**{"rounds": 3, **changes})

    return go


def count(value: float) -> Callable[[Message], None]:
    return lambda reply: reply.content["metrics"].__setitem__("num-examples", value)


def change_first(change: Callable[[Array], Array]) -> Callable[[Message], None]:
    def spoil(reply: Message) -> None:
        payload = reply.content["payload"]
        name = next(iter(payload))
        payload[name] = change(payload[name])

    return spoil


def make_claim(values: int) -> Callable[[Array], Array]:
    """Return a change of an array to a header that announces `values` numbers, without data."""

    def change(array: Array) -> Array:
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({values},), }}\n".encode()
        return Array(array.dtype, array.shape, array.stype, b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)

    return change


def data(content: bytes) -> Callable[[Array], Array]:
    return lambda array: Array(array.dtype, array.shape, array.stype, content)


SPOILED: dict[str, Callable[[Message], None]] = {
    "minus one example": count(-1),
    "no example": count(0),
    "half an example": count(2.5),
    "2**60 examples": count(2**60),
    "infinitely many": count(float("inf")),
    "not a number of them": count(float("nan")),
    "complex numbers": change_first(lambda array: Array(array.numpy().astype(np.complex64))),
    "whole numbers": change_first(lambda array: Array(array.numpy().astype(np.int64))),
    "truth values": change_first(lambda array: Array(array.numpy() > 0)),
    "no data": change_first(data(b"")),
    "an archive": change_first(data(b"PK\x03\x04 and more")),
    "a pickle": change_first(data(b"\x80\x04cposix\nsystem\n")),
    "a terabyte announced": change_first(make_claim(2**40)),
    "another kind of array": change_first(lambda array: Array(array.dtype, array.shape, "torch.tensor", array.data)),
    "no metrics": lambda reply: reply.content.__delitem__("metrics"),
    "a config in place of metrics": lambda reply: reply.content.__setitem__("metrics", ConfigRecord({"num-examples": 4})),
    "no payload": lambda reply: reply.content.__delitem__("payload"),
    "a name is missing": lambda reply: reply.content["payload"].popitem(),
    "a shape broadcasts": change_first(lambda array: Array(array.numpy()[:1])),
    "no number of examples": lambda reply: reply.content["metrics"].__delitem__("num-examples"),
    "unknown codec": lambda reply: reply.content.__setitem__("codec", ConfigRecord({"name": "zip"})),
    "a buffer that nobody asked for": lambda reply: reply.content.__setitem__(
        "buffers", ArrayRecord({"x": Array(np.float32([1]))})
    ),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_malformed_reply_is_recorded_as_failed_and_left_out_of_the_mean(spoil: Any, hostile: Any) -> None:
    recording = Recording(hostile(spoil).out / "recording")
    (failed,) = [row for row in recording.read_rows() if row.status != "complete"]
    assert (failed.round, failed.status, failed.file) == (2, "failed", None)
    assert failed.reason.startswith("malformed reply: ")
    seen = list(recording.read_observations())
    assert len(seen) == 8
    second, third = (recording.read_sent(number).weights for number in (2, 3))
    answered = [o.update for o in seen if o.round == 2]
    for name, before in second.items():
        mean = before + torch.stack([update[name] for update in answered]).mean(dim=0)
        assert torch.allclose(mean, third[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        (
            "no number of examples",
            "the client's reply lacks the metric 'num-examples', its number of examples; the client's app must",
        ),
        ("no metrics", "the client's reply needs a MetricRecord called 'metrics', and it has none"),
        ("a config in place of metrics", "the client's reply needs a MetricRecord called 'metrics', got ConfigRecord"),
        ("no payload", "the client's reply needs an ArrayRecord called 'payload', and it has none"),
    ],
)
def test_what_a_malformed_reply_lacks_and_whose_it_is_are_named(spoiled: str, words: str, hostile: Any) -> None:
    run = hostile(SPOILED[spoiled])
    (failed,) = [row for row in Recording(run.out / "recording").read_rows() if row.status == "failed"]
    warnings: list[str] = []
    check_end(run.out, warnings.append)
    assert len(warnings) == 1
    assert warnings[0].startswith(
        f"1 of 9 replies are missing, the first, of client {failed.client} in round 2: malformed reply: {words}"
    )


def test_additional_metrics_and_records_do_not_end_the_federation(hostile: Any) -> None:
    """Flower's own strategies fail if replies have different keys."""

    def spoil(reply: Message) -> None:
        reply.content["metrics"]["mine"] = 3.5
        reply.content["metrics"]["odd"] = float("nan")
        reply.content["more"] = MetricRecord({"x": 1})
        reply.content["arrays2"] = ArrayRecord({"x": Array(np.float32([1]))})

    recording = Recording(hostile(spoil).out / "recording")
    assert len(list(recording.read_observations())) == 9
    assert [str(row.metrics) for row in recording.read_rows() if row.metrics] == ["{'mine': 3.5, 'odd': nan}"]


def test_megabytes_of_metrics_leave_the_index_readable(hostile: Any) -> None:
    def spoil(reply: Message) -> None:
        for number in range(3000):
            reply.content["metrics"][f"{number:05d}" + "x" * 3000] = 1.0

    recording = Recording(hostile(spoil).out / "recording")
    (row,) = [row for row in recording.read_rows() if row.metrics]
    assert len(row.metrics) == 100
    assert len(list(recording.read_observations())) == 9


def test_an_update_in_half_precision_leaves_the_weights_in_float32(hostile: Any) -> None:
    def spoil(reply: Message) -> None:
        payload = reply.content["payload"]
        for name in payload:
            payload[name] = Array(payload[name].numpy().astype(np.float16))

    recording = Recording(hostile(spoil, clients={"count": 2}).out / "recording")
    seen = recording.read_observations(rounds={2})
    halves = [o for o in seen if next(iter(o.payload.tensors.values())).dtype == torch.float16]
    assert len(halves) == 1
    assert {w.dtype for w in recording.read_sent(3).weights.values()} == {torch.float32}


def test_a_full_disk_of_a_client_stops_the_run_which_can_be_resumed(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsim.client import app as client_side

    plain = Recording(federate("plain", rounds=3).out / "recording")
    real, calls = client_side.TruthWriter.write, []

    def full(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(client_side.TruthWriter, "write", full)
        with pytest.raises(engine.EngineError, match=r"the disk of the client on node .* is full; complete rounds are kept"):
            federate("run", rounds=3)
    out = plain.folder.parent.parent / "run"
    assert {row.status for row in Recording(out / "recording").read_rows()} == {"complete"}
    assert len(Recording(out / "recording").read_rows()) == 3
    run = FederationRun(experiment=_read(out), out=out, device="cpu", resume=True)
    engine.run(run.settle(), engine="local")
    updates = [
        {o.key: o.update["1.weight"].numpy().tobytes() for o in r.read_observations()}
        for r in (plain, Recording(out / "recording"))
    ]
    assert updates[0] == updates[1]


def _read(out: Any) -> Any:
    from fedsim.config.experiment import read

    return read(out / "experiment.toml")


# --- names ---


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, federate: Federate, clients: Any) -> Callable[..., Recording]:
    """A function that runs a federation whose clients send the names that `name_of` returns, and returns its recording.

    late: the position of a node whose reply of round 2 is dropped.
    """

    def go(name_of: Callable[[int, list[int]], str | None], late: int | None = None) -> Recording:
        class Grid(engine.LocalGrid):
            def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
                sent = list(messages)
                replies = list(super().send_and_receive(sent, timeout=timeout))
                second = int(sent[0].content["config"]["server-round"]) == 2
                lost = list(self.get_node_ids())[late] if late is not None and second else None
                return [reply for reply in replies if reply.metadata.src_node_id != lost]

        def between(app: Any, message: Message, context: Any, round: int) -> Message:
            reply = app(message, context)
            name = name_of(int(context.node_config["partition-id"]), list(engine.LocalGrid(app, 3).get_node_ids()))
            if name is None:
                del reply.content["client"]
            else:
                reply.content["client"] = ConfigRecord({"pseudonym": name})
            return reply

        clients(between)
        monkeypatch.setattr(engine, "LocalGrid", Grid)
        return Recording(federate(rounds=3).out / "recording")

    return go


def test_two_clients_with_one_name_are_recorded_even_if_one_is_late(named: Any) -> None:
    recording = named(lambda partition, nodes: "same", late=1)
    assert len(recording.read_rows()) == 9
    assert [row.status for row in recording.read_rows(rounds={2})].count("late") == 1


def test_a_client_cannot_use_the_node_id_of_another_as_its_name(named: Any) -> None:
    def name_of(partition: int, nodes: list[int]) -> str | None:
        return str(nodes[1]) if partition == 0 else None

    recording = named(name_of)
    assert len(recording.read_rows()) == 9
    assert all(row.client == row.node for row in recording.read_rows())


def test_failed_clients_do_not_count_towards_the_number_of_recorded_clients(hostile: Any) -> None:
    recording = Recording(hostile(count(0), record={"clients": 2}, clients={"count": 3}).out / "recording")
    complete = [row.client for row in recording.read_rows() if row.status == "complete"]
    assert len(set(complete)) == 2
    assert len(complete) >= 5
