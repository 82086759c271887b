"""Optimisers of many independent problems at once."""
