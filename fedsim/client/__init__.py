"""Client of a federation: its Flower app, and a mod (a function around message handling) for other Flower apps."""

from fedsim.client.mod import update_mod

__all__ = ["update_mod"]
