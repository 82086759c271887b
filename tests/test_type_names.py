"""A class name means one thing in the whole tree: no two modules define a class of the same name."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("attacker", "defenses", "fedleak", "fedsim")


def classes_of(source: str) -> Iterator[str]:
    """Names of the classes at the top of a module, without those that no other module may use.

    Private classes (`_Reader`) are read in their own module alone, and nested ones are named after their owner.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that several modules define, with those modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for name in classes_of(source):
            places[name].append(module)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def test_no_two_modules_define_a_class_of_one_name() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(paths) > 300
    assert shared_names({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}) == {}


def test_a_shared_name_is_found() -> None:
    sources = {
        "a.py": "class Row: ...\nclass _Row: ...",
        "b.py": "class Row:\n    class Column: ...",
        "c.py": "class Column: ...",
    }
    assert shared_names(sources) == {"Row": ["a.py", "b.py"]}
