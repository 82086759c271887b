"""Tests of a federation in one process: reproducibility, metrics, messages without private data, and defenses."""

import json
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from tiny_experiments import Federate, make_tiny

from defenses import DEFENSES, Defense
from defenses.channel import transparent
from defenses.spec import Kind
from fedsim import models
from fedsim.client.identity import ClientIdentity
from fedsim.engine import engines as engine
from fedsim.engine.apps import make_client_app, make_server_app
from fedsim.engine.engines import EngineError
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines
from fedsim.training import local as training
from fedsim.truth import TruthReader


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of recorded messages, of truth and of clients' folders, by file."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for part in ("recording/rounds", "truth", "clients")
        for path in sorted((folder / part).rglob("*"))
        if path.is_file()
    }


def test_the_same_client_seed_gives_the_same_recording_bit_for_bit(federate: Federate) -> None:
    changes = {"rounds": 3, "defense": "clip(1) | gaussian(0.1)", "clients": {"count": 4, "fraction": 0.5}}
    one, two = federate("one", **changes), federate("two", **changes)
    assert contents(one.out) == contents(two.out)
    assert len([name for name in contents(one.out) if name.startswith("recording")]) == 3 * (2 + 1)

    def rows(run: FederationRun) -> list[dict[str, Any]]:
        return [{**vars(row), "received_at": 0} for row in Recording(run.out / "recording").read_rows()]

    assert rows(one) == rows(two)


def test_results_do_not_depend_on_the_order_of_replies(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floating-point sums depend on their order, and on Ray the client that is ready first answers first."""
    changes = {"clients": {"count": 6}, "training": {"learning_rate": 0.3, "batch_size": 64, "epochs": 1}, "rounds": 3}

    class Backwards(engine.LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            return list(super().send_and_receive(messages, timeout=timeout))[::-1]

    one = federate("one", **changes)
    monkeypatch.setattr(engine, "LocalGrid", Backwards)
    assert contents(one.out) == contents(federate("two", **changes).out)


@pytest.mark.parametrize("other", [6, None])
def test_another_client_seed_or_none_gives_other_clients(federate: Federate, other: int | None) -> None:
    one, two = federate("one", rounds=1), federate("two", rounds=1, client_seed=other)
    names = [{row.client for row in Recording(run.out / "recording").read_rows()} for run in (one, two)]
    assert not names[0] & names[1]
    truths = [sorted(p.read_text() for p in (run.out / "truth").glob("*.jsonl")) for run in (one, two)]
    assert truths[0] != truths[1]


def test_metrics_have_a_row_for_each_round_with_the_evaluation_of_its_result(federate: Federate) -> None:
    reported: list[dict[str, Any]] = []
    run = federate(rounds=3, on_round=reported.append)
    rows = read_json_lines(run.out / "metrics.jsonl")
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert reported == rows
    recording, data = Recording(run.out / "recording"), run.load_data()
    model = models.build(run.make_model_spec(), data.spec)
    x, y = data.test[:]
    for number in (1, 2, 3):
        weights = next(recording.read_observations(rounds={number})).weights
        found = training.evaluate(model, weights, x, y, data.spec, run.experiment.training)  # the result of the previous round
        assert rows[number - 1]["loss"] == pytest.approx(found["loss"], rel=1e-6)
        assert rows[number - 1]["accuracy"] == pytest.approx(found["accuracy"])
        own = recording.read_rows(rounds={number})
        assert rows[number]["bytes_up"] == sum(row.bytes for row in own)
        assert rows[number]["bytes_up"] > 3 * 4 * sum(w.numel() for w in weights.values())
        assert (rows[number]["clients"], rows[number]["missing"]) == (3, 0)
        assert rows[number]["seconds"] > 0
    assert len({row["loss"] for row in rows}) == 4


def test_a_model_that_diverges_is_recorded_and_does_not_end_the_run(federate: Federate) -> None:
    run = federate(rounds=3, training={"learning_rate": 1e38, "batch_size": 4, "steps": 2})
    rows = read_json_lines(run.out / "metrics.jsonl")
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert rows[0]["loss"] is not None
    assert rows[-1]["loss"] is None
    assert len(list(Recording(run.out / "recording").read_observations())) == 9


def test_only_the_rounds_that_are_asked_for_are_recorded(federate: Federate) -> None:
    run = federate(rounds=4, record={"rounds": "2,4"})
    assert [row.round for row in Recording(run.out / "recording").read_rows()] == [2, 2, 2, 4, 4, 4]
    assert sorted(path.name for path in (run.out / "recording" / "rounds").iterdir()) == ["00002", "00004"]
    assert len(read_json_lines(run.out / "metrics.jsonl")) == 5


def test_a_fraction_of_the_clients_is_drawn_from_the_public_seed(federate: Federate) -> None:
    def cohorts(name: str, seed: int) -> list[tuple[str, ...]]:
        run = federate(name, seed=seed, rounds=6, clients={"count": 5, "fraction": 0.4})
        seen = list(Recording(run.out / "recording").read_observations())
        assert all(len(o.cohort) == 2 and o.client in o.cohort for o in seen)
        assert len(seen) == 12
        return [o.cohort for o in seen]

    assert cohorts("a", 0) == cohorts("b", 0)
    assert cohorts("c", 1) != cohorts("a2", 0)
    assert len(set(cohorts("d", 0))) > 1


def test_the_manifest_has_the_servers_settings_and_no_seed(federate: Federate) -> None:
    run = federate(seed=1234567, client_seed=7654321, defense="clip(2)", rounds=1)
    manifest = Recording(run.out / "recording").manifest
    assert (manifest.name, manifest.model, manifest.data) == ("run", run.make_model_spec(), run.load_data().spec)
    assert (manifest.training, str(manifest.defense)) == (run.experiment.state_mode().training, "clip(2)")
    assert set(manifest.software) == {"flwr", "torch", "numpy"}
    text = (run.out / "recording" / "manifest.json").read_text()
    assert "1234567" not in text
    paths = {path for path, content in contents(run.out).items() if b"7654321" in content}
    assert [str(path) for path in paths] == ["clients/simulation.json"]  # needed for resuming; other users cannot read it
    assert "7654321" not in (run.out / "experiment.toml").read_text()


# --- messages ---


def record_messages(
    federate: Federate, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[FederationRun, list[Message], list[Message]]:
    down: list[Message] = []
    up: list[Message] = []

    class Spy(engine.LocalGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            sent = list(messages)
            down.extend(sent)
            replies = list(super().send_and_receive(sent, timeout=timeout))
            up.extend(Message(r.content.copy(), metadata=r.metadata) for r in replies)
            return replies

    monkeypatch.setattr(engine, "LocalGrid", Spy)
    return federate(**changes), down, up


def test_messages_and_recordings_contain_no_partition_label_or_secret(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages have exactly these keys in both directions, so that a new key needs a change of this test."""
    run, down, up = record_messages(federate, monkeypatch, defense="gaussian(0.1)")
    assert len(down) == len(up) == 6
    parameters = {name for name, _ in models.build(run.make_model_spec(), run.load_data().spec).named_parameters()}
    for message in down:
        assert set(message.content) == {"arrays", "config"}
        assert set(message.content["config"]) == {"server-round", "attempt"}
        assert set(message.content["arrays"]) == parameters
    for message in up:
        assert set(message.content) == {"payload", "codec", "metrics", "client"}
        assert set(message.content["payload"]) == parameters
        assert dict(message.content["codec"]) == {"name": "dense"}
        assert set(message.content["metrics"]) == {
            "num-examples"
        }  # the loss of one example would reveal the probability of its label
        assert set(message.content["client"]) == {"pseudonym"}
    identities = [ClientIdentity(**json.loads(path.read_text())) for path in (run.out / "clients").rglob("identity.json")]
    assert {message.content["client"]["pseudonym"] for message in up} == {i.pseudonym for i in identities}
    assert len({i.secret for i in identities}) == 3
    written = b"".join(path.read_bytes() for path in (run.out / "recording").rglob("*") if path.is_file())
    sent = (repr([(m.metadata, m.content) for m in (*down, *up)]) + repr(Recording(run.out / "recording").read_rows())).encode()
    for words in ("partition", "truth", "indices", "label", *(i.secret for i in identities)):
        assert words.encode() not in written, words
        assert words.encode() not in sent, words


def test_the_folders_of_a_run_are_closed_to_other_users(federate: Federate) -> None:
    run = federate(rounds=1)
    for folder in ("", "clients", "clients/partition-00000", "truth", "recording", "recording/rounds"):
        assert stat.S_IMODE((run.out / folder).stat().st_mode) == 0o700, folder
    for path in run.out.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# --- defenses on the client ---


def exact(run: FederationRun, client: str, number: int) -> dict[str, torch.Tensor]:
    """Compute the update that a client would send without a defense, from the examples listed in truth."""
    recording = Recording(run.out / "recording")
    weights, data = recording.read_sent(number).weights, run.load_data()
    batches = [data.train[list(step)] for step in TruthReader(run.out / "truth").read_used(number, 1, client).steps]
    model = models.build(run.make_model_spec(), data.spec)
    return training.train(model, weights, batches, run.experiment.training, data.spec).update


def test_the_noise_is_the_clients_own_fresh_in_every_round_and_follows_the_clipping(federate: Federate) -> None:
    run = federate(rounds=2, defense="clip(0.01) | gaussian(0.25)")
    identities = {i.pseudonym: i for i in (ClientIdentity(**json.loads(p.read_text())) for p in run.out.rglob("identity.json"))}
    seen = []
    for o in Recording(run.out / "recording").read_observations():
        update, rng = exact(run, o.client, o.round), identities[o.client].make_generator(o.round)
        norm = torch.cat([t.flatten() for t in update.values()]).norm()
        assert norm > 0.01
        for name in sorted(update):
            noise = 0.25 * torch.randn(update[name].shape, generator=rng)
            assert torch.allclose(o.update[name], update[name] * (0.01 / norm) + noise, atol=1e-6)
        seen.append(noise.numpy().tobytes())
    assert len(set(seen)) == 6


def test_each_client_keeps_its_own_defense_state_from_round_to_round(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the toy defense is the update of the previous round, which it sends."""
    late = Defense(
        init=lambda template: {name: torch.zeros_like(t) for name, t in template.items()},
        apply=lambda update, state, rng: (dict(state), dict(update)),
    )
    monkeypatch.setitem(DEFENSES._builtin, "late", Kind(lambda: late, lambda: transparent))
    run = federate(rounds=3, defense="clip(1e9) | late()")
    observations = list(Recording(run.out / "recording").read_observations())
    assert {o.round for o in observations} == {1, 2, 3}
    for o in observations:
        expected = exact(run, o.client, o.round - 1) if o.round > 1 else None
        for name, t in o.update.items():
            assert torch.equal(t, torch.zeros_like(t) if expected is None else expected[name])


# --- refusals ---


@pytest.mark.parametrize(("connected", "advice"), [(2, "start the others and run again"), (4, "make them equal")])
def test_a_wrong_number_of_nodes_fails_at_once_with_advice(
    connected: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.server.attendance.CONNECT_SECONDS", 0.0)
    run = FederationRun(experiment=make_tiny(), out=tmp_path / "run", device="cpu")
    began = time.monotonic()
    with pytest.raises(EngineError, match=rf'{connected} nodes .* clients\.count = 3; {advice} .*"num-supernodes=3"'):
        engine.run_local(make_server_app(lambda _: run), make_client_app(lambda _: run), connected)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("resources", "gpus", "words"),
    [
        ({"client_cpus": 1000}, 0, r"at most \d+, the CPUs of this machine, got 1000"),
        ({"client_cpus": 0}, 0, "must be above 0 .* got 0"),
        ({"client_cpus": 0}, 1, "must be above 0 .* got 0"),
        ({"client_gpus": 3}, 2, "from 0 to 2, the GPUs of this machine, got 3"),
        ({"client_gpus": -1}, 1, "from 0 to 1, .* got -1"),
    ],
)
def test_resources_that_no_client_can_have_are_refused_before_anything_starts(
    resources: dict[str, float], gpus: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(engine, "run_ray", lambda *_, **__: pytest.fail("Ray was started"))
    with pytest.raises(EngineError, match=words):
        engine.run(FederationRun(experiment=make_tiny(), out=tmp_path / "run", device="cpu"), engine="ray", **resources)
    assert not (tmp_path / "run").exists()


def test_gpus_are_shared_by_the_clients_that_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 16)
    assert engine._make_resources(1, None) == {"num_cpus": 1, "num_gpus": 0.125}
    assert engine._make_resources(4, None) == {"num_cpus": 4, "num_gpus": 0.5}
    assert engine._make_resources(4, 1) == {"num_cpus": 4, "num_gpus": 1}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert engine._make_resources(1, None) == {"num_cpus": 1, "num_gpus": 0}
