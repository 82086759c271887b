"""Executors of a replay: a process pool, a Ray cluster, and the worker processes that the pool and the HTTP service share."""

from collections.abc import Callable

__all__ = ["INTERRUPT_SECONDS", "MAX_RETRIES", "OnProgress"]

MAX_RETRIES = 3
"""Largest number of times that a task is retried after its worker died or was lost."""
INTERRUPT_SECONDS = 60.0
"""Seconds that workers have after Ctrl-C to write their best results so far."""
OnProgress = Callable[[int, float, str], None]
"""Callback with (number of a task, share of it that is done, a few words)."""
