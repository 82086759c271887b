"""Tests of chains of defenses: order from left to right, separate states, and channels (the attacker's models of defenses)."""

from collections.abc import Callable

import pytest
import torch
from generators import seeded
from torch import Generator, Tensor

from defenses import Channel, Defense, DefenseSpec, State, Update, chain, channels, clip, clip_each, gaussian, stateless
from defenses.channel import compose_channels, transparent


def counting(start: float) -> Defense:
    """Return a stateful defense that adds to each tensor the number of earlier calls plus `start`."""

    def apply(update: Update, state: State, rng: Generator) -> tuple[Update, State]:
        return {name: t + state["calls"] for name, t in update.items()}, {"calls": state["calls"] + 1}

    return Defense(init=lambda template: {"calls": torch.tensor(start)}, apply=apply)


def holding_back() -> Defense:
    """Return a defense that sends the update of the round before; its state uses the parameter names."""
    return Defense(
        init=lambda template: {name: torch.zeros_like(t) for name, t in template.items()},
        apply=lambda update, state, rng: (dict(state), dict(update)),
    )


def scaled(factor: float) -> Defense:
    return stateless(lambda update, rng: {name: t * factor for name, t in update.items()})


def shifted(by: float) -> Defense:
    return stateless(lambda update, rng: {name: t + by for name, t in update.items()})


def run(defense: Defense, *rounds: float) -> list[float]:
    """Return what is sent in each round for updates of one number."""
    state, sent = defense.init({"w": torch.tensor(0.0)}), []
    for value in rounds:
        update, state = defense.apply({"w": torch.tensor(float(value))}, state, seeded())
        assert list(update) == ["w"]
        sent.append(update["w"].item())
    return sent


def test_a_chain_runs_from_left_to_right() -> None:
    assert run(chain(scaled(10), shifted(1)), 2.0) == [21]
    assert run(chain(shifted(1), scaled(10)), 2.0) == [30]


def test_clipping_then_noise_is_not_noise_then_clipping() -> None:
    update = {"w": torch.full((100,), 1.0)}
    clipped_last, _ = chain(gaussian(1), clip(1)).apply(update, {}, seeded())
    noisy_last, _ = chain(clip(1), gaussian(1)).apply(update, {}, seeded())
    assert clipped_last["w"].norm().item() == pytest.approx(1)
    assert noisy_last["w"].norm().item() > 5
    by_hand = update["w"] / 10 + torch.randn(100, generator=seeded())
    assert torch.allclose(noisy_last["w"], by_hand)


def test_two_noises_of_a_chain_draw_from_one_stream() -> None:
    sent, _ = chain(gaussian(1), gaussian(1)).apply({"w": torch.zeros(50)}, {}, seeded(8))
    stream = seeded(8)
    assert torch.equal(sent["w"], torch.randn(50, generator=stream) + torch.randn(50, generator=stream))


def test_a_chain_passes_its_state_from_round_to_round() -> None:
    assert run(chain(counting(0)), 5, 5, 5) == [5, 6, 7]
    assert run(chain(holding_back()), 1, 2, 3) == [0, 1, 2]


def test_states_of_one_chain_are_kept_apart() -> None:
    """Two defenses use the same key in their state, and a third one the parameter names."""
    chained = chain(counting(0), clip(1e9), holding_back(), counting(100))
    assert run(chained, 5, 5, 5) == [100, 106, 108]
    state = chained.init({"w": torch.tensor(0.0)})
    assert len(state) == 3
    assert all(isinstance(t, Tensor) for t in state.values())


def test_chains_of_chains_are_chains() -> None:
    nested = chain(counting(0), chain(counting(10), chain(holding_back(), counting(100))))
    assert run(nested, 1, 1, 1) == run(chain(counting(0), counting(10), holding_back(), counting(100)), 1, 1, 1)
    assert run(chain(chain(), counting(0)), 1, 1) == [1, 2]


def test_a_chain_of_more_than_ten_keeps_its_states_apart() -> None:
    """The prefix `1/` must not match `10/`."""
    many = chain(*(counting(10.0**i) for i in range(12)))
    assert run(many, 0)[0] == pytest.approx(111_111_111_111)
    assert len(many.init({"w": torch.tensor(0.0)})) == 12


def test_a_stateless_defense_returns_the_state_that_it_was_given() -> None:
    _, state = clip(1).apply({"w": torch.ones(2)}, {"kept": torch.tensor(3.0)}, seeded())
    assert state["kept"].item() == 3


# --- channels ---


@pytest.mark.parametrize("length", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(("defense", "channel"), [(clip, channels.clip), (clip_each, channels.clip_each)])
def test_the_channel_of_a_clip_is_the_clip(
    defense: Callable[[float], Defense], channel: Callable[[float], Channel], length: float
) -> None:
    update = {"a": torch.randn(5, generator=seeded(1)) * length, "b": torch.randn((), generator=seeded(2)) * length}
    sent, _ = defense(1.5).apply(update, {}, seeded())
    expected = channel(1.5).expect(update, {})
    assert all(torch.equal(sent[name], expected[name]) for name in update)
    assert channel(1.5).learn(sent) == {}
    assert channel(1.5).noise(sent) == 0


def test_the_channel_of_clip_has_the_gradient_of_a_projection() -> None:
    """Above the bound, scaling the update changes nothing; below, the channel is the identity."""
    far = torch.tensor([3.0, 4.0], dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda w: channels.clip(1.0).expect({"w": w}, {})["w"], far)
    unit = far / 5
    assert torch.allclose(jacobian, (torch.eye(2, dtype=torch.float64) - torch.outer(unit, unit)) / 5)
    near = far / 100
    jacobian = torch.autograd.functional.jacobian(lambda w: channels.clip(1.0).expect({"w": w}, {})["w"], near)
    assert torch.equal(jacobian, torch.eye(2, dtype=torch.float64))


def test_the_channel_of_noise_expects_the_update_itself() -> None:
    update = {"w": torch.ones(3), "b": torch.zeros(())}
    for channel, power in ((channels.gaussian(0.5), 4 * 0.25), (channels.laplace(0.5), 4 * 2 * 0.25)):
        assert channel.expect(update, {})["w"] is update["w"]
        assert channel.noise(update).item() == power


def test_powers_of_noise_add_up() -> None:
    seen = {"w": torch.ones(3)}
    assert compose_channels(channels.gaussian(3), channels.gaussian(4)).noise(seen) == 3 * 25
    assert DefenseSpec.parse("gaussian(3) | clip(2) | gaussian(4)").build_channel().noise(seen) == 3 * 25


def test_channels_compose_from_left_to_right() -> None:
    double = Channel(lambda u, known: {n: 2 * t for n, t in u.items()})
    increment = Channel(lambda u, known: {n: t + 1 for n, t in u.items()})
    assert compose_channels(double, increment).expect({"w": torch.tensor(3.0)}, {})["w"].item() == 7
    assert compose_channels(increment, double).expect({"w": torch.tensor(3.0)}, {})["w"].item() == 8


def test_wrapped_and_chained_channels_pass_on_whether_the_simulation_is_approximate() -> None:
    def multiply(factor: float) -> Callable[..., dict[str, torch.Tensor]]:
        return lambda u, known: {n: factor * t for n, t in u.items()}

    inner = Channel(multiply(2), expect_approximate=multiply(3))
    increment = Channel(lambda u, known: {n: t + 1 for n, t in u.items()})
    masked, converted = channels.masked(inner, "w"), channels.in_gradient_units(inner, 0.5)
    update = {"w": torch.tensor(3.0), "b": torch.tensor(1.0)}
    for channel, exact, approximate in (
        (inner, (6, 2), (9, 3)),
        (masked, (6, 1), (9, 1)),
        (converted, (6, 2), (9, 3)),
        (compose_channels(increment, masked, increment), (9, 3), (13, 3)),
        (increment, (4, 2), (4, 2)),
    ):
        for flag, expected in ((False, exact), (True, approximate)):
            values = channel.expect_update(update, {}, approximate=flag)
            assert (values["w"].item(), values["b"].item()) == expected
    assert channels.masked(increment, "w").expect_approximate is None
    assert compose_channels(increment, increment).expect_approximate is None


def test_channels_of_a_chain_keep_what_they_learn_apart() -> None:
    """With more than ten channels, the prefix `1/` must not match `10/`. All learn from the received update."""

    def adding(factor: float) -> Channel:
        return Channel(expect=lambda u, known: {"w": u["w"] + known["w"]}, learn=lambda seen: {"w": factor * seen["w"]})

    chained = compose_channels(*(adding(10.0**i) for i in range(12)))
    known = chained.learn({"w": torch.tensor(2.0, dtype=torch.float64)})
    assert len(known) == 12
    assert chained.expect({"w": torch.tensor(0.0, dtype=torch.float64)}, known)["w"].item() == 222_222_222_222


def test_the_channel_without_a_defense_is_transparent() -> None:
    update = {"w": torch.ones(3)}
    for channel in (transparent, compose_channels(), DefenseSpec.parse("").build_channel()):
        assert channel is transparent
        assert channel.expect(update, {}) is update
        assert channel.learn(update) == {}
        assert channel.noise(update) == 0
