"""The client: its Flower app, and a mod for other Flower apps."""

from fedsim.client.mod import update_mod

__all__ = ["update_mod"]
