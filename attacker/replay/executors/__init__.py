"""Executors: a process pool on this machine, a Ray cluster, and the worker processes that the pool and the service share."""

from collections.abc import Callable

__all__ = ["PATIENCE", "RETRIES", "OnProgress"]

RETRIES = 3
"""Times that a task is given to another worker after one has died of it, or was lost with it."""
PATIENCE = 60.0
"""Seconds that workers have to write their best so far after Ctrl-C."""
OnProgress = Callable[[int, float, str], None]
"""Is called with (number of a task, share of it that is done, a few words)."""
