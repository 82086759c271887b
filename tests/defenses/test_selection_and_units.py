"""Tests of tensors selected by name, nested defenses, and units of the gradient."""

import math

import pytest
import torch
from generators import seeded
from registered_defenses import apply_once
from torch import Tensor

from defenses import Defense, DefenseSpec, channels, clip, gaussian, in_gradient_units, masked, sign, top_k, withhold


def update() -> dict[str, Tensor]:
    drawn = seeded(1)
    shapes = {"0.weight": (3, 2), "0.bias": (3,), "6.weight": (2, 3), "6.bias": (2,), "16.weight": (4,)}
    return {name: torch.randn(shape, generator=drawn, dtype=torch.float64) for name, shape in shapes.items()}


def touched(defense: Defense) -> set[str]:
    sent = apply_once(defense, update())
    assert list(sent) == list(update())
    return {name for name, t in update().items() if not torch.equal(sent[name], t)}


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ("6.*", {"6.weight", "6.bias"}),
        (["6.*"], {"6.weight", "6.bias"}),
        (["6.weight"], {"6.weight"}),
        (["*.bias"], {"0.bias", "6.bias"}),
        (["*6.weight"], {"6.weight", "16.weight"}),
        (["?.weight"], {"0.weight", "6.weight"}),
        (["[06].bias", "16.*"], {"0.bias", "6.bias", "16.weight"}),
        (["6.*", "6.bias"], {"6.weight", "6.bias"}),
        (["*"], set(update())),
    ],
)
def test_names_and_patterns_choose_tensors(names: str | list[str], chosen: set[str]) -> None:
    assert touched(withhold(names)) == chosen
    assert touched(masked(gaussian(1), names)) == chosen
    sent = apply_once(withhold(names), update())
    assert all((sent[name] == 0).all() for name in chosen)


def test_a_name_with_brackets_is_found_as_it_is_written() -> None:
    given = {"a[0]": torch.ones(2), "a0": torch.ones(2)}
    sent = apply_once(withhold(["a[0]"]), given)
    assert sent["a[0]"].tolist() == [0, 0]


def test_an_empty_list_of_patterns_withholds_nothing() -> None:
    assert touched(withhold([])) == set()


@pytest.mark.parametrize("what", ["withhold", "masked"])
@pytest.mark.parametrize("names", [["7.*"], ["6.*", "nothing"], ["6.WEIGHT"], ["6"], [""]])
def test_a_pattern_that_matches_nothing_is_refused_before_the_first_round(what: str, names: list[str]) -> None:
    defense = withhold(names) if what == "withhold" else masked(clip(1), names)
    wrong = names[-1]
    with pytest.raises(ValueError, match="no tensor's name matches") as refused:
        defense.init(update())
    assert str(refused.value) == (
        f"{what}: no tensor's name matches {wrong!r}; there are 0.weight, 0.bias, 6.weight, 6.bias, 16.weight"
    )


def test_of_many_names_only_some_are_shown() -> None:
    with pytest.raises(ValueError, match=r"there are 0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$"):
        withhold("x").init({str(i): torch.zeros(1) for i in range(1000)})


def test_names_must_be_strings_and_a_mask_needs_one() -> None:
    with pytest.raises(ValueError, match=r"withhold: each entry of the argument `names` must be a string, .* got 3"):
        withhold([3])
    with pytest.raises(ValueError, match="masked: names must have at least one name or pattern"):
        masked(clip(1), [])
    with pytest.raises(ValueError, match="masked: the first argument must be a defense"):
        masked(1, "*")


def test_a_masked_defense_sees_its_tensors_as_the_whole_update() -> None:
    """Clipping uses the norm of the selected tensors, not of all."""
    sent = apply_once(masked(clip(0.5), ["6.*"]), update())
    length = torch.cat([sent["6.weight"].flatten(), sent["6.bias"]]).norm()
    assert length.item() == pytest.approx(0.5)
    alone = apply_once(clip(0.5), {name: t for name, t in update().items() if name.startswith("6.")})
    assert all(torch.equal(sent[name], alone[name]) for name in alone)


def test_a_masked_defense_keeps_its_memory() -> None:
    defense = masked(top_k(0.5, error_feedback=True), "w")
    given = {"w": torch.tensor([3.0, -2.0]), "b": torch.tensor([1.0])}
    state = defense.init(given)
    first, state = defense.apply(given, state, seeded())
    second, state = defense.apply(given, state, seeded())
    assert first["w"].tolist() == [3, 0]
    assert second["w"].tolist() == [0, -4]
    assert second["b"].tolist() == [1]


def test_a_masked_channel_acts_on_its_tensors_alone() -> None:
    seen = update()
    channel = channels.masked(channels.gaussian(2.0), ["6.*"])
    assert channel.noise(seen).item() == 4 * 8
    halves = channels.masked(channels.top_k(0.5), ["0.weight"])
    expected = halves.expect(seen, halves.learn(apply_once(masked(top_k(0.5), ["0.weight"]), seen)))
    assert (expected["0.weight"] != 0).sum() == 3
    assert all(torch.equal(expected[name], seen[name]) for name in seen if name != "0.weight")
    assert list(expected) == list(seen)


def test_a_masked_channel_learns_from_its_tensors_alone() -> None:
    """The threshold is computed from the selected tensors; the others, which are larger, do not count."""
    seen = {"a": torch.tensor([4.0, 3.0, 0.0, 0.0]), "b": torch.full((4,), 9.0)}
    channel = channels.masked(channels.top_k(0.5, scope="global"), ["a"])
    known = channel.learn(seen)
    assert list(known) == ["a", "threshold/a"]
    assert known["a"].tolist() == [True, True, False, False]
    assert float(known["threshold/a"]) == 3.0


def test_an_attacker_expects_nothing_of_what_is_withheld() -> None:
    expected = channels.withhold(["6.*"]).expect(update(), {})
    assert (expected["6.weight"] == 0).all()
    assert torch.equal(expected["0.weight"], update()["0.weight"])


# --- units of the gradient ---


@pytest.mark.parametrize("learning_rate", [0.1, 3.0])
def test_noise_on_the_gradient_is_the_learning_rate_times_as_large_on_the_update(learning_rate: float) -> None:
    given = {"w": torch.zeros(1000, dtype=torch.float64)}
    sent = apply_once(in_gradient_units(gaussian(0.5), learning_rate), given, 3)["w"]
    expected = -learning_rate * 0.5 * torch.randn(1000, generator=seeded(3), dtype=torch.float64)
    assert torch.allclose(sent, expected, rtol=1e-12)
    power = channels.in_gradient_units(channels.gaussian(0.5), learning_rate).noise(given).item()
    assert power == pytest.approx(1000 * (0.5 * learning_rate) ** 2)


def test_a_clip_of_the_gradient_is_one_of_the_update_at_the_learning_rate_times_the_bound() -> None:
    for given in (update(), {name: t / 100 for name, t in update().items()}):
        sent = apply_once(in_gradient_units(clip(2), 0.1), given)
        expected = apply_once(clip(0.2), given)
        assert all(torch.allclose(sent[name], expected[name], rtol=1e-12) for name in given)


def test_the_sign_that_counts_is_that_of_the_gradient() -> None:
    """A zero counts as positive in the gradient, so that it is negative in the update."""
    assert apply_once(in_gradient_units(sign(), 0.5), {"w": torch.tensor([2.0, -3.0, 0.0])})["w"].tolist() == [0.5, -0.5, -0.5]


@pytest.mark.parametrize("spec", ["uniform(3)", "top_k(0.5)"])
def test_a_channel_learns_in_units_of_the_gradient(spec: str) -> None:
    """A quantisation interval of the gradient is wider than that of the update, but the expectation is the same."""
    given = {"w": torch.randn(50, generator=seeded(1), dtype=torch.float64)}
    guess = {"w": torch.randn(50, generator=seeded(2), dtype=torch.float64)}
    plain, converted = DefenseSpec.parse(spec), DefenseSpec.parse(f"in_gradient_units({spec}, 0.01)")
    expected = []
    for one in (plain, converted):
        channel = one.build_channel()
        expected.append(channel.expect(guess, channel.learn(apply_once(one.build(), given)))["w"])
    assert torch.allclose(expected[0], expected[1], atol=1e-12)


def test_a_defense_that_remembers_does_so_in_units_of_the_gradient() -> None:
    defense = in_gradient_units(top_k(0.5, error_feedback=True), 0.5)
    given = {"w": torch.tensor([3.0, -2.0])}
    state = defense.init(given)
    _, state = defense.apply(given, state, seeded())
    assert [t.tolist() for t in state.values()] == [[0, 4]]
    sent, _ = defense.apply(given, state, seeded())
    assert sent["w"].tolist() == [0, -4]


@pytest.mark.parametrize("learning_rate", [0, -0.1, math.inf, math.nan])
def test_an_invalid_learning_rate_is_refused(learning_rate: float) -> None:
    with pytest.raises(ValueError, match=f"learning_rate must be positive and finite, got {learning_rate}"):
        in_gradient_units(clip(1), learning_rate)


def test_the_learning_rate_of_the_training_is_filled_in_at_any_depth() -> None:
    spec = DefenseSpec.parse("masked(in_gradient_units(clip(1)), '*') | G-10e-3 | liu_clip(4)", learning_rate=0.1)
    assert str(spec) == "masked(in_gradient_units(clip(1), 0.1), '*') | cpl_noise('G-10e-3', 0.1) | liu_clip(4, 0.1)"
    assert str(DefenseSpec.parse("in_gradient_units(clip(1), 0.5)", learning_rate=0.1)) == "in_gradient_units(clip(1), 0.5)"
    with pytest.raises(ValueError, match="missing a required argument: 'learning_rate'"):
        DefenseSpec.parse("in_gradient_units(clip(1))")
