"""Folders are small enough to be read at a glance, and no modules import each other in a circle."""

from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
MAX_MODULES = 20
SCRIPTS = ROOT / "benchmarks"
"""Each file there is a command that users run; what they share lies in folders below."""


def test_no_folder_has_more_than_twenty_modules() -> None:
    modules = [
        path
        for package in ("attacker", "defenses", "fedleak", "fedsim", "benchmarks", "tests")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py" and path.parent != SCRIPTS
    ]
    large = {folder: count for folder, count in Counter(path.parent for path in modules).items() if count > MAX_MODULES}
    assert len(modules) > 500
    assert large == {}


def test_no_module_imports_itself_through_others() -> None:
    graph = grimp.build_graph("fedleak", "attacker", "fedsim", "defenses", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imported.values())) > 1000
    TopologicalSorter(imported).prepare()  # raises CycleError with the cycle
