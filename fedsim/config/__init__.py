"""Experiments: the TOML file that describes a federation, read, checked, and with all defaults filled in."""

from fedsim.config.experiment import Experiment, ExperimentError, read, validate

__all__ = ["Experiment", "ExperimentError", "read", "validate"]
