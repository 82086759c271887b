"""Modules that the benchmark scripts share. Importing this package first keeps benchmarks/defenses.py from hiding `defenses`."""

import sys
from importlib import import_module
from pathlib import Path


def _import_package_before_script(name: str) -> None:
    """Import the package `name` now, since a later import would find the script of the same name in benchmarks/ instead."""
    here = str(Path(__file__).parents[1])
    before, sys.path[:] = list(sys.path), [entry for entry in sys.path if entry != here]
    import_module(name)
    sys.path[:] = before


_import_package_before_script("defenses")
