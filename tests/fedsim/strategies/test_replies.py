"""Tests of clients that fail, are late or have no valid name: a row has the reason, and the round continues without them."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message
from tiny_experiments import Federate

from fedsim.engine import engines as engine
from fedsim.engine.run import FederationRun
from fedsim.recording import Recording
from fedsim.recording.files import read_json_lines
from fedsim.server.outcome import find_failures
from fedsim.truth import TruthReader

Answer = Callable[[Message, Any], Message]


def check_mean_of_the_others(run: FederationRun, round: int) -> None:
    """Check that the next weights are the mean over the clients that answered, which all have equal numbers of examples."""
    recording = Recording(run.out / "recording")
    answered = list(recording.read_observations(rounds={round}))
    after = next(recording.read_observations(rounds={round + 1})).weights
    for name, before in answered[0].weights.items():
        mean = before + torch.stack([o.update[name] for o in answered]).mean(dim=0)
        assert torch.allclose(mean, after[name], rtol=0, atol=1e-6)
        assert not torch.equal(before, after[name])


def test_a_client_that_raises_is_recorded_as_failed_and_the_round_continues(federate: Federate, clients: Any) -> None:
    def between(app: Answer, message: Message, context: Any, round: int) -> Message:
        if round == 2 and context.node_config["partition-id"] == 1:
            raise MemoryError("3 GB too little")
        return app(message, context)

    clients(between)
    run = federate(rounds=3)
    rows = Recording(run.out / "recording").read_rows()
    assert [(r.round, r.status) for r in rows if r.status != "complete"] == [(2, "failed")]
    (failed,) = [r for r in rows if r.status == "failed"]
    assert failed.reason == "MemoryError: 3 GB too little"
    assert (failed.file, failed.num_examples) == (None, None)
    assert failed.client in {r.client for r in rows if r.round == 1}  # its pseudonym is known from the round before
    assert {o.cohort for o in Recording(run.out / "recording").read_observations()} == {tuple(sorted({r.client for r in rows}))}
    check_mean_of_the_others(run, 2)
    metrics = read_json_lines(run.out / "metrics.jsonl")
    assert [(row["clients"], row["missing"]) for row in metrics[1:]] == [(3, 0), (2, 1), (3, 0)]


def test_a_client_that_never_sent_a_pseudonym_is_known_by_its_node(federate: Federate, clients: Any) -> None:
    def between(app: Answer, message: Message, context: Any, round: int) -> Message:
        if round == 1 and context.node_config["partition-id"] == 0:
            raise RuntimeError("not yet")
        reply = app(message, context)
        if context.node_config["partition-id"] == 2:
            del reply.content["client"]
        return reply

    clients(between)
    rows = Recording(federate(rounds=2).out / "recording").read_rows()
    first = {r.client: r for r in rows if r.round == 1}
    (failed,) = [r for r in first.values() if r.status == "failed"]
    assert failed.client == failed.node
    nameless = [r for r in rows if r.status == "complete" and r.client == r.node]
    assert [r.round for r in nameless] == [1, 2]
    (later,) = [r for r in rows if r.round == 2 and r.node == failed.node]
    assert later.client != later.node


def test_a_failed_client_repeats_the_steps_of_the_failed_round(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client failed after training; in the next round it uses the same examples again."""
    from fedsim.client import app as client_side

    real, calls = client_side.put_update, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("cannot")
        return real(*args, **kwargs)

    monkeypatch.setattr(client_side, "put_update", failing)
    run = federate(rounds=3, clients={"count": 1})
    assert [r.status for r in Recording(run.out / "recording").read_rows()] == ["complete", "failed", "complete"]
    truth = TruthReader(run.out / "truth")
    client = Recording(run.out / "recording").read_rows()[0].client
    one, two, three = (truth.read_used(number, 1, client).steps for number in (1, 2, 3))
    assert one != two
    assert two == three


def test_a_client_that_does_not_answer_is_recorded_as_late(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(engine.LocalGrid):
        """A grid that drops the reply of one client in the second round."""

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            sent = list(messages)
            replies = list(super().send_and_receive(sent, timeout=timeout))
            second = [m for m in sent if int(m.content["config"]["server-round"]) == 2]
            return [r for r in replies if not second or r.metadata.src_node_id != max(self.get_node_ids())]

    monkeypatch.setattr(engine, "LocalGrid", Slow)
    run = federate(rounds=3)
    rows = Recording(run.out / "recording").read_rows()
    (late,) = [r for r in rows if r.status != "complete"]
    assert (late.round, late.status, late.reason, late.file) == (2, "late", "no answer in time", None)
    assert late.client in {r.client for r in rows if r.round == 1 and r.node == late.node}
    assert len({r.client for r in rows}) == 3
    check_mean_of_the_others(run, 2)
    assert find_failures(run.out) == f"1 reply is missing; fedsim show {run.out} lists the rounds"


def test_a_round_in_which_nobody_answers_keeps_the_weights(federate: Federate, clients: Any) -> None:
    def between(app: Answer, message: Message, context: Any, round: int) -> Message:
        if round == 1:
            raise RuntimeError("not yet")
        return app(message, context)

    clients(between)
    run = federate(rounds=2)
    recording = Recording(run.out / "recording")
    assert [r.status for r in recording.read_rows()] == ["failed"] * 3 + ["complete"] * 3
    assert all(torch.equal(recording.read_sent(1).weights[name], w) for name, w in recording.read_sent(2).weights.items())
    metrics = read_json_lines(run.out / "metrics.jsonl")
    assert metrics[0]["loss"] == metrics[1]["loss"]


def name_clients(clients: Any, partitions: Collection[int], name: str) -> None:
    """Make the clients of these partitions send this pseudonym."""

    def between(app: Answer, message: Message, context: Any, round: int) -> Message:
        reply = app(message, context)
        if context.node_config["partition-id"] in partitions:
            reply.content["client"] = ConfigRecord({"pseudonym": name})
        return reply

    clients(between)


@pytest.mark.parametrize("name", ["../../../outside", "global", ".", "a/b", "x" * 200])
def test_an_invalid_pseudonym_is_replaced_by_the_node_id(name: str, federate: Federate, clients: Any) -> None:
    name_clients(clients, {1}, name)
    run = federate(rounds=2)
    recording = Recording(run.out / "recording")
    assert len(list(recording.read_observations())) == 6
    assert sum(r.client == r.node for r in recording.read_rows()) == 2
    assert {path.name for path in run.out.parent.iterdir()} == {"run"}


def test_two_clients_with_one_pseudonym_get_different_names(federate: Federate, clients: Any) -> None:
    """Two clients share a pseudonym if a private folder is copied, which must not end the federation."""
    name_clients(clients, {0, 2}, "same")
    recording = Recording(federate(rounds=2).out / "recording")
    for number in (1, 2):
        rows = recording.read_rows(rounds={number})
        assert len({r.client for r in rows}) == len({r.node for r in rows}) == 3
        assert sum(r.client == "same" for r in rows) == 1
        assert sum(r.client == r.node for r in rows) == 1
        seen = list(recording.read_observations(rounds={number}))
        assert {o.cohort for o in seen} == {tuple(sorted(r.client for r in rows))}
        assert len(seen) == 3
