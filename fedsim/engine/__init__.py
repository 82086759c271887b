"""Execution of an experiment: on Ray, in this process, or as processes that communicate over a network."""
