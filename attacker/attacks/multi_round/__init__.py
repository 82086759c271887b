"""Attacks on several rounds of one client together."""
