"""Gradient matching: a search for examples whose simulated gradient equals the observed one."""
