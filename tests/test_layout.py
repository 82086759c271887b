"""Tests that folders have few modules, that imports have no cycles, and that no two types have the same name."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
MAX_MODULES = 20


def test_no_folder_has_more_than_twenty_modules() -> None:
    modules = [
        path
        for package in ("attacker", "defenses", "fedleak", "fedsim", "benchmarks", "tests")
        for path in (ROOT / package).rglob("*.py")
    ]
    large = {folder: count for folder, count in Counter(path.parent for path in modules).items() if count > MAX_MODULES}
    assert len(modules) > 500
    assert large == {}


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("fedleak", "attacker", "fedsim", "defenses", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imported.values())) > 1000
    TopologicalSorter(imported).prepare()  # raises CycleError with the cycle


def test_no_two_types_have_the_same_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for package in ("attacker", "defenses", "fedleak", "fedsim", "benchmarks"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in _type_names(ast.parse(path.read_text())):
                homes[name].append(str(path.relative_to(ROOT)))
    assert len(homes) > 500
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def _type_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the classes of a module, and of its aliases of types, which are written like classes."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name) and _is_like_a_class(name.id):
            yield name.id


def _is_like_a_class(name: str) -> bool:
    name = name.lstrip("_")
    return name[:1].isupper() and not name.isupper()
