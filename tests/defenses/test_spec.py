"""Tests of specifications: parsing inverts printing, unknown names are errors, and no code is run."""

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from defenses import DEFENSES, DefenseSpec, stateless
from defenses.channel import transparent
from defenses.spec import Kind, Step

numbers = st.one_of(st.integers(1, 10**6), st.floats(1e-300, 1e300))
shares = st.floats(0.001, 0.999)
flags = st.booleans()
words = st.lists(st.text("ab6.*?[] '\"\\\n-", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple)


def generate_steps(name: str, /, **arguments: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    """Generate steps as they are printed: arguments in the order of parameters, without default values."""
    parameters = inspect.signature(DEFENSES[name].defense).parameters

    def made(chosen: dict[str, object]) -> Step:
        return Step(name, tuple((key, chosen[key]) for key in arguments if chosen[key] != parameters[key].default))

    return st.fixed_dictionaries(arguments).map(made)


simple = st.one_of(
    generate_steps("clip", max_norm=numbers),
    generate_steps("gaussian", std=numbers),
    generate_steps("gaussian", snr_db=st.integers(-300, 300)),
    generate_steps("top_k", keep=shares, scope=st.sampled_from(["tensor", "global"]), error_feedback=flags),
    generate_steps("prune", threshold=numbers),
    generate_steps("dgc", keep=shares, momentum=shares, warm_up_rounds=st.integers(0, 9), nesterov=flags),
    generate_steps("sign"),
    generate_steps("sign", scale=st.just("mean"), error_feedback=flags),
    generate_steps("qsgd", levels=st.integers(1, 99), norm=st.just("linf"), kappa=shares),
    generate_steps("uniform", bits=st.integers(2, 24), stochastic=flags),
    generate_steps("withhold", names=words),
    generate_steps("cpl_noise", name=st.sampled_from(["G-10e-2", "L-10e-12"]), learning_rate=numbers),
)


def nested(inner: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    specs = st.lists(inner, min_size=1, max_size=3).map(lambda chosen: DefenseSpec(tuple(chosen)))
    return st.one_of(
        generate_steps("masked", defense=specs, names=words),
        generate_steps("in_gradient_units", defense=specs, learning_rate=st.floats(1e-6, 1e6)),
    )


steps = st.recursive(simple, nested, max_leaves=5)


@settings(deadline=None, max_examples=100)
@given(st.lists(steps, max_size=4))
def test_what_is_printed_reads_back_as_the_same_specification(chosen: list[Step]) -> None:
    spec = DefenseSpec(tuple(chosen))
    assert DefenseSpec.parse(str(spec)) == spec
    assert str(DefenseSpec.parse(str(spec))) == str(spec)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("", ""),
        ("clip(4)", "clip(4)"),
        ("clip(max_norm=4)", "clip(4)"),
        ("  clip( 4.0 )|gaussian(std = 1e-3) ", "clip(4.0) | gaussian(0.001)"),
        ("clip(1) | (gaussian(2) | clip(3))", "clip(1) | gaussian(2) | clip(3)"),
        ("sign", "sign()"),
        ("sign('none', error_feedback=False)", "sign('none', error_feedback=False)"),
        ("withhold(['6.*',\"a b\"])", "withhold(['6.*', 'a b'])"),
        ("withhold([])", "withhold([])"),
        ("masked( clip(1)|sign , names = ['*'])", "masked(clip(1) | sign(), ['*'])"),
        ("masked(masked(sign, 'a'), 'b') | sign", "masked(masked(sign(), 'a'), 'b') | sign()"),
        ("cpl_noise('G-10e-2', 0.1)", "cpl_noise('G-10e-2', 0.1)"),
    ],
)
def test_a_specification_prints_in_one_way(text: str, printed: str) -> None:
    assert str(DefenseSpec.parse(text)) == printed


def test_what_is_built_is_what_was_written() -> None:
    defense = DefenseSpec.parse("clip(2) | gaussian(0)").build()
    sent, _ = defense.apply({"w": torch.tensor([0.0, 8.0])}, {}, torch.Generator())
    assert sent["w"].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("clop(1)", ["'clop'", "Did you mean 'clip'?", "clip, clip_each, cpl_noise"]),
        ("nothing_like_it(1)", ["'nothing_like_it'", "clip, clip_each, cpl_noise"]),
        ("clip()", ["clip", "max_norm"]),
        ("clip(1, 2)", ["clip", "too many", "max_norm"]),
        ("clip(1, max=2)", ["'max'", "max_norm"]),
        ("clip(1, max_norm=2)", ["multiple values", "max_norm"]),
        ("clip(max_norm=1, max_norm=2)", ["clip"]),
        ("clip(0)", ["max_norm", "positive", "0"]),
        ("clip(1e999)", ["max_norm", "finite", "inf"]),
        ("clip('a')", ["max_norm must be a number, got 'a'"]),
        ("clip(True)", ["max_norm must be a number, got True"]),
        ("top_k(0.1, error_feedback='no')", ["error_feedback must be True or False, got 'no'"]),
        ("clip(None)", ["None", "must be a number"]),
        ("clip({[]})", ["{[]}"]),
        ("clip(x)", ["'x'"]),
        ("clip(*[1])", ["*[1]"]),
        ("clip(**{'max_norm': 1})", ["**"]),
        ("clip(1) |", ["clip(1) |", "write it as"]),
        ("clip(1) clip(2)", ["write it as"]),
        ("clip(1), clip(2)", ["expected NAME(ARGUMENTS)"]),
        ("clip(1) or clip(2)", ["clip(1) or clip(2)"]),
        ("clip(1); clip(2)", ["write it as"]),
        ("clip(1).x", ["clip(1).x"]),
        ("'clip(1)'", ["expected NAME(ARGUMENTS)"]),
        ("lambda: 1", ["lambda: 1"]),
        ("clip(" + "9" * 5000 + ")", ["write it as"]),
        ("(" * 300 + "clip(1)" + ")" * 300, ["write it as"]),
        ("clip(1)" + " | clip(1)" * 3000, ["write it as"]),
        ("clip(" + "-" * 3000 + "1)", ["write it as"]),
        ("clip(sign)", ["max_norm must be a number, got sign()"]),
        ("withhold(sign)", ["withhold", "names"]),
        ("clip(1) | withhold(3)", ["an argument of withhold(3) has the wrong type", "are: names: str |"]),
        ("withhold([sign])", ["[sign]"]),
        ("withhold([['a']])", ["[['a']]"]),
        ("masked('clip(1)', ['*'])", ["masked: the first argument must be a defense"]),
        ("masked(clip(1))", ["masked", "names"]),
        ("masked(clip(0), '*')", ["max_norm", "positive"]),
        ("masked(" * 90 + "sign" + ", '*')" * 90, ["8 deep"]),
        ("G-10e-2(1)", ["G-10e-2(1)"]),
    ],
)
def test_what_is_no_specification_is_refused_with_what_exists(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the words are checked below
        DefenseSpec.parse(text)
    for word in words:
        assert word in str(refused.value)


@settings(deadline=None, max_examples=150)
@given(st.one_of(st.text(max_size=30), st.text("clipgausn()|,.=1-*{}[]'\" \t\n\\", max_size=30)))
def test_junk_is_refused_or_reads_back(text: str) -> None:
    try:
        spec = DefenseSpec.parse(text)
    except ValueError:
        return
    assert DefenseSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "attack",
    [
        "__import__('pathlib').Path({marker!r}).touch()",
        "clip(__import__('pathlib').Path({marker!r}).touch())",
        "clip(max_norm=__import__('pathlib').Path({marker!r}).touch())",
        "clip(1 if __import__('pathlib').Path({marker!r}).touch() else 2)",
        "clip([open({marker!r}, 'w') for _ in (1,)])",
        "clip(f\"{{open({marker!r}, 'w')}}\")",
        "(lambda: open({marker!r}, 'w'))()",
        "(x := open({marker!r}, 'w'))",
        "clip.__globals__['math']",
        "exec('open({marker}, chr(119))')",
    ],
)
def test_nothing_in_a_specification_is_run(attack: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(ValueError, match=r"defense"):
        DefenseSpec.parse(attack.format(marker=str(marker)))
    assert not marker.exists()


def test_defaults_print_by_name_and_positional_arguments_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(size: int, mode: str = "soft", *, hard: bool = False):
        return stateless(lambda update, rng: update)

    monkeypatch.setitem(DEFENSES._builtin, "toy", Kind(toy, lambda *_, **__: transparent))
    spec = DefenseSpec.parse("toy(3, 'it\\'s', hard=True)")
    assert str(spec) == 'toy(3, mode="it\'s", hard=True)'
    assert DefenseSpec.parse(str(spec)) == spec
    assert str(DefenseSpec.parse("toy(hard=True, size=3)")) == "toy(3, hard=True)"
