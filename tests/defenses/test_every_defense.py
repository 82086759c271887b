"""What holds for every registered defense, and that each has a limit in which it does nothing."""

import copy
import math

import pytest
import torch
from torch import Generator, Tensor

from defenses import DEFENSES, Defense, DefenseSpec, Update, chain, identity

# Two settings of each: one that changes the update below, and the limit that must give it back.
SETTINGS = {
    "clip": ("clip(0.5)", "clip(1e6)"),
    "gaussian": ("gaussian(0.25)", "gaussian(0)"),
}
RANDOM = {"gaussian"}
SPECS = [spec for settings in SETTINGS.values() for spec in settings] + ["clip(0.5) | gaussian(0.25)", ""]


def rng(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def update(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Shapes that break careless code: 0-d, empty, all zero, not contiguous, and names out of order."""
    drawn = Generator().manual_seed(7)
    return {
        "z.weight": torch.randn(3, 4, generator=drawn, dtype=dtype),
        "scalar": torch.randn((), generator=drawn, dtype=dtype),
        "a.zero": torch.zeros(5, dtype=dtype),
        "empty": torch.zeros(0, 2, dtype=dtype),
        "turned": torch.randn(2, 3, generator=drawn, dtype=dtype).T,
    }


def send(defense: Defense, given: Update, seed: int = 0) -> Update:
    return defense.apply(given, defense.init(given), rng(seed))[0]


def same(a: Update, b: Update) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_the_table_covers_every_registered_defense() -> None:
    """Whoever registers a defense has to say here what its limit is."""
    assert set(DEFENSES) == set(SETTINGS)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_names_shapes_and_types_stay(spec: str, dtype: torch.dtype) -> None:
    given = update(dtype)
    sent = send(DefenseSpec.parse(spec).build(), given)
    assert list(sent) == list(given)
    assert {n: (t.shape, t.dtype, t.device) for n, t in sent.items()} == {
        n: (t.shape, t.dtype, t.device) for n, t in given.items()
    }
    assert all(t.isfinite().all() for t in sent.values())


@pytest.mark.parametrize("spec", SPECS)
def test_an_all_zero_update_stays_finite(spec: str) -> None:
    given = {"w": torch.zeros(4), "b": torch.tensor(0.0)}
    sent = send(DefenseSpec.parse(spec).build(), given)
    assert all(t.isfinite().all() for t in sent.values())
    if "gaussian(0.25)" not in spec:
        assert same(sent, given)


@pytest.mark.parametrize("spec", SPECS)
def test_the_arguments_are_left_alone(spec: str) -> None:
    defense, given = DefenseSpec.parse(spec).build(), update()
    before = copy.deepcopy(given)
    state = defense.init(given)
    state_before = copy.deepcopy(dict(state))
    sent, _ = defense.apply(given, state, rng())
    for t in sent.values() if spec else ():
        t.add_(1)  # what a defense sends shares no memory with what it was given
    assert same(given, before)
    assert same(state, state_before)


@pytest.mark.parametrize("spec", SPECS)
def test_an_equal_generator_repeats(spec: str) -> None:
    defense = DefenseSpec.parse(spec).build()
    assert same(send(defense, update(), seed=3), send(defense, update(), seed=3))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_another_generator_differs_exactly_where_the_defense_is_random(name: str) -> None:
    defense = DefenseSpec.parse(SETTINGS[name][0]).build()
    assert same(send(defense, update(), seed=3), send(defense, update(), seed=4)) == (name not in RANDOM)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_global_randomness_is_neither_used_nor_changed(name: str) -> None:
    defense = DefenseSpec.parse(SETTINGS[name][0]).build()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = send(defense, update())
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, send(defense, update()))


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_its_setting_changes_the_update_and_its_limit_gives_it_back_bit_for_bit(name: str) -> None:
    strong, limit = SETTINGS[name]
    assert not same(send(DefenseSpec.parse(strong).build(), update()), update())
    assert same(send(DefenseSpec.parse(limit).build(), update()), update())


@pytest.mark.parametrize("nothing", [chain(), identity, DefenseSpec.parse("").build(), DefenseSpec().build()])
def test_the_empty_chain_is_the_identity(nothing: Defense) -> None:
    given = update()
    assert nothing.init(given) == {}
    sent, state = nothing.apply(given, {}, rng())
    assert same(sent, given)
    assert state == {}


@pytest.mark.parametrize("name", sorted(DEFENSES))
def test_every_defense_has_a_channel_with_the_same_parameters(name: str) -> None:
    """The channel is deterministic, differentiable, and says how much noise there is."""
    spec = DefenseSpec.parse(SETTINGS[name][0])
    channel = spec.channel()
    given = {n: t.requires_grad_() for n, t in update(torch.float64).items()}
    expected = channel.expect(given)
    assert same(expected, channel.expect(given))
    assert {n: t.shape for n, t in expected.items()} == {n: t.shape for n, t in given.items()}
    (gradient,) = torch.autograd.grad(sum(t.sum() for t in expected.values()), [given["z.weight"]])
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0
    assert (channel.noise_std > 0) == (name in RANDOM)


@pytest.mark.parametrize("name", sorted(DEFENSES))
def test_what_is_sent_is_the_channels_expectation_with_noise_of_its_power(name: str) -> None:
    """The attacker's side and the client's agree: residual of mean zero and the declared standard deviation."""
    spec = DefenseSpec.parse(SETTINGS[name][0])
    size = 40_000
    given = {"w": torch.randn(size, generator=rng(5), dtype=torch.float64)}
    residual = send(spec.build(), given)["w"] - spec.channel().expect(given)["w"]
    std = spec.channel().noise_std
    assert abs(residual.mean().item()) <= 4 * std / math.sqrt(size)
    assert abs(residual.std().item() - std) <= 4 * std / math.sqrt(2 * size)
