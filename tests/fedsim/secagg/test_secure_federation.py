"""Tests of federations with secure aggregation against the same ones without: weights, messages and recordings."""

from typing import Any

import numpy as np
import pytest
import torch
from failing_grid import Failing
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg
from secure_runs import EPOCH, assert_is_mean, half_a_step, mean_of, recorded, weights_after
from tiny_experiments import Federate

from fedsim.commands.maintenance import verify
from fedsim.engine import engines as engine
from fedsim.flower import records
from fedsim.recording.files import read_json_lines


@pytest.mark.parametrize("bits", [None, 12])
def test_the_secure_mean_is_the_weighted_mean_within_quantisation(bits: int | None, federate: Federate) -> None:
    table = {"bits": bits, "max_weight": 800} if bits else True
    plain = federate("plain", **EPOCH, secure_aggregation=False, rounds=1)
    secure = federate("secure", **EPOCH, secure_aggregation=table, rounds=1)
    updates = list(recorded(plain).read_observations())
    assert len({o.num_examples for o in updates}) == 5
    (found,) = recorded(secure).read_observations()
    assert found.client == "sum"
    assert found.cohort == tuple(o.client for o in updates)
    assert found.num_examples == sum(o.num_examples or 0 for o in updates)
    assert_is_mean(secure, found, updates)
    if bits:  # 12 bits are so coarse that the bound above is not trivial
        worst = max(float((found.update[n].double() - m).abs().max()) for n, m in mean_of(updates).items())
        assert worst > 1e-3 * half_a_step(secure)
    after = weights_after(secure)
    for name, update in found.update.items():
        assert torch.allclose(after[name], found.weights[name] + update, atol=1e-6)


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"])
def test_averaging_strategies_reach_the_same_weights_as_without(name: str, federate: Federate) -> None:
    changes = {**EPOCH, "strategy": name, "rounds": 3, "clients": {"count": 4, "fraction": 0.75}}
    plain, secure = federate("plain", **changes, secure_aggregation=False), federate("secure", **changes)
    before, after = weights_after(plain), weights_after(secure)
    moved = next(iter(recorded(plain).read_observations())).weights
    for weight, tensor in after.items():
        assert (tensor - before[weight]).norm() < 1e-3 * (tensor - moved[weight]).norm()


def test_a_defense_acts_before_the_mask(federate: Federate) -> None:
    changes = {**EPOCH, "defense": "clip(0.05) | gaussian(0.01)", "rounds": 1}
    plain, secure = federate("plain", **changes, secure_aggregation=False), federate("secure", **changes)
    updates = list(recorded(plain).read_observations())
    (found,) = recorded(secure).read_observations()
    assert_is_mean(secure, found, updates)
    assert max(float(t.abs().max()) for t in found.update.values()) > 1e-3


@pytest.mark.parametrize("defense", ["", "clip(0.5)"])
def test_answers_carry_only_masked_words_keys_and_shares(
    defense: str, federate: Federate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends the weights in one of four exchanges; answers have only masked 32-bit words, or keys and shares."""
    monkeypatch.setattr(engine, "LocalGrid", Failing)
    run = federate(rounds=1, defense=defense)
    size = sum(w.numel() for w in next(recorded(run).read_observations()).weights.values())
    assert [stage for stage, *_ in Failing.seen] == [s for s in ("setup", "share", "collect", "unmask") for _ in range(5)]
    for stage, _, message, answer in Failing.seen:
        assert ("arrays" in message.content) == (stage == "collect")
        assert set(answer.content) == {"client", "masked" if stage == "collect" else "secagg"}
        assert not list(answer.content.metric_records)
        for record in answer.content.array_records.values():
            assert {key: (array.dtype, tuple(array.shape)) for key, array in record.items()} == {"words": ("uint32", (3 + size,))}
        if stage == "collect":
            assert records.count_bytes(answer.content) < 4 * size + 300


def test_numbers_of_examples_are_hidden_unless_reveal_is_set(federate: Federate) -> None:
    hidden, shown = federate("hidden", **EPOCH), federate("shown", **EPOCH, secure_aggregation={"reveal": True})
    rows = {name: recorded(run).read_rows() for name, run in (("hidden", hidden), ("shown", shown))}
    for row in rows["hidden"]:
        assert (row.num_examples is None) == (row.client != "sum")
        assert row.client == "sum" or row.metrics == {}
    own = [row.num_examples for row in rows["shown"] if row.client != "sum" and row.round == 1]
    assert len(set(own)) == 5
    assert sum(number or 0 for number in own) == next(row.num_examples for row in rows["shown"] if row.client == "sum")
    assert weights_after(hidden).keys() == weights_after(shown).keys()
    assert all(torch.equal(t, weights_after(shown)[name]) for name, t in weights_after(hidden).items())


def test_the_recording_holds_what_the_server_saw(federate: Federate) -> None:
    run = federate(client_seed=5)
    recording = recorded(run)
    rows = recording.read_rows(rounds={1})
    assert [row.status for row in rows if row.client != "sum"] == ["masked"] * 5
    assert [count.masked for count in recording.count_replies()] == [5, 5]
    assert "sum" not in recording.list_clients()
    size = sum(w.numel() for w in recording.read_sent(1).weights.values())
    keys = set()
    for row in rows:
        if row.client == "sum":
            continue
        seen = recording.read_masked(row)
        assert (seen.words.dtype, tuple(seen.words.shape)) == (torch.uint32, (3 + size,))
        keys |= {seen.mask_key, seen.share_key}
        assert len(seen.sealed) == 4
        assert len(set(seen.sealed)) == 1
        assert set(seen.up) == set(seen.down) == {"setup", "share", "collect", "unmask"}
        assert (row.bytes, row.codec) == (sum(seen.up.values()), "masked")
        with pytest.raises(ValueError, match="its update is masked; attack the secure sum, client 'sum'"):
            recording.read_observation(row)
    assert len(keys) == 10
    assert keys.isdisjoint(recording.read_masked(row).mask_key for row in recording.read_rows(rounds={2}) if row.client != "sum")
    with pytest.raises(ValueError, match="no masked vector"):
        recording.read_masked(next(row for row in rows if row.client == "sum"))
    metrics = read_json_lines(run.out / "metrics.jsonl")[1]
    assert metrics["bytes_up"] == sum(row.bytes for row in rows)
    assert metrics["bytes_down"] == sum(sum(recording.read_masked(row).down.values()) for row in rows if row.client != "sum")
    assert (metrics["clients"], metrics["missing"], metrics["secagg_clipped"], metrics["secagg_clipped_clients"]) == (5, 0, 0, 0)
    agreement = run.experiment.settle_agreement()
    assert recording.manifest.secure_aggregation == agreement.to_json()
    assert recording.manifest.codec == "masked"
    checked = verify(run.out)
    assert checked.damaged == checked.unexpected == ()


def test_a_resumed_run_records_the_same_clients(federate: Federate) -> None:
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise RuntimeError("power cut")

    with pytest.raises(engine.EngineError, match="power cut"):
        federate(record={"clients": 2}, on_round=stop)
    run = federate(record={"clients": 2}, resume=True)
    kept = [{row.client for row in recorded(run).read_rows(rounds={n}) if row.file and row.client != "sum"} for n in (1, 2)]
    assert len(kept[0]) == 2
    assert kept[0] == kept[1]


def test_the_sum_of_masked_words_cannot_be_decoded(federate: Federate) -> None:
    """The server cannot decode the sum of recorded vectors, since each client has added a mask of its own."""
    run = federate(rounds=1)
    recording = recorded(run)
    words = [recording.read_masked(row).words for row in recording.read_rows() if row.status == "masked"]
    total = sum((w.numpy() for w in words if w is not None), np.zeros(len(words[0]), np.uint32))
    agreement = run.experiment.settle_agreement()
    assert agreement is not None
    with pytest.raises(ValueError, match="which is impossible"):
        agreement.quantiser.decode(total, {}, 5)


@pytest.mark.parametrize("clients", ["2", "all"])
def test_the_members_of_a_sum_are_known_even_if_few_clients_are_recorded(clients: str, federate: Federate) -> None:
    run = federate(record={"clients": clients})
    recording = recorded(run)
    assert all(len(o.cohort) == 5 for o in recording.read_observations())
    files = [row.client for row in recording.read_rows() if row.file and row.client != "sum"]
    assert len(files) == (4 if clients == "2" else 10)
    assert verify(run.out).damaged == ()


def test_a_masked_vector_that_is_damaged_is_named(federate: Federate) -> None:
    run = federate(rounds=1)
    row = next(row for row in recorded(run).read_rows() if row.status == "masked")
    assert row.file is not None
    path = run.out / "recording" / row.file
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    assert [name for name, _ in verify(run.out).damaged] == [f"recording/{row.file}"]
    assert len(list(recorded(run).read_observations())) == 1


def test_clipped_values_are_counted_and_reported(federate: Federate) -> None:
    plain = federate("plain", **EPOCH, secure_aggregation=False, rounds=1)
    secure = federate("secure", **EPOCH, secure_aggregation={"clip": 0.01}, rounds=1)
    beyond = [sum(int((t.abs() > 0.01).sum()) for t in o.update.values()) for o in recorded(plain).read_observations()]
    row = read_json_lines(secure.out / "metrics.jsonl")[1]
    assert row["secagg_clipped"] == sum(beyond) > 0
    assert row["secagg_clipped_clients"] == sum(count > 0 for count in beyond)
    (found,) = recorded(secure).read_observations()
    assert found.metrics["secagg_clipped"] == sum(beyond)
    assert max(float(t.abs().max()) for t in found.update.values()) <= 0.01 + 1e-9


def test_the_strategy_gets_equal_replies(monkeypatch: pytest.MonkeyPatch, federate: Federate) -> None:
    got: list[Any] = []
    real = FedAvg.aggregate_train

    def spy(self: Any, server_round: int, replies: Any) -> Any:
        got.append([reply.content for reply in replies])
        return real(self, server_round, replies)

    monkeypatch.setattr(FedAvg, "aggregate_train", spy)
    federate(rounds=1, **EPOCH)
    (contents,) = got
    assert len(contents) == 5
    for content in contents:
        assert {key: dict(record) for key, record in content.metric_records.items()} == {"metrics": {"num-examples": 1}}
        (record,) = content.array_records.values()
        assert isinstance(record, ArrayRecord)
        assert all(array.data == contents[0]["arrays"][name].data for name, array in record.items())
