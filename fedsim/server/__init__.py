"""The server's side: its Flower app, and a recording strategy for the apps of others."""

from fedsim.strategies.record import record

__all__ = ["record"]
