"""Tests of the channels (the attackers' models) of all registered defenses, by the properties in their registry entry."""

import copy
import inspect
import math
from functools import partial

import pytest
import torch
from generators import seeded
from registered_defenses import EXAMPLES, KINDS, NAMES, RANDOM, SPECS, look, same, send, sum_of, update
from torch import Tensor
from torch.func import grad, vmap

from defenses import Channel, DefenseSpec, Update
from defenses.channel import compose_channels


def channel_of(name: str) -> Channel:
    return DefenseSpec.parse(EXAMPLES[name]).build_channel()


@pytest.mark.parametrize("name", NAMES)
def test_a_channel_takes_the_arguments_of_its_defense(name: str) -> None:
    def shape(function: object) -> list[tuple[str, object]]:
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(KINDS[name].channel) == shape(KINDS[name].defense)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_an_attacker_expects_looks_like_the_update_and_has_a_gradient(
    spec: str, dtype: torch.dtype, approximate: bool
) -> None:
    channel, given = DefenseSpec.parse(spec).build_channel(), update(dtype)
    sent = send(spec, given)
    known = channel.learn(sent)
    guess = update(dtype, seed=8)  # the attacker's: not what was sent
    expected = channel.expect_update(guess, known, approximate=approximate)
    assert look(expected) == look(guess)
    assert list(expected) == list(guess)
    slope = grad(lambda u: sum_of(channel.expect_update(u, known, approximate=approximate)))(guess)
    assert all(t.isfinite().all() for t in slope.values())
    assert sum(t.abs().sum().item() for t in slope.values()) > 0
    power = channel.noise(sent)
    assert power.shape == ()
    assert power.dtype == dtype
    assert power.item() >= 0


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("approximate", [False, True])
def test_an_all_zero_guess_has_a_finite_gradient(spec: str, approximate: bool) -> None:
    channel = DefenseSpec.parse(spec).build_channel()
    nothing = {name: torch.zeros_like(t) for name, t in update().items()}
    for seen in (send(spec, update()), send(spec, nothing), nothing):
        known = channel.learn(seen)
        slope = grad(lambda u, known=known: sum_of(channel.expect_update(u, known, approximate=approximate)))(nothing)
        assert all(t.isfinite().all() for t in slope.values())
        assert channel.noise(seen).isfinite()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("approximate", [False, True])
def test_vmap_over_updates_equals_a_loop(spec: str, approximate: bool) -> None:
    channel = DefenseSpec.parse(spec).build_channel()
    expect = partial(channel.expect_update, approximate=approximate)
    seen = [send(spec, update(torch.float64, seed), seed) for seed in (1, 2, 3)]
    guesses = [update(torch.float64, seed) for seed in (4, 5, 6)]

    def stacked(updates: list[Update]) -> dict[str, Tensor]:
        return {name: torch.stack([u[name] for u in updates]) for name in updates[0]}

    def pull(guess: Update, received: Update) -> tuple[Update, Update, Tensor]:
        known = channel.learn(received)
        slope = grad(lambda u: sum_of({n: (t - received[n]).square() for n, t in expect(u, known).items()}))(guess)
        return expect(guess, known), slope, channel.noise(received)

    expected, slopes, powers = vmap(pull)(stacked(guesses), stacked(seen))
    for i, (guess, received) in enumerate(zip(guesses, seen, strict=True)):
        one, slope, power = pull(guess, received)
        assert all(torch.allclose(expected[name][i], one[name], rtol=1e-12) for name in one)
        assert all(torch.allclose(slopes[name][i], slope[name], rtol=1e-9) for name in slope)
        assert torch.allclose(powers[i], power, rtol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_a_channel_changes_none_of_its_arguments(spec: str) -> None:
    channel, guess = DefenseSpec.parse(spec).build_channel(), update()
    seen = send(spec, guess)
    before = copy.deepcopy((dict(guess), dict(seen)))
    known = channel.learn(seen)
    known_before = copy.deepcopy(dict(known))
    channel.expect(guess, known)
    channel.expect_update(guess, known, approximate=True)
    channel.noise(seen)
    assert same(guess, before[0])
    assert same(seen, before[1])
    assert same(known, known_before)


@pytest.mark.parametrize("name", NAMES)
def test_a_message_differs_from_the_expectation_by_noise_of_the_declared_power(name: str) -> None:
    """The residual has mean zero and the power that the channel states; without noise it is zero."""
    given = {"z.weight": torch.randn(200, 200, generator=seeded(5), dtype=torch.float64)}
    channel = channel_of(name)
    sent = send(EXAMPLES[name], given)["z.weight"]
    residual = sent - channel.expect(given, channel.learn({"z.weight": sent}))["z.weight"]
    power = channel.noise({"z.weight": sent}).item()
    assert residual.square().sum().item() == pytest.approx(power, rel=0.1, abs=1e-20)
    assert abs(residual.mean().item()) <= 4 * math.sqrt(power) / residual.numel() + 1e-15


@pytest.mark.parametrize("name", NAMES)
def test_knowing_a_defense_explains_no_less_than_ignoring_it(name: str) -> None:
    """At the true update, the expectation is at least as near to the message as the update itself."""
    given = update(torch.float64)
    channel, sent = channel_of(name), send(EXAMPLES[name], given)
    expected = channel.expect(given, channel.learn(sent))

    def distance(a: Update) -> float:
        return sum((sent[n] - t).square().sum().item() for n, t in a.items())

    assert distance(expected) <= distance(given) + 1e-12
    if not (KINDS[name].random and KINDS[name].unbiased):
        assert distance(expected) < 0.75 * distance(given)


def test_powers_of_a_chain_add_up() -> None:
    seen = update()
    channels = [channel_of(name) for name in RANDOM]
    assert compose_channels(*channels).noise(seen).item() == pytest.approx(sum(c.noise(seen).item() for c in channels), rel=1e-6)
