"""Names: what is built in, what third parties add, and what is said of a name that nobody knows."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from defenses import registry
from defenses.registry import Registry, bind


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were installed that adds two names to a group."""
    points = EntryPoints(
        [
            EntryPoint(name="gcd", value="math:gcd", group="things"),
            EntryPoint(name="own", value="math:lcm", group="things"),
            EntryPoint(name="elsewhere", value="math:pi", group="others"),
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
    with pytest.raises(ValueError, match=r"unknown name 'gcb' in things\. Did you mean 'gcd'\? Known: gcd, other, own"):
        Registry("things", {"own": len, "other": max})["gcb"]


def test_arguments_are_bound_by_name_and_the_message_hides_what_is_not_the_users() -> None:
    def build(shape: int, width: int, depth: int = 2) -> None: ...

    assert bind("net", build, 3, given={"width": 4}) == {"shape": 3, "width": 4}
    with pytest.raises(ValueError, match=r"net: .*'hight'.* Its parameters: \(width: int, depth: int = 2\)"):
        bind("net", build, 3, given={"hight": 4, "width": 1}, hidden=1)
