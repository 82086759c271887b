"""Tests of channels (attackers' models of defenses) that keep a state over rounds: residuals, momentum, unsent coordinates."""

import pytest
import torch
from torch import Generator, Tensor

from defenses import Channel, DefenseSpec, Update

FOLLOWED = [
    "top_k(0.2)",
    "top_k(0.2, scope='global')",
    "prune(0.8)",
    "top_k(0.2, error_feedback=True)",
    "top_k(0.2, scope='global', error_feedback=True)",
    "random_k(0.2, error_feedback=True)",
    "prune(0.8, error_feedback=True)",
    "gradient_dropout(0.8, error_feedback=True)",
    "dgc(0.1)",
    "dgc(0.1, nesterov=True, clip_norm=2.0)",
    "dgc(0.1, momentum=0.5, masking=False, dense_vectors=False)",
    "clip(2.0) | top_k(0.2, error_feedback=True)",
    "in_gradient_units(top_k(0.2, error_feedback=True), 0.5)",
    "masked(top_k(0.2, error_feedback=True), ['w'])",
]


def draw_updates(rounds: int, seed: int = 0) -> list[dict[str, Tensor]]:
    rng = Generator().manual_seed(seed)
    return [
        {"w": torch.randn(5, 4, generator=rng, dtype=torch.float64), "b": torch.randn(3, generator=rng, dtype=torch.float64)}
        for _ in range(rounds)
    ]


def send(spec: str, updates: list[dict[str, Tensor]]) -> list[Update]:
    defense, rng, sent = DefenseSpec.parse(spec).build(), Generator().manual_seed(1), []
    state = defense.init(updates[0])
    for update in updates:
        out, state = defense.apply(update, state, rng)
        sent.append(out)
    return sent


def measure_distances(channel: Channel, updates: list[dict[str, Tensor]], sent: list[Update]) -> list[float]:
    """Return, for every round, the squared distance between the update that the channel expects and the one that was sent."""
    state, found = {}, []
    for update, seen in zip(updates, sent, strict=True):
        expected, state = channel.follow_round(update, state, channel.learn(seen))
        found.append(sum(float((expected[name] - t).square().sum()) for name, t in seen.items()))
    return found


@pytest.mark.parametrize("spec", FOLLOWED)
def test_the_true_updates_explain_every_round_and_others_do_not(spec: str) -> None:
    channel, updates = DefenseSpec.parse(spec).build_channel(), draw_updates(12)
    sent = send(spec, updates)
    assert channel.follow is not None
    assert max(measure_distances(channel, updates, sent)) < 1e-20
    assert min(measure_distances(channel, draw_updates(12, seed=5), sent)) > 1e-3


@pytest.mark.parametrize("spec", FOLLOWED[3:8] + FOLLOWED[8:9] + ["sign('mean', error_feedback=True)"])
def test_a_round_alone_is_not_explained_by_the_true_update_where_a_residual_was_added(spec: str) -> None:
    channel, updates = DefenseSpec.parse(spec).build_channel(), draw_updates(12)
    sent = send(spec, updates)
    alone = [channel.expect(u, channel.learn(s)) for u, s in zip(updates, sent, strict=True)]
    missed = [sum(float((e[name] - t).square().sum()) for name, t in s.items()) for e, s in zip(alone, sent, strict=True)]
    followed = measure_distances(channel, updates, sent)
    assert sum(followed) < 1e-20 < 1e-2 < sum(missed[1:])


def test_an_unsent_coordinate_counts_by_how_far_it_is_beyond_the_smallest_sent_one() -> None:
    channel = DefenseSpec.parse("top_k(0.25)").build_channel()
    sent = {"w": torch.tensor([0.0, -3.0, 0.0, 0.0])}
    expected, _ = channel.follow_round({"w": torch.tensor([2.0, -3.5, 4.0, -5.0])}, {}, channel.learn(sent))
    assert expected["w"].tolist() == [0.0, -3.5, 1.0, -2.0]


def test_a_coordinate_is_expected_to_be_the_sum_since_it_was_last_sent() -> None:
    """A coordinate first sent in round three is expected to be the sum of three updates; after that, the sum starts again."""
    channel = DefenseSpec.parse("top_k(0.5, error_feedback=True)").build_channel()
    sent = [{"w": torch.tensor(values)} for values in ([5.0, 0.0], [5.0, 0.0], [0.0, 9.0], [0.0, 4.0])]
    state, expected = {}, []
    for seen in sent:
        out, state = channel.follow_round({"w": torch.tensor([5.0, 3.0])}, state, channel.learn(seen))
        expected.append(out["w"].tolist())
    assert [values[1] for values in expected[2:]] == [9.0, 3.0]


@pytest.mark.parametrize("spec", ["", "clip(1)", "gaussian(0.1)", "qsgd(4)", "random_k(0.5)", "sign", "withhold('b')"])
def test_defenses_without_a_state_are_compared_round_by_round(spec: str) -> None:
    channel = DefenseSpec.parse(spec).build_channel()
    assert channel.follow is None
    update = {name: t.float() for name, t in draw_updates(1)[0].items()}
    known = channel.learn(update)
    expected, state = channel.follow_round(update, {}, known)
    assert state == {}
    assert all(torch.equal(expected[name], t) for name, t in channel.expect(update, known).items())


def test_an_all_zero_message_is_expected_to_be_zero_for_any_update() -> None:
    channel = DefenseSpec.parse("dgc(0.25)").build_channel()
    nothing = {"w": torch.zeros(2, 2)}
    expected, _ = channel.follow_round({"w": torch.full((2, 2), 7.0)}, {}, channel.learn(nothing))
    assert expected["w"].abs().sum() == 0
