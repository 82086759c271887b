"""A class name means one thing in the whole tree: no two modules define it, nor is it a type alias elsewhere."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("attacker", "defenses", "fedleak", "fedsim")


ALIAS = re.compile(r"[A-Z][a-z]\w*|[A-Z]")
"""Names of type aliases and type variables; constants are in capitals."""


def classes_of(source: str) -> Iterator[str]:
    """Names of the classes at the top of a module, without those that no other module may use.

    Private classes (`_Reader`) are read in their own module alone, and nested ones are named after their owner.
    """
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def aliases_of(source: str) -> Iterator[str]:
    """Names of the type aliases at the top of a module. Several modules may have the same one: it only abbreviates a type."""
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name) and ALIAS.fullmatch(target.id))


def shared_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Class names that other modules use for a class, or a type alias, of their own: by name, the modules."""
    classes: dict[str, list[str]] = defaultdict(list)
    aliases: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for name in classes_of(source):
            classes[name].append(module)
        for name in aliases_of(source):
            aliases[name].append(module)
    return {name: modules + aliases[name] for name, modules in classes.items() if len(modules) + len(aliases[name]) > 1}


def test_a_class_name_means_one_thing() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(paths) > 300
    assert shared_names({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}) == {}


def test_a_shared_name_is_found() -> None:
    sources = {
        "a.py": "class Row: ...\nclass _Row: ...\nIndex = int",
        "b.py": "class Row:\n    class Column: ...\nMOST = 3\nIndex = int",
        "c.py": "class Column: ...\nclass MOST: ...",
        "d.py": "Column: object = dict",
    }
    assert shared_names(sources) == {"Row": ["a.py", "b.py"], "Column": ["c.py", "d.py"]}
