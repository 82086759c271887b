"""Gradient matching: a search for examples whose simulated gradient is as close as possible to the observed one."""
