"""Imports of benchmarks, which supply networks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))  # at the end: its defenses.py is no package
