"""Experiments: the TOML file that describes a federation, read, checked, and with all defaults filled in."""
