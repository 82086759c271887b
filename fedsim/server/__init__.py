"""The server: its Flower app, and the recording of other Flower apps."""

from fedsim.strategies.record import record

__all__ = ["record"]
