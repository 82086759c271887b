"""Gradient matching: search for examples whose simulated gradient equals the observed one."""
