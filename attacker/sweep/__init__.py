"""Grids of federations: defenses, attacks and training settings from one file, compared by the strongest attack on each."""

from attacker.sweep.comparison import SettingResult, compare_settings
from attacker.sweep.grid import GridError, SweepGrid, read_grid
from attacker.sweep.run import SweepProgress, SweepState, run_sweep

__all__ = [
    "GridError",
    "SettingResult",
    "SweepGrid",
    "SweepProgress",
    "SweepState",
    "compare_settings",
    "read_grid",
    "run_sweep",
]
