"""Test of replies for lost clients: the SuperLink answers in its own name, and the server finds the client by the message."""

from collections.abc import Iterable

import pytest
from flwr.app import Error, Message
from tiny_experiments import Federate

from fedsim.engine import engines as engine
from fedsim.recording import Recording


def test_lost_clients_have_one_row_each_under_their_own_names(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink, gone = 1, 2

    class Leaving(engine.LocalGrid):
        """A grid in which the last two clients are unavailable from the second round on."""

        rounds = 0

        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            self.rounds += 1
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if self.rounds < 2:
                return replies
            lost = sorted(replies, key=lambda reply: reply.metadata.src_node_id)[-gone:]
            for reply in lost:
                reply.metadata.__dict__["_src_node_id"] = superlink
                reply.__dict__["_error"], reply.__dict__["_content"] = Error(code=5, reason="the node is gone"), None
            return replies

    monkeypatch.setattr(engine, "LocalGrid", Leaving)
    run = federate(rounds=2)
    rows = Recording(run.out / "recording").read_rows()
    first, second = ([row for row in rows if row.round == number] for number in (1, 2))
    assert [(row.client, row.node) for row in first] == [(row.client, row.node) for row in second]
    assert sorted(row.status for row in second) == ["complete", "failed", "failed"]
    assert {row.reason for row in second if row.status == "failed"} == {"the node is gone"}
    assert str(superlink) not in {row.node for row in rows}
