"""The server: its Flower app, and `record`, which records the training of other Flower apps."""

from fedsim.strategies.record import record

__all__ = ["record"]
