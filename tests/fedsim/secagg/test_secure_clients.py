"""Tests of clients under secure aggregation: deleted keys, malformed messages, repeated exchanges, and resumed servers."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from failing_grid import Failing
from secure_runs import make_secure, recorded, weights_after
from tiny_experiments import Federate

from fedsim.commands.maintenance import verify
from fedsim.engine import engines as engine
from fedsim.engine.apps import make_client_app, make_server_app
from fedsim.engine.engines import EngineError
from fedsim.engine.run import FederationRun
from fedsim.flower import records
from fedsim.recording import Recording
from fedsim.secagg import messages
from fedsim.secagg.cohorts import Cohorts
from fedsim.secagg.protocol.aggregator import RoundLost


def test_keys_are_deleted_after_a_round(federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[Failing] = []

    class Kept(Failing):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)
            grids.append(self)

    monkeypatch.setattr(engine, "LocalGrid", Kept)
    run = federate()
    for context in grids[0]._contexts.values():
        left = {key: value for key, value in context.state["secagg"].items() if isinstance(value, bytes | list)}
        assert set(left) > {"mask_key", "share_key", "seed"}
        assert not any(left.values())
        assert set(context.state) == {"secagg"}
    files = [path for path in (run.out / "clients").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if b"secagg" in path.read_bytes()]


def tamper_with(monkeypatch: pytest.MonkeyPatch, stage: str, change: Callable[[Any, int], None], *, answers: bool) -> None:
    """Make `change` modify the message to, or the answer of, partition 2 in round 1 at the given exchange."""

    class Between(Failing):
        def _one(self, message: Any) -> Any:
            ours = stage == (messages.read_stage(message.content) or "")
            ours &= (
                list(self._contexts).index(message.metadata.dst_node_id) == 2
                and records.read_number(message, "server-round") == 1
            )
            if ours and not answers:
                change(message.content, 0)
            answer = super()._one(message)
            if ours and answers and answer is not None and answer.has_content():
                change(answer.content, 0)
            return answer

    monkeypatch.setattr(engine, "LocalGrid", Between)


def empty(content: Any, _: int) -> None:
    for key in list(content):
        if key != "config":
            del content[key]


def strange(content: Any, _: int) -> None:
    for record in content.config_records.values():
        for key in list(record):
            if key not in ("stage", "server-round", "attempt"):
                record[key] = ["", "x"]
    for record in content.array_records.values():
        for key in list(record):
            record[key] = records.pack(np.zeros(2, np.int64))


@pytest.mark.parametrize("stage", ["setup", "share", "collect", "unmask"])
def test_no_exchange_is_answered_twice(stage: str, federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second vector under the same keys would reveal the difference of two updates."""
    again: list[Any] = []

    class Twice(Failing):
        def send_and_receive(self, messages_: Any, *, timeout: float | None = None) -> Any:
            asked = list(messages_)
            answers = list(super().send_and_receive(asked, timeout=timeout))
            if messages.read_stage(asked[0].content) == stage:
                again.extend(super().send_and_receive(asked, timeout=timeout))
            return answers

    monkeypatch.setattr(engine, "LocalGrid", Twice)
    run = federate(rounds=1)
    assert [answer.has_error() for answer in again] == [True] * 5
    assert all(
        "has begun already" in a.error.reason or "exchanges are answered once each, in order" in a.error.reason for a in again
    )
    assert len(next(recorded(run).read_observations()).cohort) == 5
    trained = [path.read_text().splitlines() for path in (run.out / "truth").glob("*.jsonl")]
    assert [len(lines) for lines in trained] == [1] * 5  # no client trained twice


def small_order(content: Any, _: int) -> None:
    content["secagg"]["mask-key"] = bytes(32)


def one_key(content: Any, _: int) -> None:
    content["secagg"]["mask-key"] = content["secagg"]["share-key"]


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        *((stage, change, "") for stage in ("setup", "share", "collect", "unmask") for change in (empty, strange)),
        ("setup", small_order, "small order"),
        ("setup", one_key, "sent the same public key for masks and for shares"),
    ],
)
def test_a_malformed_answer_or_an_invalid_public_key_affects_only_its_client(
    stage: str, change: Callable[[Any, int], None], words: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper_with(monkeypatch, stage, change, answers=True)
    run = federate(rounds=1)
    (found,) = recorded(run).read_observations()
    assert len(found.cohort) == (5 if stage == "unmask" else 4)
    (reason,) = [row.reason for row in recorded(run).read_rows() if row.reason]
    assert reason.startswith(f"exchange '{stage}': malformed reply: ")
    assert words in reason


@pytest.mark.parametrize("stage", ["setup", "share", "unmask"])
def test_a_malformed_message_excludes_only_its_client(stage: str, federate: Federate, monkeypatch: pytest.MonkeyPatch) -> None:
    tamper_with(monkeypatch, stage, strange if stage != "setup" else empty, answers=False)
    run = federate(rounds=1)
    (found,) = recorded(run).read_observations()
    assert len(found.cohort) == (5 if stage == "unmask" else 4)


def test_a_client_does_not_send_its_update_in_clear(tmp_path: Path) -> None:
    """A server without secure aggregation is refused by clients with it, and the other way round."""

    def run_of(name: str, secure: bool) -> FederationRun:
        return FederationRun(experiment=make_secure(secure_aggregation=secure), out=tmp_path / name, device="cpu", client_seed=5)

    for secure, words in ((False, "the server does not use secure"), (True, "the server uses secure aggregation")):
        server, clients = run_of(f"server {secure}", secure), run_of(f"clients {secure}", not secure)
        with pytest.raises(EngineError, match="no client ever answered"):
            engine.run_local(make_server_app(lambda _, run=server: run), make_client_app(lambda _, run=clients: run), 5)
        rows = recorded(server).read_rows(rounds={1})
        assert {row.status for row in rows} == {"failed"}
        assert any(words in row.reason for row in rows)
        assert not list((clients.out / "truth").glob("*.jsonl"))  # nobody trained


def test_a_client_seed_repeats_all_but_the_masks(federate: Federate) -> None:
    one, two = federate("one"), federate("two")
    contents = [
        {path.name: path.read_bytes() for path in sorted((run.out / "recording" / "rounds").rglob("*.safetensors"))}
        for run in (one, two)
    ]
    assert contents[0].keys() == contents[1].keys()
    different = {name for name, content in contents[0].items() if content != contents[1][name]}
    masked = {row.client for row in recorded(one).read_rows() if row.status == "masked"}
    assert {name.removesuffix(".safetensors") for name in different} == masked, "all but the masks repeats"
    before, after = weights_after(one), weights_after(two)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("changed", ["nothing", "the data"])
def test_two_runs_with_one_client_seed_have_no_mask_in_common(
    changed: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same masks, the difference of a client's two vectors would be that of its updates, in clear."""
    one = federate("one", rounds=1)
    if changed == "the data":  # the experiment's text is the same
        data = FederationRun.load_data

        def inverted(run: FederationRun) -> Any:
            found = data(run)
            return replace(found, train=replace(found.train, values=found.train.values[::-1].copy()))

        monkeypatch.setattr(FederationRun, "load_data", inverted)
    two = federate("two", rounds=1)
    for mine, other in zip(*(recorded(run).read_rows(rounds={1}) for run in (one, two)), strict=True):
        assert mine.client == other.client
        if mine.status == "masked":
            ours, theirs = recorded(one).read_masked(mine), recorded(two).read_masked(other)
            assert ours.mask_key != theirs.mask_key
            assert ours.share_key != theirs.share_key
            assert ours.words is not None
            assert theirs.words is not None
            assert float((ours.words == theirs.words).float().mean()) < 0.01


def stop_in_round_2(
    stage: str, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], lost: Mapping[tuple[int, str], list[int]] = {}
) -> None:
    """Run a federation whose server stops after this stage of round 2. lost: replies that fail, as in `Failing.fails`."""

    class Stops(Failing):
        fails: ClassVar[Any] = lost

        def send_and_receive(self, messages_: Any, *, timeout: float | None = None) -> Any:
            answers = list(super().send_and_receive(messages_, timeout=timeout))
            if self.seen[-1][0] == stage and records.read_number(self.seen[-1][2], "server-round") == 2:
                raise RuntimeError("the server stops")
            return answers

    with monkeypatch.context() as patch:
        patch.setattr(engine, "LocalGrid", Stops)
        with pytest.raises(engine.EngineError, match="the server stops"):
            run()


@pytest.mark.parametrize("stage", ["setup", "share", "collect", "unmask"])
def test_a_server_that_stops_in_a_round_resumes_with_new_keys(
    stage: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights equal those of an uninterrupted run bit for bit, since masks cancel exactly."""
    changes = {"rounds": 3, "defense": "clip(0.5) | gaussian(0.01)"}
    reference = federate("reference", **changes)

    stop_in_round_2(stage, monkeypatch, lambda: federate("run", **changes))
    run = federate("run", **changes, resume=True)
    before, after = weights_after(reference), weights_after(run)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    rows = recorded(run).read_rows(rounds={2})
    assert {row.attempt for row in rows} == {2}
    ours, theirs = (recorded(r).read_masked(recorded(r).read_rows(rounds={2})[0]) for r in (run, reference))
    assert ours.mask_key != theirs.mask_key
    assert ours.words is not None
    assert theirs.words is not None
    assert float((ours.words == theirs.words).float().mean()) < 0.01
    assert verify(run.out).damaged == ()


@pytest.mark.parametrize("stage", ["collect", "unmask"])
@pytest.mark.parametrize("missing", ["none", "one less", "one more"])
def test_a_repeated_round_is_summed_over_the_same_clients_or_not_at_all(
    stage: str, missing: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops when it can know the sum. A second sum without one client would reveal that client's update."""

    class Again(Failing):
        fails: ClassVar[Any] = {(2, "collect"): [1]} if missing == "one less" else {}

    lost = {(2, "setup"): [3]} if missing == "one more" else {}
    stop_in_round_2(stage, monkeypatch, lambda: federate("run", rounds=3), lost)
    monkeypatch.setattr(engine, "LocalGrid", Again)
    run = federate("run", rounds=3, resume=True)
    sums = {found.round: found for found in recorded(run).read_observations()}
    rows = [row for row in recorded(run).read_rows(rounds={2}) if row.client != "sum"]
    assert len(sums[3].cohort) == 5, "the federation goes on"
    if stage == "collect":  # no client was asked to unmask, so that no first sum is known
        assert len(sums[2].cohort) == (4 if missing == "one less" else 5)
    elif missing == "one less":
        assert 2 not in sums
        assert all("the round is lost" in row.reason or "told to fail" in row.reason for row in rows)
    else:
        assert len(sums[2].cohort) == (4 if missing == "one more" else 5)
        assert sum("was not in its sum before" in row.reason for row in rows) == (missing == "one more")


def test_the_stored_members_of_a_sum_are_respected_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    cohorts = Cohorts(tmp_path / "cohort.json")
    cohorts.store(2, ["a", "b"])
    again = Cohorts(tmp_path / "cohort.json")
    assert (again.is_admitted(2, "a"), again.is_admitted(2, "c"), again.is_admitted(3, "c")) == (True, False, True)
    with pytest.raises(RoundLost, match="round 2 may have been summed before with 1 more"):
        again.store(2, ["a"])
    again.store(2, ["b", "a"])
    for content in ("{}", '{"round": Infinity, "members": []}', "[" * 100_000):
        (tmp_path / "cohort.json").write_text(content)
        with pytest.raises(ValueError, match=r"cohort\.json cannot be read"):
            Cohorts(tmp_path / "cohort.json")
    (tmp_path / "cohort.json").unlink()
    os.mkfifo(tmp_path / "cohort.json")
    with pytest.raises(ValueError, match=r"cohort\.json cannot be read"):
        Cohorts(tmp_path / "cohort.json")


def test_an_update_with_nan_is_not_sent(federate: Federate, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no client ever answered: .* are NaN or infinite"):
        federate(rounds=1, training={"learning_rate": 1e38, "batch_size": 4, "steps": 2})
    rows = Recording(tmp_path / "run" / "recording").read_rows()
    assert {row.status for row in rows} == {"failed"}
    assert any("NaN or infinite" in row.reason for row in rows)
