"""Folders of the packages and of their tests stay small enough to be read at a glance."""

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_MODULES = 20


def test_no_folder_has_more_than_twenty_modules() -> None:
    modules = [
        path
        for package in ("attacker", "defenses", "fedleak", "fedsim", "benchmarks", "tests")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    ]
    large = {folder: count for folder, count in Counter(path.parent for path in modules).items() if count > MAX_MODULES}
    assert len(modules) > 500
    assert large == {}
