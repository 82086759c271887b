"""Tests of federations with packed updates: recordings, byte counts and weights agree with those of unpacked updates."""

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from tiny_experiments import Federate

from defenses import DefenseSpec
from fedsim.commands import maintenance as upkeep
from fedsim.config.experiment import read
from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.flower import records
from fedsim.recording import DataSpec, Manifest, Recording, Training
from fedsim.recording.codec import encode
from fedsim.recording.files import read_json_lines
from fedsim.server import record

MODEL = {"model": {"name": "mlp", "hidden": [32]}}
DEFENSES = {
    "top_k(0.05)": "sparse",
    "top_k(0.05) | qsgd(levels=1, norm='linf')": "sparse",
    "sign('mean', error_feedback=True)": "bits",
    "qsgd(levels=3)": "levels",
    "uniform(4)": "levels",
}


def read_bytes_of_updates(run: FederationRun) -> dict[str, bytes]:
    """Return the bytes of the updates and weights of all observations."""
    found = {}
    for o in Recording(run.out / "recording").read_observations():
        found |= {
            f"{o.key}/{kind}/{n}": t.numpy().tobytes() for kind in ("update", "weights") for n, t in getattr(o, kind).items()
        }
    return found


def federate_unpacked(monkeypatch: pytest.MonkeyPatch, federate: Federate, name: str = "dense", **changes: Any) -> FederationRun:
    """Run the same federation without packing."""
    with monkeypatch.context() as patched:
        patched.setattr(DefenseSpec, "choose_codec", lambda spec: "dense")
        return federate(name, **changes)


@pytest.mark.parametrize("defense", DEFENSES)
def test_packed_updates_are_recorded_and_aggregated_bit_for_bit(
    defense: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {**MODEL, "rounds": 3, "defense": defense}
    packed, plain = federate("packed", **changes), federate_unpacked(monkeypatch, federate, **changes)
    assert read_bytes_of_updates(packed) == read_bytes_of_updates(plain)
    for run, codec in ((packed, DEFENSES[defense]), (plain, "dense")):
        recording = Recording(run.out / "recording")
        assert {row.codec for row in recording.read_rows()} == {recording.manifest.codec} == {codec}
        found = upkeep.verify(run.out)
        assert (found.intact, found.damaged, found.unexpected) == (9, (), ())
    sizes = [sum(row.bytes for row in Recording(run.out / "recording").read_rows()) for run in (packed, plain)]
    assert sizes[0] < 0.5 * sizes[1]


def test_the_mask_of_sent_coordinates_is_read_from_a_recording(federate: Federate) -> None:
    run = federate(**MODEL, defense="top_k(0.05)")
    for o in Recording(run.out / "recording").read_observations():
        assert {name: (mask.dtype, mask.shape) for name, mask in o.sent.items()} == {
            name: (torch.bool, t.shape) for name, t in o.weights.items()
        }
        assert all(torch.equal(mask, o.update[name] != 0) for name, mask in o.sent.items())
        assert o.sent["1.weight"].sum() == ceil(0.05 * o.weights["1.weight"].numel())
    assert next(Recording(federate("plain", **MODEL).out / "recording").read_observations()).sent == {}


def test_a_federation_with_packed_updates_can_be_resumed(federate: Federate) -> None:
    changes = {**MODEL, "rounds": 3, "defense": "sign('mean', error_feedback=True)"}
    whole = federate("whole", **changes)

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise RuntimeError("stopped")

    with pytest.raises(engine.EngineError, match="stopped"):
        federate("halves", on_round=stop, **changes)
    out = whole.out.parent / "halves"
    run = FederationRun(experiment=read(out / "experiment.toml"), out=out, device="cpu", resume=True).settle()
    engine.run(run, engine="local")
    assert read_bytes_of_updates(run) == read_bytes_of_updates(whole)
    kept = [
        [{key: value for key, value in row.items() if key != "seconds"} for row in read_json_lines(folder / "metrics.jsonl")]
        for folder in (out, whole.out)
    ]
    assert kept[0] == kept[1]


def test_a_recorded_strategy_accepts_a_defense_that_packs(tmp_path: Any) -> None:
    from flwr.serverapp.strategy import FedAvg

    facts = {"model": "mlp", "training": Training(learning_rate=0.1, batch_size=1, steps=1)}
    strategy = record(FedAvg(), tmp_path, data=DataSpec(shape=(2,), num_classes=2), defense="qsgd(3) | clip(1)", **facts)
    assert strategy is not None
    assert DefenseSpec.parse("qsgd(3) | clip(1)").choose_codec() == "levels"


# --- bytes ---


def test_metrics_have_the_bytes_of_every_client(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed bytes, as Flower counts them, are listed by client; a client that did not answer has sent none."""
    seen: list[tuple[int, dict[int, int], dict[int, int]]] = []

    class Counting(engine.LocalGrid):
        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
            sent = list(messages)
            number = int(sent[0].content["config"]["server-round"])
            down = {m.metadata.dst_node_id: sum(r.count_bytes() for r in m.content.values()) for m in sent}
            replies = list(super().send_and_receive(sent, timeout=timeout))
            replies = [r for r in replies if number != 2 or r.metadata.src_node_id != max(self.get_node_ids())]
            up = {m.metadata.src_node_id: sum(r.count_bytes() for r in m.content.values()) for m in replies}
            seen.append((number, down, up))
            return replies

    monkeypatch.setattr(engine, "LocalGrid", Counting)
    run = federate(**MODEL, rounds=3, defense="top_k(0.05) | qsgd(levels=1)")
    rows = {row["round"]: row for row in read_json_lines(run.out / "metrics.jsonl")}
    assert "bytes" not in rows[0]
    for number, down, up in seen:
        index = {row.client: row for row in Recording(run.out / "recording").read_rows(rounds={number})}
        counted = rows[number]["bytes"]
        assert counted == {client: {"up": up.get(int(row.node), 0), "down": down[int(row.node)]} for client, row in index.items()}
        assert {client: row.bytes for client, row in index.items()} == {client: one["up"] for client, one in counted.items()}
        assert sum(one["up"] for one in counted.values()) == rows[number]["bytes_up"]
        assert sum(one["down"] for one in counted.values()) == rows[number]["bytes_down"]
        assert sum(one["up"] == 0 for one in counted.values()) == (number == 2)


# --- malformed replies ---


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch, federate: Federate) -> Callable[..., Recording]:
    """A function that runs a federation in which `spoil` changes one client's reply of round 2; it returns the recording."""

    def go(spoil: Callable[[Message], None], **changes: Any) -> Recording:
        real = engine.make_client_app

        def wrapped(run_of: Any) -> Any:
            app = real(run_of)

            def answer(message: Message, context: Any) -> Message:
                reply = app(message, context)
                if int(message.content["config"]["server-round"]) == 2 and context.node_config["partition-id"] == 1:
                    spoil(reply)
                return reply

            return answer

        monkeypatch.setattr(engine, "make_client_app", wrapped)
        return Recording(federate(**{**MODEL, "rounds": 3, **changes}).out / "recording")

    return go


def make_repacking(codec: str) -> Callable[[Message], None]:
    """Return a change of a reply that sends the same update by another codec than the agreed one."""

    def spoil(reply: Message) -> None:
        payload = records.take_payload(reply.content)
        assert payload.codec == "dense"
        records.put_payload(reply.content, encode(payload.tensors, codec))

    return spoil


@pytest.mark.parametrize("codec", ["sparse", "bits", "levels"])
def test_a_reply_by_another_codec_than_the_agreed_one_is_accepted(codec: str, spoiled: Any, federate: Federate) -> None:
    recording = spoiled(make_repacking(codec), defense="clip(0.1)")
    assert sorted(row.codec for row in recording.read_rows()) == sorted(["dense"] * 8 + [codec])
    assert recording.manifest.codec == "dense"


def part(name: str, values: Any) -> Callable[[Message], None]:
    """Return a change of a reply that replaces a part of a packed weight by `values`, or removes it."""

    def spoil(reply: Message) -> None:
        payload = reply.content["payload"]
        assert isinstance(payload, ArrayRecord)
        if values is None:
            del payload[name]
        else:
            payload[name] = Array(values)

    return spoil


def claim(codec: str) -> Callable[[Message], None]:
    return lambda reply: reply.content.__setitem__("codec", ConfigRecord({"name": codec}))


SPOILED: dict[str, tuple[str, Callable[[Message], None]]] = {
    "another codec is named": ("qsgd(levels=2, norm='linf')", claim("sparse")),
    "an unknown codec": ("qsgd(levels=2, norm='linf')", claim("zip")),
    "dense is named": ("qsgd(levels=2, norm='linf')", claim("dense")),
    "whole weights are named": ("qsgd(levels=2, norm='linf')", claim("weights")),
    "codes too high": ("qsgd(levels=2, norm='linf')", part("1.weight/codes", np.full(3 * 256, 255, np.uint8))),
    "few codes": ("qsgd(levels=2, norm='linf')", part("1.weight/codes", np.zeros(3 * 256 - 1, np.uint8))),
    "no codes": ("qsgd(levels=2, norm='linf')", part("1.weight/codes", None)),
    "no palette": ("qsgd(levels=2, norm='linf')", part("1.weight/palette", None)),
    "a whole palette": ("qsgd(levels=2, norm='linf')", part("1.weight/palette", np.arange(5))),
    "a palette of words": ("qsgd(levels=2, norm='linf')", part("1.weight/palette", np.array(["a", "b"]))),
    "a weight that is none": ("sign()", part("x/dense", np.zeros(3, np.float32))),
    "a name that is no part": ("sign()", part("x", np.zeros(3, np.float32))),
    "many values": ("top_k(0.05)", part("1.weight/values", np.zeros(10**6, np.float32))),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_packed_reply_that_cannot_be_read_is_a_failed_row(name: str, spoiled: Any) -> None:
    defense, spoil = SPOILED[name]
    recording = spoiled(spoil, defense=defense)
    (failed,) = [row for row in recording.read_rows() if row.status != "complete"]
    assert (failed.round, failed.status, failed.file) == (2, "failed", None)
    assert failed.reason.startswith("malformed reply: ")
    assert len(list(recording.read_observations())) == 8


def test_the_manifest_names_the_codec(manifest: Manifest, federate: Federate) -> None:
    assert Recording(federate(**MODEL, rounds=1, defense="sign()").out / "recording").manifest.codec == "bits"
    assert manifest.codec == "dense"
