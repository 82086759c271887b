"""Test settings: benchmarks are imported from their folder, as scripts are."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # at the end: a script there has the name of the package defenses
