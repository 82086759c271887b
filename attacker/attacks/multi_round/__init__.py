"""Attacks that use several rounds together, of one client or of secure sums."""
