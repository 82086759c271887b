"""Experiments: the file that describes a federation, checked and resolved."""

from fedsim.config.experiment import Experiment, ExperimentError, read, validate

__all__ = ["Experiment", "ExperimentError", "read", "validate"]
