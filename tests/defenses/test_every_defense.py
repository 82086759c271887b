"""Tests of all registered defenses by the properties in their registry entry.

example: typical arguments. limit: arguments with which the update is sent unchanged. random and unbiased: whether the defense
draws at random, and whether the mean of its messages is the update.

A new defense is tested here without further code.
"""

import copy
import inspect
import math

import pytest
import torch
from generators import seeded
from registered_defenses import EXAMPLES, KINDS, LIMITS, NAMES, RANDOM, SPECS, look, run, same, send, update
from torch import Tensor

from defenses import Defense, DefenseSpec, chain, identity
from defenses.spec import CodecName

DRAWS = 10_000


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_names_shapes_and_types_stay_over_rounds_also_those_of_the_state(spec: str, dtype: torch.dtype) -> None:
    given = update(dtype)
    start = DefenseSpec.parse(spec).build().init(given)
    sent, state = run(spec, given, rounds=3)
    assert list(sent) == list(given)
    assert look(sent) == look(given)
    assert look(state) == look(start)
    assert all(t.isfinite().all() for t in sent.values())


@pytest.mark.parametrize("spec", SPECS)
def test_an_all_zero_update_stays_finite_and_zero_but_for_signs_and_noise(spec: str) -> None:
    given = {"z.weight": torch.zeros(4, 2), "b.weight": torch.zeros(3), "scalar": torch.tensor(0.0)}
    sent = send(spec, given)
    assert all(t.isfinite().all() for t in sent.values())
    adds = ("sign()", "signsgd", "laplace(0.", "gaussian(0.", "noise(0.", "noise('G")
    if not any(part in spec for part in adds):
        assert same(sent, given)


@pytest.mark.parametrize("spec", [s for s in SPECS if not any(n in s for n in ("sign", "random_k", "dropout", "withhold(['*"))])
def test_nan_is_not_hidden(spec: str) -> None:
    """NaN must be visible to the server, except for defenses that send signs or leave out entries at random."""
    sent = send(spec, {"z.weight": torch.tensor([[math.nan, 1.0, 2.0, -3.0]]), "scalar": torch.tensor(1.0)})
    assert sent["z.weight"].isnan().any()


@pytest.mark.parametrize("spec", SPECS)
def test_the_arguments_are_left_alone_and_share_no_memory_with_what_is_sent(spec: str) -> None:
    defense, given = DefenseSpec.parse(spec).build(), update()
    before = copy.deepcopy(given)
    _, state = run(spec, given, rounds=2)
    state_before = copy.deepcopy(dict(state))
    sent, after = defense.apply(given, state, seeded())
    after_before = copy.deepcopy(dict(after))
    for t in sent.values() if spec else ():
        t.add_(1)
    assert same(given, before)
    assert same(state, state_before)
    assert same(after, after_before)


@pytest.mark.parametrize("spec", SPECS)
def test_an_equal_generator_gives_equal_messages_and_states(spec: str) -> None:
    first, second = run(spec, update(), seed=3, rounds=2), run(spec, update(), seed=3, rounds=2)
    assert same(first[0], second[0])
    assert same(first[1], second[1])


@pytest.mark.parametrize("spec", SPECS)
def test_an_update_in_another_order_is_sent_the_same(spec: str) -> None:
    """Files and records may reorder keys; each tensor must be sent as before."""
    forward, backward = send(spec, update()), send(spec, dict(reversed(update().items())))
    assert list(backward) == list(reversed(forward))
    assert all(torch.equal(forward[name], backward[name]) for name in forward)


@pytest.mark.parametrize("name", NAMES)
def test_another_generator_differs_exactly_where_the_defense_is_random(name: str) -> None:
    first, second = (send(EXAMPLES[name], update(), seed=seed) for seed in (3, 4))
    assert same(first, second) == (not KINDS[name].random)


@pytest.mark.parametrize("name", RANDOM)
def test_noise_is_fresh_in_every_round(name: str) -> None:
    assert not same(run(EXAMPLES[name], update(), rounds=1)[0], run(EXAMPLES[name], update(), rounds=2)[0])


@pytest.mark.parametrize("spec", SPECS)
def test_global_randomness_is_neither_used_nor_changed(spec: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = send(spec, update())
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, send(spec, update()))


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_defense_changes_the_update(name: str) -> None:
    assert not same(send(EXAMPLES[name], update()), update())


@pytest.mark.parametrize("name", sorted(LIMITS))
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_limit_of_a_defense_sends_the_update_bit_for_bit(name: str, rounds: int) -> None:
    assert same(run(LIMITS[name], update(), rounds=rounds)[0], update())


def test_only_the_listed_defenses_have_no_limit() -> None:
    """No entry lacks a limit by mistake: these defenses always round or add noise."""
    assert set(NAMES) - set(LIMITS) == {
        *("sign", "qsgd", "uniform"),
        *("signsgd", "ef_signsgd", "rog_qsgd", "rog_uniform", "cpl_noise"),
    }


def measure_standard_errors(name: str) -> Tensor:
    """Return the distance of the mean of many messages from the update in standard errors, for coordinates that vary."""
    given = {"z.weight": torch.randn(3, 4, generator=seeded(5), dtype=torch.float64)}
    defense, stream = DefenseSpec.parse(EXAMPLES[name]).build(), seeded(6)
    state = defense.init(given)
    sent = torch.stack([defense.apply(given, state, stream)[0]["z.weight"] for _ in range(DRAWS)])
    error = sent.std(dim=0) / math.sqrt(DRAWS)
    assert (error > 0).any()
    away = (sent.mean(dim=0) - given["z.weight"]).abs()
    assert (away[error == 0] < 1e-12).all()
    return (away / error)[error > 0]


@pytest.mark.parametrize("name", RANDOM)
def test_the_mean_of_many_messages_is_the_update_exactly_where_that_is_declared(name: str) -> None:
    assert (measure_standard_errors(name).max().item() < 4) == KINDS[name].unbiased


@pytest.mark.parametrize("name", NAMES)
def test_only_random_defenses_are_called_unbiased(name: str) -> None:
    assert KINDS[name].random or not KINDS[name].unbiased


@pytest.mark.parametrize("nothing", [chain(), identity, DefenseSpec.parse("").build(), DefenseSpec().build()])
def test_the_empty_chain_is_the_identity(nothing: Defense) -> None:
    given = update()
    assert nothing.init(given) == {}
    sent, state = nothing.apply(given, {}, seeded())
    assert same(sent, given)
    assert state == {}


@pytest.mark.parametrize("spec", SPECS)
def test_a_chain_keeps_the_memory_of_two_equal_defenses_apart(spec: str) -> None:
    """The second defense of a chain gets the output of the first one, and not its state."""
    one = DefenseSpec.parse(spec).build()
    both = DefenseSpec.parse(" | ".join([spec, spec] if spec else [])).build()
    given, streams = update(), (seeded(1), seeded(1))
    state, first, second = both.init(given), one.init(given), one.init(given)
    for _ in range(3):
        sent, state = both.apply(given, state, streams[0])
        middle, first = one.apply(given, first, streams[1])
        expected, second = one.apply(middle, second, streams[1])
        assert same(sent, expected)
    assert len(state) == 2 * len(one.init(given))


@pytest.mark.parametrize("spec", SPECS)
def test_the_state_is_flat_and_has_only_tensors(spec: str) -> None:
    _, state = run(spec, update())
    assert all(isinstance(name, str) and isinstance(t, Tensor) for name, t in state.items())


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_have_a_short_summary_a_source_and_all_parameters(name: str) -> None:
    text = inspect.getdoc(KINDS[name].defense) or ""
    first = text.split("\n", 1)[0]
    assert first.endswith(".")
    assert len(first) < 125
    assert "Source: " in text or name in ("withhold", "masked")
    for parameter in inspect.signature(KINDS[name].defense).parameters:
        assert f"{parameter}:" in text or f"{parameter}," in text, parameter


@pytest.mark.parametrize("name", NAMES)
def test_the_file_format_suits_the_values_of_the_message(name: str) -> None:
    spec = DefenseSpec.parse(EXAMPLES[name])
    tensor = torch.randn(40, 50, generator=seeded(5))
    sent = send(EXAMPLES[name], {"z.weight": tensor})["z.weight"]
    different = len(sent.view(torch.int32).unique())
    unsent = (sent.view(torch.int32) == 0).sum().item()  # +0.0, bit for bit
    match spec.choose_codec():
        case "sparse":
            assert unsent >= 0.45 * sent.numel()
        case "bits":
            assert different == 2
        case "levels":
            assert different <= 7
        case "dense":
            assert different > 1000


@pytest.mark.parametrize(
    ("spec", "codec"),
    [
        ("", "dense"),
        ("clip(1)", "dense"),
        ("top_k(0.1) | clip(1)", "sparse"),
        ("top_k(0.1) | gaussian(0.1)", "dense"),
        ("gaussian(0.1) | top_k(0.1)", "sparse"),
        ("top_k(0.1) | qsgd(4)", "sparse"),
        ("qsgd(4) | top_k(0.1)", "sparse"),
        ("top_k(0.1) | sign", "bits"),
        ("uniform(3) | clip(1)", "levels"),
        ("masked(top_k(0.1), ['*'])", "sparse"),
        ("top_k(0.1) | masked(clip(1), ['*'])", "sparse"),
        ("in_gradient_units(sign, 0.1)", "bits"),
        ("top_k(0.1) | in_gradient_units(clip(1), 0.1)", "sparse"),
        ("clip(1) | withhold(['*'])", "sparse"),
        ("top_k(0.1) | liu_clip(1, 0.1)", "sparse"),
    ],
)
def test_the_file_format_of_a_chain_suits_its_output(spec: str, codec: CodecName) -> None:
    assert DefenseSpec.parse(spec).choose_codec() == codec
