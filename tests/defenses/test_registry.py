"""Tests of registries: built-in names, names from packages, and messages for unknown names."""

from importlib.metadata import EntryPoint, EntryPoints
from typing import Annotated

import pytest

from defenses.registry import Registry, bind_arguments, registry
from defenses.spec import DefenseSpec


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated installed package with entry points in the groups `things`, `others` and `broken`."""
    points = EntryPoints(
        [
            EntryPoint(name="gcd", value="math:gcd", group="things"),
            EntryPoint(name="own", value="math:lcm", group="things"),
            EntryPoint(name="elsewhere", value="math:pi", group="others"),
            EntryPoint(name="away", value="no_such_package:thing", group="broken"),
            EntryPoint(name="gone", value="math:no_such_thing", group="broken"),
            EntryPoint(name="number", value="math:pi", group="broken"),
            EntryPoint(name="fine", value="math:gcd", group="broken"),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda **wanted: points.select(**wanted))


def test_third_parties_add_names_and_what_is_built_in_wins(installed: None) -> None:
    import math

    things = Registry("things", {"own": len, "other": max})
    assert list(things) == ["gcd", "other", "own"]
    assert things["gcd"] is math.gcd
    assert things["own"] is len


def test_an_unknown_name_lists_what_exists_and_the_closest(installed: None) -> None:
    with pytest.raises(
        ValueError, match=r"unknown name 'gcb' in the registry things\. Did you mean 'gcd'\? Known: gcd, other, own"
    ):
        Registry("things", {"own": len, "other": max})["gcb"]


@pytest.mark.parametrize(("name", "setting"), [("dp_sgd", "gradient"), ("mixup", "inputs"), ("precode", "network")])
def test_a_name_that_another_setting_takes_is_named_with_that_setting(name: str, setting: str) -> None:
    with pytest.raises(ValueError, match=f"unknown name '{name}' .* It is a name for the key '{setting}' of an experiment"):
        DefenseSpec.parse(name)


@pytest.mark.parametrize(
    ("name", "of", "value"),
    [
        ("away", None, "'no_such_package:thing' of broken cannot be loaded: ModuleNotFoundError: .*no_such_package"),
        ("gone", None, "'math:no_such_thing' of broken cannot be loaded: AttributeError"),
        ("number", None, "'math:pi' of broken must be something that can be called, got float"),
        ("fine", tuple, "'math:gcd' of broken must be a builtins.tuple, got builtin_function_or_method"),
    ],
)
def test_an_entry_point_that_cannot_be_used_is_named(installed: None, name: str, of: type | None, value: str) -> None:
    with pytest.raises(ValueError, match=f"the entry point {name} = {value}"):
        Registry("broken", {}, of=of)[name]
    if of is None:
        assert Registry("broken", {})["fine"](4, 6) == 2


def test_arguments_are_bound_by_name_and_the_message_hides_what_is_not_the_users() -> None:
    def build(shape: int, width: int, depth: int = 2) -> None: ...

    assert bind_arguments("net", build, 3, given={"width": 4}) == {"shape": 3, "width": 4}
    with pytest.raises(ValueError, match=r"net: .*'hight'.* Its parameters: \(width: int, depth: int = 2\)"):
        bind_arguments("net", build, 3, given={"hight": 4, "width": 1}, hidden=1)


def test_messages_show_types_without_their_annotations() -> None:
    def attack(steps: int, start: Annotated[str, "one of these words"] = "dark") -> None: ...

    with pytest.raises(ValueError, match=r"Its parameters: \(steps: int, start: str = 'dark'\)"):
        bind_arguments("attack", attack, given={"step": 1})
