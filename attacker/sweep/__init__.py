"""Sweeps: grids of federations with different defenses and training settings, each judged by its strongest attack."""

from attacker.sweep.comparison import SettingResult, compare_settings
from attacker.sweep.grid import GridError, SweepGrid, read_grid
from attacker.sweep.run import SweepProgress, SweepResults, run_sweep

__all__ = [
    "GridError",
    "SettingResult",
    "SweepGrid",
    "SweepProgress",
    "SweepResults",
    "compare_settings",
    "read_grid",
    "run_sweep",
]
