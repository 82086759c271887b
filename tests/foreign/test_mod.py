"""Tests of `update_mod`, the mod (Flower's middleware) that a client adds: updates, defenses, and secrets that stay private."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from changed_replies import rewrite
from flwr.app import Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg

from defenses import Defense
from defenses.channel import transparent
from defenses.spec import DEFENSES, Kind
from fedsim.client import update_mod
from fedsim.recording import Observation


def spy(contents: list[tuple[str, RecordDict]], states: list[Any]) -> Callable[..., Message]:
    """Return a mod that collects the content of replies and the client's state; as the first mod, it sees what is sent."""

    def mod(message: Message, context: Any, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        contents.append((message.metadata.message_type, RecordDict(dict(reply.content))))  # a copy, since the server changes it
        states.append(context.state)
        return reply

    return mod


def group_by_round(app: Any) -> dict[str, list[Observation]]:
    """Return each client's observations in the order of rounds."""
    found: dict[str, list[Observation]] = {}
    for o in app.observations():
        found.setdefault(o.client, []).append(o)
    return found


def norm(update: Any) -> float:
    return float(torch.cat([u.flatten() for u in update.values()]).norm())


def test_a_client_keeps_its_pseudonym_and_its_secret_stays_with_it(app: Any) -> None:
    contents: list[tuple[str, RecordDict]] = []
    states: list[Any] = []
    app.run(app.record(), mods=[spy(contents, states), update_mod("gaussian(0.1)")], rounds=3)
    assert {len(own) for own in group_by_round(app).values()} == {3}
    secrets = {str(state["identity"]["secret"]) for state in states}
    pseudonyms = {str(state["identity"]["pseudonym"]) for state in states}
    assert (len(secrets), pseudonyms) == (3, set(group_by_round(app)))
    wire = [(type(value), value) for _, content in contents for record in content.values() for value in record.values()]
    sent_text = " ".join(str(value) for kind, value in wire if kind in (str, int, float, bytes))
    assert all(name in sent_text for name in pseudonyms)
    assert not any(secret in sent_text for secret in secrets)
    assert {key for _, content in contents for key in content} == {"payload", "codec", "client", "metrics"}


def test_noise_is_fresh_in_each_round_and_each_client(app: Any) -> None:
    app.run(app.record(), mods=[update_mod("gaussian(0.01)")], rounds=2)
    noise = []
    for own in group_by_round(app).values():
        for o in own:
            true = app.true_update(o)
            noise.append(torch.cat([(o.update[name] - true[name]).flatten() for name in true]))
    assert all(n.std().item() == pytest.approx(0.01, rel=0.02) for n in noise)
    likeness = torch.corrcoef(torch.stack(noise)) - torch.eye(6)
    assert likeness.abs().max() < 0.02


def test_noise_does_not_depend_on_the_round_number_of_the_server(app: Any) -> None:
    """A server could send one number twice, and cancel equal noise by subtracting the updates."""

    class Stuck(FedAvg):
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            return super().configure_train(1, arrays, config, grid)

    app.run(app.record(Stuck(fraction_evaluate=0.0)), mods=[update_mod("gaussian(0.1)")])
    for first, second in group_by_round(app).values():
        assert norm({name: first.update[name] - second.update[name] for name in first.update}) > 0.1


def test_the_defense_acts_on_the_update_and_the_server_averages_what_it_got(app: Any) -> None:
    result = app.run(app.record(defense="clip(0.01)"), mods=[update_mod("clip(0.01)")], rounds=1)
    seen = app.observations()
    for o in seen:
        true = app.true_update(o)
        assert norm(true) > 0.02
        for name, u in o.update.items():
            torch.testing.assert_close(u, true[name] * (0.01 / norm(true)), rtol=1e-4, atol=1e-9)
    for name, array in result.arrays.items():
        mean = torch.stack([o.weights[name] + o.update[name] for o in seen]).mean(dim=0)
        torch.testing.assert_close(torch.from_numpy(array.numpy()), mean, rtol=1e-5, atol=1e-7)


def test_a_defense_keeps_its_state_between_rounds(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of the toy defense is the update of the previous round, which it sends."""
    late = Defense(
        init=lambda update: {name: torch.zeros_like(u) for name, u in update.items()},
        apply=lambda update, state, rng: (dict(state), dict(update)),
    )
    monkeypatch.setitem(DEFENSES._builtin, "late", Kind(lambda: late, lambda: transparent))
    app.run(app.record(), mods=[update_mod("late()")], rounds=2)
    for first, second in group_by_round(app).values():
        assert norm(first.update) == 0
        true = app.true_update(second)  # the weights changed only by rounding, so that both rounds have the same update
        for name, u in second.update.items():
            torch.testing.assert_close(u, true[name], rtol=0, atol=1e-8)


@pytest.mark.parametrize("strategy", ["FedAvg", "FedMedian"])
def test_evaluation_passes_untouched(app: Any, strategy: str) -> None:
    plain: list[tuple[str, RecordDict]] = []
    modded: list[tuple[str, RecordDict]] = []
    alone = app.run(getattr(flower, strategy)(), mods=[spy(plain, [])])
    recorded = app.run(app.record(getattr(flower, strategy)()), mods=[spy(modded, []), update_mod()])
    kinds = [kind for kind, _ in modded]
    assert sorted(kinds) == ["evaluate"] * 6 + ["train"] * 6
    for (kind, content), (_, before) in zip(modded, plain, strict=True):
        if kind == "evaluate":
            assert set(content) == {"metrics"}
            assert dict(content["metrics"]) == pytest.approx(dict(before["metrics"]), rel=1e-5)
    for round in (1, 2):
        assert set(recorded.evaluate_metrics_clientapp[round]) == {"eval_loss", "eval_acc"}
        assert recorded.evaluate_metrics_clientapp[round]["eval_loss"] == pytest.approx(
            alone.evaluate_metrics_clientapp[round]["eval_loss"], rel=1e-5
        )


def test_flowers_clipping_mod_after_it_is_part_of_the_update(app: Any) -> None:
    strategy = flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(fraction_evaluate=0.0), 0.0, 0.01, 3)
    app.run(app.record(strategy), mods=[update_mod(), fixedclipping_mod], rounds=1)
    assert [norm(o.update) for o in app.observations()] == [pytest.approx(0.01, rel=1e-3)] * 3


def test_noise_of_flowers_privacy_mod_after_it_is_recorded(app: Any) -> None:
    app.run(app.record(), mods=[update_mod(), LocalDpMod(0.01, 1.0, 100.0, 1e-5)], rounds=1)
    for o in app.observations():
        assert norm(o.update) > 0.015  # noise in 62006 coordinates exceeds the clipping norm of 0.01


def test_an_app_that_consumes_the_message_is_supported(app: Any) -> None:
    def greedy(message: Message, context: Any, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        if message.metadata.message_type == "train":
            message.content["arrays"].to_torch_state_dict(keep_input=False)
        return reply

    app.run(app.record(), mods=[update_mod(), greedy], rounds=1)
    assert all(norm(o.update) > 0.02 for o in app.observations())


def rename(content: RecordDict) -> None:
    """Rename the record of weights, as an app may."""
    content["net"] = content.pop("arrays")


def half(content: RecordDict) -> None:
    """Remove a tensor of the last layer, as an app may that does not share it."""
    del content["arrays"]["fc3.bias"]


@pytest.mark.parametrize(
    ("inner", "words"),
    [(rename, "has no record of weights 'arrays'; it has net. Name it in update_mod(key=...)"), (half, "'fc3.bias' is only in")],
)
def test_if_weights_are_not_found_nothing_is_sent_undefended(app: Any, inner: Any, words: str) -> None:
    contents: list[tuple[str, RecordDict]] = []
    app.run(app.record(), mods=[spy(contents, []), update_mod("clip(1)"), rewrite(inner)], rounds=1)
    assert not contents
    assert all(row.status == "failed" and words in row.reason for row in app.recording.read_rows())


def test_a_buffer_sent_as_part_of_the_update_is_a_failed_row_with_the_reason(app: Any) -> None:
    app.run(app.record(net="NormedNet"), net="NormedNet", mods=[update_mod(buffers=("num_batches_tracked",))], rounds=1)
    rows = app.recording.read_rows()
    assert len(rows) == 3
    assert all(
        row.status == "failed" and "is a buffer, but the client sent it as part of the update" in row.reason for row in rows
    )


def test_a_defense_that_cannot_be_read_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="clip"):
        update_mod("clipp(1)")
