"""Optimisers of many independent problems at once, and the loop that runs them."""
