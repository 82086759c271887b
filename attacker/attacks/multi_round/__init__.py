"""Attacks that use several rounds of one client together."""
