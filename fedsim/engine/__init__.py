"""Execution of an experiment: in this process, on Ray, or on a deployment."""
